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
mod error;
mod format;
mod mode;
mod parse;
mod parse_error;
mod policy;
mod refusal;

pub use error::{Call, PolicyError};
pub use mode::{Flags, Mode};
pub use parse_error::{ParseError, Wrong};
#[allow(
    unused_imports,
    reason = "for those who keep policies where many threads look"
)]
pub(crate) use policy::WORDS;
pub use policy::{Mempolicy, SYSTEM_DEFAULT};
