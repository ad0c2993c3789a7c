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
//! `latch`, `buffer`, `ranges` and `shared` policies by range.

mod abi;
mod bind;
mod buffer;
mod error;
mod format;
mod latch;
mod mode;
mod parse;
mod parse_error;
mod policy;
mod ranges;
mod refusal;
mod shared;

pub use error::{Call, PolicyError};
pub use mode::{Flags, Mode};
pub use parse_error::{ParseError, Wrong};
pub use policy::{Mempolicy, SYSTEM_DEFAULT};
pub use ranges::RangeError;
pub(crate) use ranges::{fork_done, fork_prepare, is_lock_held};
pub use shared::{SharedPolicy, SharedRanges};

/// The atomics of `latch`, which its model replaces by loom's.
mod primitive {
    pub(super) use core::sync::atomic::{AtomicPtr, AtomicU64, fence};
}
