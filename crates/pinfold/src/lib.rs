//! The Linux kernel's per-CPU memory machinery for user-space programs.
//!
//! ```
//! use pinfold::counter::PerCpuCounter;
//! use pinfold::slab::Cache;
//! use std::thread;
//!
//! static IN_FLIGHT: PerCpuCounter = PerCpuCounter::new();
//!
//! let packets = Cache::<[u8; 1500]>::new("packet")?;
//! thread::scope(|scope| {
//!     for _ in 0..4 {
//!         scope.spawn(|| {
//!             // Takes an object of this CPU: no lock, no atomic instruction.
//!             let mut packet = packets.alloc([0; 1500]).expect("memory");
//!             IN_FLIGHT.inc();
//!             packet[0] = 1;
//!             // The handle frees the object at its end, like a `Box`.
//!         });
//!     }
//! });
//! // Exact, also while other threads add. `read` is a few loads, off by at most `error_bound`.
//! assert_eq!(IN_FLIGHT.sum(), 4);
//! # Ok::<(), pinfold::slab::CacheError>(())
//! ```
//!
//! # Which module to use
//!
//! | need | module |
//! |---|---|
//! | allocate many objects of one type or size | [`slab`] |
//! | free objects that readers without a lock may still use | [`slab::grace`] |
//! | count, with cheap adds and exact sums | [`counter`] |
//! | count by item and node, as in `/proc/vmstat` | [`vmstat`] |
//! | keep data of your own for each CPU: words, lists, rings | [`percpu`] |
//! | share a value by handles that many threads clone and drop | [`arc`] |
//! | choose the nodes that memory comes from | [`mempolicy`] |
//! | allocate single pages, with a policy for each range | [`pages`] |
//! | ask which CPUs and nodes there are, and which this process may use | [`topology`] |
//! | keep approximate reads fresh, and give idle memory back | [`shepherd`] |
//! | limit the memory that is held, and read how much that is | [`memory`] |
//! | show counters to other processes | [`export`] |
//!
//! The global allocator on top of this crate is the crate `pinfold-malloc`. The folder `examples`
//! has a program for each of the first six needs.
//!
//! # Features
//!
//! * `allocator-api2`: caches as allocators of collections.
//! * `symbols`: reports of debugging name the functions of call stacks. Needs the standard library.
#![no_std]

#[cfg(test)]
extern crate std;

mod account;
pub mod arc;
mod arena;
mod cache_units;
pub mod counter;
mod counter_units;
mod fork;
mod guarded;
mod heap;
pub mod heaps;
#[doc(hidden)]
pub mod internal;
pub mod isolate;
mod last_words;
mod lock;
pub mod mempolicy;
mod nodes;
pub mod pages;
pub mod percpu;
mod profile;
mod sanitizer;
mod segment;
pub mod shepherd;
mod show;
pub mod slab;
mod spared;
mod sys;
pub mod topology;
pub mod vmstat;

pub mod memory {
    //! How much memory the library holds, and how much it may hold.

    pub use crate::arena::{
        ARENA_STAT, ArenaItem, HugePages, HugePagesError, Limit, LimitError, NUMA_STAT, NodeStat,
        NumaItem, dirty, dirty_limit, dirty_time, hard_limit, held, held_peak, huge_pages,
        huge_total, large_in_use, limit, memory_limit, metadata_mapped, returned, set_dirty_limit,
        set_dirty_time, set_huge_pages, set_limit, set_memory_limit, trim,
    };
}

pub mod export {
    //! Counters that other processes see, as with `pinfold stat`.

    pub use crate::segment::{
        Counted, CountedSet, CounterKind, ShowError, hide, hide_at, show, show_set,
    };
}

/// Ends the process as `sys::die` does, and writes the thread's call stack after the message. The
/// walk may allocate, so the caller holds no lock of this library.
#[cold]
pub(crate) fn abort_with_callers(message: core::fmt::Arguments<'_>) -> ! {
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

/// Compiles the example of docs/isolation.md.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/isolation.md")]
struct IsolationDocumentation;

/// Runs the README's example as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
