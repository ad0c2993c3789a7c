//! The Linux kernel's per-CPU memory machinery for user-space programs.
//!
//! The modules from top to bottom. Each uses only the modules below it:
//!
//! * [`pages`]: allocates single pages by memory policy.
//! * [`slab`]: object caches, and [`slab::kmalloc`], caches by size.
//! * [`arena`]: takes memory from the system and gives it back, for each node.
//! * [`segment`]: the statistics that a process shows to other processes.
//! * [`vmstat`]: counts by item and zone.
//! * [`mempolicy`]: which nodes memory comes from. Useful without the allocator too.
//! * [`shepherd`]: folds counts from another CPU, and makes idle caches give memory back.
//! * [`counter`]: counts that each CPU adds to on its own.
//! * [`profile`]: which call stacks allocated the memory, by samples.
//! * [`percpu`]: per-CPU variables, lists and rings for a program's own data.
//! * [`topology`]: the CPUs and nodes, and which of them this process may use.
#![no_std]

#[cfg(test)]
extern crate std;

pub mod arena;
mod cache_units;
pub mod counter;
mod counter_units;
#[doc(hidden)]
pub mod fork;
pub mod guarded;
#[doc(hidden)]
pub mod internal {
    //! What the other crates of this workspace use. Other crates must not: it may change in any
    //! release.

    pub use crate::sys::{coarse_milliseconds, decimal, errno, keep_errno, set_errno, uncancelled};
}
mod last_words;
mod lock;
pub mod mempolicy;
mod nodes;
pub mod pages;
pub mod percpu;
pub mod profile;
mod sanitizer;
pub mod segment;
pub mod shepherd;
pub mod slab;
mod sys;
pub mod topology;
pub mod vmstat;

/// Ends the process with a message on standard error, after an invariant was violated.
///
/// Going on would lose data. Allocates nothing.
#[doc(hidden)]
#[cold]
pub fn abort(message: core::fmt::Arguments<'_>) -> ! {
    sys::die(message)
}

/// Ends the process as [`abort`] does, and writes the thread's call stack after the message. The
/// walk may allocate, so the caller holds no lock of this library.
#[doc(hidden)]
#[cold]
pub fn abort_with_callers(message: core::fmt::Arguments<'_>) -> ! {
    last_words::write(message);
    slab::debug::write_callers();
    // SAFETY: `abort` has no preconditions.
    unsafe { libc::abort() }
}

/// Runs the examples of docs/object-caches.md as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/object-caches.md")]
struct ObjectCachesDocumentation;

/// Runs the examples of docs/counters.md as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/counters.md")]
struct CountersDocumentation;

/// Runs the examples of docs/slabinfo.md as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/slabinfo.md")]
struct SlabinfoDocumentation;

/// Runs the examples of docs/mempolicy.md as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/mempolicy.md")]
struct MempolicyDocumentation;

/// Runs the examples of docs/percpu.md as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/percpu.md")]
struct PercpuDocumentation;
