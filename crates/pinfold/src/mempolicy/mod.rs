//! NUMA policies, which say from which nodes memory comes: the kernel's policies as values, as text
//! and as system calls.
//!
//! This module works without the allocator. Nothing in it uses the global allocator, prints, or
//! ends the process.
//!
//! # Vocabulary
//!
//! * A *policy* ([`Mempolicy`]) is a [`Mode`], its [`Flags`] and its nodes.
//! * The *allowed* nodes are those that the process may use: its cpuset's nodes.
//! * A policy's *user nodes* are the nodes that the user named. Its *nodes* are the nodes from
//!   which memory comes. They follow from the user nodes and the allowed nodes.
//! * *Binding* computes a policy's nodes from its user nodes and the allowed nodes:
//!   [`Mempolicy::contextualize`] when a policy is put to use, [`Mempolicy::rebind`] when the
//!   allowed nodes change.
//! * A policy holds for a *range* of addresses or for a *thread*. The *effective* policy of an
//!   allocation is the range's policy, else the thread's policy, else [`SYSTEM_DEFAULT`]. A
//!   `default` policy counts as no policy.
//! * A *shared policy* ([`SharedPolicy`]) maps ranges of pages to policies, for all its users.
//!
//! # Files, bottom-up
//!
//! | files | content |
//! |---|---|
//! | `abi` | the kernel's numbers |
//! | `mode`, `policy`, `error` | the policy as a value |
//! | `parse`, `parse_error` | the policy as text |
//! | `bind` | binding |
//! | `calls`, `pages`, `refusal` | the system calls |
//! | `weights`, `order`, `zonelist` | where pages go |
//! | `latch`, `table`, `ranges`, `shared` | policies by range |
//! | `placement`, `process`, `noted` | how the allocator follows policies |

mod abi;
mod bind;
mod calls;
mod error;
mod latch;
mod mode;
mod noted;
mod order;
mod pages;
mod parse;
mod parse_error;
mod placement;
mod policy;
mod process;
mod ranges;
mod refusal;
mod shared;
mod table;
mod weights;
mod zonelist;

pub use calls::{
    Move, apply, available, mems_allowed, node_at, policy_at, set_for_thread, set_home_node, thread,
};
pub use error::{PolicyError, Syscall};
pub use mode::{Flags, Mode};
pub(crate) use noted::placement_of_thread;
pub use noted::thread_changed;
pub use order::Distances;
pub use pages::{PageNode, migrate, move_pages, nodes_of_pages};
pub use parse_error::{ParseError, Wrong};
pub(crate) use placement::Placement;
pub use policy::{Mempolicy, SYSTEM_DEFAULT, effective};
pub use process::VARIABLE;
pub(crate) use process::init;
pub use ranges::RangeError;
pub use shared::{SharedPolicy, SharedRanges};
pub use weights::Weights;
pub use zonelist::{node_for, zonelist};

/// The atomics that `latch` uses. Its model in loom replaces this module by loom's atomics.
mod primitive {
    pub(super) use core::sync::atomic::{AtomicPtr, AtomicU64, fence};
}
