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
//! The files, bottom-up: `abi` the kernel's numbers; `mode`; `policy` the value; `parse` and `format` the text; `bind`;
//! `calls` and `pages` the system calls; `weights`, `order` and `place` where pages go; `effective` which policy holds.

mod abi;
mod bind;
mod calls;
mod effective;
mod error;
mod format;
mod mode;
mod order;
mod pages;
mod parse;
mod parse_error;
mod place;
mod policy;
mod refusal;
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
pub use policy::{Mempolicy, SYSTEM_DEFAULT};
pub use weights::Weights;

#[expect(unused_imports, reason = "for tables of policies")]
pub(crate) use policy::WORDS;
