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
//!
//! The files, bottom-up: `abi` the kernel's numbers; `mode`; `policy` the value; `parse` and `format` the text; `bind`.

mod abi;
mod bind;
mod buffer;
mod calls;
mod error;
mod format;
mod latch;
mod mode;
mod parse;
mod parse_error;
mod placement;
mod policy;
mod process;
mod ranges;
mod refusal;
mod shared;

pub use error::{Call, PolicyError};
pub use mode::{Flags, Mode};
pub use parse_error::{ParseError, Wrong};
pub(crate) use placement::Placement;
#[allow(
    unused_imports,
    reason = "for those who keep policies where many threads look"
)]
pub(crate) use policy::WORDS;
pub use policy::{Mempolicy, SYSTEM_DEFAULT};
pub use process::VARIABLE;
pub(crate) use process::init;
pub use ranges::RangeError;
pub(crate) use ranges::{fork_done, fork_prepare, is_lock_held};
pub use shared::SharedPolicy;

/// What the model in loom replaces.
mod primitive {
    pub(super) use core::sync::atomic::{AtomicPtr, AtomicU64, fence};
}
