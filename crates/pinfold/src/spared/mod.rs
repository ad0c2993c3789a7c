//! CPUs that a thread has isolated for a while, and what this library did to them nevertheless.
//!
//! A thread that must not be disturbed isolates its CPU ([`isolate`](crate::isolate)). From then on
//! other threads of the process leave out of this CPU what can wait: they neither fold its
//! counters, nor take objects from it, nor fence it, nor give memory back to the system, because
//! the kernel would interrupt the CPU to flush its translations. What cannot wait they do, and
//! *note* it here.
//!
//! # Places
//!
//! Each isolated CPU has a place, in a [`Table`] of fixed size, so that a note takes no lock and no
//! memory.
//!
//! | word | written by | when |
//! |---|---|---|
//! | `cpu` | the isolating thread | [`claim`]: from 0 to the CPU plus 1, by a compare-exchange |
//! | | the isolating thread | [`release`]: to 0 |
//! | `unit`, `thread` | the isolating thread | while it claims the place |
//! | `counts` | any thread | [`note`], by atomic adds |
//! | | the isolating thread | while it claims the place: to 0 |
//! | `taken` | the isolating thread | after `cpu` in `claim`, before it in `release` |
//! | `changes` | the isolating thread | last in `claim` and in `release` |
//!
//! The words guard no memory. A thread that has looked before `claim` may act once more after it,
//! and its note may be missing or count for the place's next CPU. In the child of a fork,
//! [`forget`] empties the table, because the isolating threads are not there. `model_spared.rs`
//! explores the orders in which threads claim, note and release.

mod table;

pub(crate) use table::{KINDS, Kind, Refused};

use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::thread_pointer;
use primitive::{AtomicU32, AtomicU64, AtomicUsize};
use table::{Place, Table};

/// What the table is made of. The model of the table has its own.
mod primitive {
    pub(super) use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, fence};

    /// The number of CPUs that can be isolated at once.
    pub(crate) const PLACES: usize = 64;
}

pub(crate) use primitive::PLACES;

static TABLE: Table = Table {
    places: [const {
        Place {
            cpu: AtomicU32::new(0),
            unit: AtomicU32::new(0),
            thread: AtomicUsize::new(0),
            counts: [const { AtomicU64::new(0) }; KINDS],
        }
    }; PLACES],
    taken: AtomicU32::new(0),
    changes: AtomicU32::new(0),
};

/// Returns whether any CPU is isolated by a thread. One load.
#[inline]
pub(crate) fn any() -> bool {
    TABLE.any()
}

/// Returns a number that changes whenever a CPU is isolated or no longer isolated. One load.
pub(crate) fn changes() -> u32 {
    TABLE.changes.load(Relaxed)
}

/// Returns whether a thread has isolated `cpu`. One load if none is isolated.
pub(crate) fn contains(cpu: usize) -> bool {
    TABLE.taken().any(|(_, other, _)| other == cpu)
}

/// Returns whether the unit with index `unit` belongs to a thread that has isolated its CPU. One
/// load if none is isolated.
pub(crate) fn has_unit(unit: usize) -> bool {
    let mut taken = TABLE.taken();
    taken.any(|(_, _, place)| place.unit.load(Relaxed) as usize == unit)
}

/// Calls `each` with each isolated CPU, and the counts of what disturbed it by [`Kind`].
pub(crate) fn for_each(mut each: impl FnMut(usize, [u64; KINDS])) {
    let taken = TABLE.taken();
    taken.for_each(|(nth, cpu, _)| each(cpu, counts(nth)));
}

/// Takes a place for `cpu`, which the calling thread isolates. The thread uses the unit `unit`.
/// Returns the place's number.
pub(crate) fn claim(cpu: usize, unit: usize) -> Result<usize, Refused> {
    TABLE.claim(cpu, unit, thread_pointer())
}

/// Gives the place `nth` back, which the caller has claimed.
pub(crate) fn release(nth: usize) {
    TABLE.release(nth);
}

/// Returns the counts of the place `nth` by [`Kind`].
pub(crate) fn counts(nth: usize) -> [u64; KINDS] {
    TABLE.counts(nth)
}

/// Notes that the calling thread is about to do something that may disturb all isolated CPUs,
/// except one that it has isolated itself. Costs one load if none is isolated.
#[inline]
pub(crate) fn note(kind: Kind) {
    if any() {
        note_on(kind, None);
    }
}

/// Notes a `membarrier` for [`pinfold_rseq::watch_fences`]: on one CPU, or on all.
pub(crate) fn note_fence(cpu: Option<usize>) {
    if any() {
        note_on(Kind::Fence, cpu);
    }
}

#[cold]
#[inline(never)]
fn note_on(kind: Kind, cpu: Option<usize>) {
    // Not the unit: with concurrency ids, the unit of an isolating thread that sleeps may belong to
    // this thread.
    let own = thread_pointer();
    TABLE.note(kind, |its, thread| {
        cpu.is_none_or(|cpu| cpu == its) && thread != own
    });
}

/// Empties the table, in the child of a fork.
pub(crate) fn forget() {
    TABLE.forget();
}
