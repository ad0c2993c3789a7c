//! Which nodes memory comes from: the kernel's NUMA policies as values, as text, and as calls.
//!
//! Useful without the allocator: nothing here allocates, prints or ends the process.
//!
//! Vocabulary:
//!
//! * A *policy* ([`Mempolicy`]) is a [`Mode`], its [`Flags`] and its nodes.
//! * Its *user nodes* are what was asked for; its *nodes* are what that comes to where the process may use only some of the
//!   machine's nodes (its cpuset's *allowed* ones). *Binding* makes the one from the other: [`Mempolicy::contextualize`] when a
//!   policy is put to use, [`Mempolicy::rebind`] when the allowed nodes change.
//! * A policy holds for a *range* of addresses or for a *thread*. The *effective* one of an allocation is the range's, else the
//!   thread's, else [`SYSTEM_DEFAULT`]; a `default` policy counts as none.
//! * A *shared policy* ([`SharedPolicy`]) has a policy for each of some ranges of pages, for all who use them.
//!
//! The files, bottom-up: `abi` the kernel's numbers; `mode`; `policy` the value; `parse` and `format` the text; `bind`;
//! `calls` and `pages` the system calls; `weights`, `order` and `place` where pages go; `effective` which policy holds;
//! `latch`, `buffer`, `ranges` and `shared` policies by range; `placement` and `process` what the allocator makes of them.

mod abi;
mod bind;
mod buffer;
mod calls;
mod effective;
mod error;
mod format;
mod latch;
mod mode;
mod order;
mod pages;
mod parse;
mod parse_error;
mod place;
mod placement;
mod policy;
mod process;
mod ranges;
mod refusal;
mod shared;
mod weights;

pub use calls::{
    Move, apply, available, mems_allowed, node_at, policy_at, set_for_thread, set_home_node, thread,
};
pub use effective::effective;
pub use error::{Call, PolicyError};
pub use mode::{Flags, Mode};
pub use order::Distances;
pub use pages::{PageNode, migrate, move_pages, nodes_of_pages};
pub use parse_error::{ParseError, Wrong};
pub use place::{node_for, zonelist};
pub(crate) use placement::Placement;
pub use policy::{Mempolicy, SYSTEM_DEFAULT};
pub use process::VARIABLE;
pub(crate) use process::init;
pub use ranges::RangeError;
pub(crate) use ranges::is_lock_held;
pub use shared::{SharedPolicy, SharedRanges};
pub use weights::Weights;

/// The atomics of `latch`, which its model replaces by loom's.
mod primitive {
    pub(super) use core::sync::atomic::{AtomicPtr, AtomicU64, fence};
}
