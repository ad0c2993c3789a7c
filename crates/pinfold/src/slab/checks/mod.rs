//! Debugged and hardened caches, and the objects that profiles follow.

pub mod debug;
pub(crate) mod debugged;
pub(crate) mod debugged_node;
pub(crate) mod guard;
pub(crate) mod harden;
pub(crate) mod key;
pub(crate) mod sampled;
