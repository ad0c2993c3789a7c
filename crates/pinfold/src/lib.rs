//! The Linux kernel's per-CPU memory machinery for user-space programs.
//!
//! Modules, top-down; each uses only those below it:
//!
//! * [`pages`]: single pages by memory policy.
//! * [`slab`]: object caches, and [`slab::kmalloc`], caches by size.
//! * [`page`]: memory from the system, by node.
//! * [`segment`]: the statistics that a process shows to others.
//! * [`vmstat`]: counts by item and zone.
//! * [`mempolicy`]: which nodes memory comes from; useful without the allocator.
//! * [`shepherd`]: folds counts from afar, and has idle caches give back.
//! * [`counter`]: counts that every CPU adds to on its own.
//! * [`topology`]: CPUs and nodes, and what this process may use of them.
#![no_std]

#[cfg(test)]
extern crate std;

pub mod counter;
#[doc(hidden)]
pub mod fork;
mod lock;
pub mod mempolicy;
mod nodes;
pub mod page;
pub mod pages;
mod percpu;
pub mod segment;
pub mod shepherd;
pub mod slab;
mod sys;
pub mod topology;
pub mod vmstat;

/// Ends the process with a message on standard error, for a violated invariant: going on would lose data. Allocates
/// nothing.
#[doc(hidden)]
#[cold]
pub fn abort(message: core::fmt::Arguments<'_>) -> ! {
    sys::die(message)
}

/// The README's examples, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// The examples in docs/slabinfo.md, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/slabinfo.md")]
struct SlabinfoDocumentation;

/// The examples in docs/mempolicy.md, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/mempolicy.md")]
struct MempolicyDocumentation;
