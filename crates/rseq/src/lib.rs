//! Restartable sequences for Rust: per-CPU operations without locks, atomics or system calls.
//!
//! A thread that works on its CPU's data can lose that CPU at any instruction, to another thread or
//! to a signal handler. Locks and atomic read-modify-writes protect the data, but cost tens of
//! cycles.
//!
//! Restartable sequences (rseq) avoid this cost with the kernel's help. A sequence is a short run
//! of instructions that loads the current CPU's number, works on that CPU's data with plain loads
//! and stores, and ends with one store that makes the work visible: the commit. If the kernel
//! preempts, migrates or signals the thread inside the sequence, the sequence starts again from its
//! beginning.
//!
//! # Vocabulary
//!
//! * **index**: the number that selects a unit. It is either the CPU number or the kernel's
//!   concurrency id. The kernel gives concurrency ids, counted from 0, to the threads that run at
//!   the same moment. [`init`] chooses one of the two, once for the process; see [`Backend`].
//! * **unit**: the memory of one index. [`Units`] holds the address of each index's unit, or null.
//!   The first [`UNIT_HEADER`] bytes of a unit belong to this crate. The rest are 8-byte words,
//!   addressed by their offset from the start of the unit.
//! * **operation**: [`Units::add`], [`Units::load`], [`Units::store_if_equal`], [`Units::pop`],
//!   [`Units::push`] and the other methods of [`Units`] that take an offset. Each works on the
//!   current index's unit, and takes effect completely or not at all.
//! * **stack**: the array of pointers that `pop` and `push` work on. It lies in a block whose end
//!   is a multiple of [`STACK_ALIGN`]; see [`stack`].
//! * **fence**: [`fence()`] returns when every operation that began before the call, on any CPU,
//!   has committed or was aborted.
//!
//! # Without restartable sequences
//!
//! Where the kernel or a sandbox does not offer restartable sequences, the same operations run on
//! the atomic backend. `add`, `store`, `and`, `or`, `fetch_add`, `swap`,
//! `compare_exchange` and `try_compare_exchange` are one atomic instruction each. All others that
//! write hold a lock in the unit's header for a few instructions. The results are the same. The
//! operations are slower. An operation that finds the unit's lock taken fails as if the unit were
//! missing.
//!
//! # Signals, fork, threads
//!
//! glibc 2.35 and later registers each thread with the kernel. With other C libraries, this crate
//! does, when a thread first calls [`current`] ([`registers_threads`]). Until then, and in a thread
//! that the kernel does not register, every operation fails. So a slow path calls [`current`],
//! tries again, and must do without a unit if the operation still fails.
//!
//! Signal handlers may call every operation, even a handler that interrupted an operation. After
//! `fork` the child keeps the parent's registration. A child of `vfork` shares its parent's memory
//! but not its registration, so it must not call operations before it calls `exec`.
//!
//! # Examples
//!
//! ```
//! use pinfold_rseq::{Units, UNIT_HEADER};
//!
//! static UNITS: Units = Units::new();
//! pinfold_rseq::init(pinfold_rseq::Index::Cpu);
//! let index = pinfold_rseq::current();
//! let unit = Box::leak(Box::new([0u64; 16])).as_mut_ptr().cast::<u8>();
//! UNITS.install(index, unit).unwrap();
//! // SAFETY: the unit is 128 bytes long and the header ends at byte 64.
//! let counted = unsafe { UNITS.add(UNIT_HEADER, 3) };
//! if counted {
//!     // SAFETY: the unit was leaked and no other thread uses it.
//!     assert_eq!(unsafe { *unit.add(UNIT_HEADER).cast::<u64>() }, 3);
//! }
//! ```
#![no_std]
#![deny(unsafe_code)]
#![allow(
    clippy::unnecessary_safety_comment,
    reason = "the lint takes comments in the example above for comments of the next item"
)]

#[cfg(test)]
extern crate std;

pub mod abi;
mod arch;
mod atomic;
#[doc(hidden)]
pub mod env;
mod error;
mod fence;
#[doc(hidden)]
pub mod kernel;
#[doc(hidden)]
pub mod near;
#[cfg(debug_assertions)]
mod owner;
mod registration;
mod selftest;
pub mod shard;
pub mod stack;
mod state;
mod stuck;
mod syscall;
mod units;
mod vdso;
mod words;

pub use arch::Area;
#[doc(hidden)]
pub use fence::watch_fences;
pub use fence::{FenceError, can_fence, fence, fence_index, fence_is_refused};
pub use registration::registers_threads;
#[doc(hidden)]
pub use registration::{forbid_registration, set_tag, tag};
pub use selftest::{SelfTest, preemption_test, selftest};
pub use stack::STACK_ALIGN;
pub use state::{
    Backend, BackendError, Index, Missing, VARIABLE, backend, current, current_cpu, decided,
    has_concurrency_ids, init, missing, possible,
};
/// Returns the calling thread's thread pointer. Each living thread of the process has a different
/// one.
///
/// Costs one load.
#[inline(always)]
pub fn thread_pointer() -> usize {
    arch::thread_pointer()
}

/// Returns whether a debugger or tracer steps through this thread. Each step aborts a critical
/// section, so none commits meanwhile. Costs a few instructions. Always returns false on processors
/// other than x86-64.
#[inline]
pub fn is_stepped() -> bool {
    arch::is_stepped()
}

#[doc(hidden)]
pub use syscall::syscall;
pub use units::{BESIDE, MAX_INDEX, UNIT_HEADER, Units};
pub use words::{Append, RING_SLOTS, RING_TAIL};

/// Runs the README's example as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
