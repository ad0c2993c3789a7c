//! Restartable sequences for Rust: work on the current CPU's data without locks, atomics or system calls.
//!
//! A restartable sequence (rseq) is a short run of instructions that the Linux kernel starts again from its
//! beginning when the thread was preempted, migrated or interrupted by a signal inside it. It loads the current
//! CPU's number, works on that CPU's data with plain loads and stores, and ends with one store that makes the work
//! visible: the commit. So it needs no lock and no atomic read-modify-write.
//!
//! # Vocabulary
//!
//! * **index**: the CPU number, or the kernel's concurrency id, which is dense in the number of running threads.
//!   [`init`] chooses once for the process, see [`Backend`].
//! * **unit**: the memory of one index. [`Units`] holds the address of each index's unit, or null. Its first
//!   [`UNIT_HEADER`] bytes belong to this crate; the rest are 8-byte words, addressed by their offset.
//! * **operation**: [`Units::add`], [`Units::add_within`], [`Units::load`], [`Units::store_if_equal`], [`Units::pop`], [`Units::push`],
//!   [`Units::pop_batch`], [`Units::push_batch`]: each works on the current index's unit and takes effect whole or
//!   not at all.
//! * **stack**: what `pop` and `push` work on, an array of pointers that lies in a [`STACK_ALIGN`]-aligned block; see
//!   [`stack`].
//! * **fence**: [`fence()`] returns when every operation that began before it, on any CPU, has committed or was
//!   aborted.
//!
//! # Without restartable sequences
//!
//! Where the kernel, the C library or a sandbox does not offer them, the same operations run on atomics: a word is
//! added to with `fetch_add`, and the other operations hold a lock in the unit's header for a few instructions.
//! Results are the same; only speed differs.
//!
//! # Signals, fork, threads
//!
//! All operations may be called from signal handlers, also when the handler interrupts one of them. After `fork`
//! the child goes on with the parent's registration. A child of `vfork`, which shares its parent's memory but not
//! its registration, must not call operations.
//!
//! ```
//! use pinfold_rseq::{Units, UNIT_HEADER};
//!
//! static UNITS: Units = Units::new();
//! let index = pinfold_rseq::current();
//! let unit = Box::leak(Box::new([0u64; 16])).as_mut_ptr().cast::<u8>();
//! UNITS.install(index, unit).unwrap();
//! // A thread that has moved to another CPU meanwhile finds no unit there.
//! // The offset lies in the unit, behind the header.
//! let counted = unsafe { UNITS.add(UNIT_HEADER, 3) };
//! if counted {
//!     // It lies in the unit; that was leaked, and nobody else has it.
//!     assert_eq!(unsafe { *unit.add(UNIT_HEADER).cast::<u64>() }, 3);
//! }
//! ```
#![no_std]
#![deny(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod abi;
mod arch;
mod atomic;
#[doc(hidden)]
pub mod env;
mod fence;
#[doc(hidden)]
pub mod near;
mod selftest;
pub mod stack;
mod state;
mod units;

pub use fence::{FenceError, can_fence, fence, fence_index, fence_is_refused};
pub use selftest::{SelfTest, preemption_test, selftest};
pub use stack::STACK_ALIGN;
pub use state::{
    Backend, Index, Missing, backend, current, decided, has_concurrency_ids, init, missing,
    possible,
};
/// Identifies the calling thread: its thread pointer, which no other living thread of the process has. One load.
#[inline(always)]
pub fn thread_pointer() -> usize {
    arch::thread_pointer()
}

pub use units::{BESIDE, MAX_INDEX, UNIT_HEADER, Units};
