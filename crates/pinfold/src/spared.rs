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
//! Each isolated CPU has a [`Place`], in a table of fixed size, so that a note takes no lock and no
//! memory.
//!
//! | word | written by | when |
//! |---|---|---|
//! | `cpu` | the isolating thread | [`claim`]: from 0 to the CPU plus 1, by a compare-exchange |
//! | | the isolating thread | [`release`]: to 0 |
//! | `unit` | the isolating thread | while it claims the place |
//! | `counts` | any thread | [`note`], by atomic adds; the isolating thread sets them to 0 in `claim` |
//! | [`TAKEN`] | the isolating thread | after `cpu` in `claim`, before it in `release` |
//! | [`CHANGES`] | the isolating thread | last in `claim` and in `release` |
//!
//! The words guard no memory. A thread that has looked before `claim` may act once more after it,
//! and its note may be missing or count for the place's next CPU. In the child of a fork,
//! [`forget`] empties the table, because the isolating threads are not there.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicU64, fence};
use pinfold_rseq::current;

/// The number of CPUs that can be isolated at once.
pub(crate) const PLACES: usize = 64;

/// What can disturb an isolated CPU.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// A `membarrier`, which interrupts the CPU.
    Fence,
    /// Memory went back to the system, so that the kernel may have interrupted the CPU to flush
    /// translations of addresses.
    GiveBack,
    /// A fold read the CPU's counts.
    Fold,
    /// The CPU's unit of the object caches was stopped and emptied.
    Drain,
}

/// The number of kinds.
pub(crate) const KINDS: usize = 4;

struct Place {
    /// The CPU plus 1, or 0 while the place is free.
    cpu: AtomicU32,
    /// The index of the unit that the isolating thread used when it claimed the place.
    unit: AtomicU32,
    counts: [AtomicU64; KINDS],
}

static TABLE: [Place; PLACES] = [const {
    Place {
        cpu: AtomicU32::new(0),
        unit: AtomicU32::new(0),
        counts: [const { AtomicU64::new(0) }; KINDS],
    }
}; PLACES];

/// The number of places that are taken.
static TAKEN: AtomicU32 = AtomicU32::new(0);
/// Changes whenever a CPU is isolated or no longer isolated.
static CHANGES: AtomicU32 = AtomicU32::new(0);

/// Why a CPU has no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Another thread has isolated this CPU, or tries to do so at the same time.
    Taken,
    /// [`PLACES`] CPUs are isolated.
    Full,
}

/// Returns whether any CPU is isolated by a thread. One load.
#[inline]
pub(crate) fn any() -> bool {
    // Relaxed, because the answer guards no memory.
    TAKEN.load(Relaxed) != 0
}

/// Returns a number that changes whenever a CPU is isolated or no longer isolated. One load.
pub(crate) fn changes() -> u32 {
    CHANGES.load(Relaxed)
}

/// Returns the places in use, each with its number and its CPU. Costs one load if none is.
fn taken() -> impl Iterator<Item = (usize, usize, &'static Place)> {
    let table: &'static [Place] = if any() { &TABLE } else { &[] };
    table.iter().enumerate().filter_map(|(nth, place)| {
        let cpu = place.cpu.load(Relaxed).checked_sub(1)?;
        Some((nth, cpu as usize, place))
    })
}

/// Returns whether a thread has isolated `cpu`. One load if none is isolated.
pub(crate) fn contains(cpu: usize) -> bool {
    taken().any(|(_, other, _)| other == cpu)
}

/// Returns whether the unit with index `unit` belongs to a thread that has isolated its CPU. One
/// load if none is isolated.
pub(crate) fn has_unit(unit: usize) -> bool {
    taken().any(|(_, _, place)| place.unit.load(Relaxed) as usize == unit)
}

/// Calls `each` with each isolated CPU, and the counts of what disturbed it by [`Kind`].
pub(crate) fn for_each(mut each: impl FnMut(usize, [u64; KINDS])) {
    taken().for_each(|(nth, cpu, _)| each(cpu, counts(nth)));
}

/// Takes a place for `cpu`, on which the calling thread runs and uses the unit `unit`. Returns the
/// place's number.
pub(crate) fn claim(cpu: usize, unit: usize) -> Result<usize, Refused> {
    let value = cpu as u32 + 1;
    let free = |place: &Place| {
        place
            .cpu
            .compare_exchange(0, value, Relaxed, Relaxed)
            .is_ok()
    };
    let nth = TABLE.iter().position(free).ok_or(Refused::Full)?;
    let place = &TABLE[nth];
    // Of two threads that claim places for one CPU at once, at least one finds the other's place.
    fence(SeqCst);
    let same = |(other, place): (usize, &Place)| other != nth && place.cpu.load(Relaxed) == value;
    if TABLE.iter().enumerate().any(same) {
        place.cpu.store(0, Relaxed);
        return Err(Refused::Taken);
    }
    place
        .counts
        .iter()
        .for_each(|count| count.store(0, Relaxed));
    place.unit.store(unit as u32, Relaxed);
    TAKEN.fetch_add(1, Relaxed);
    CHANGES.fetch_add(1, Relaxed);
    Ok(nth)
}

/// Gives the place `nth` back, which the caller has claimed.
pub(crate) fn release(nth: usize) {
    TAKEN.fetch_sub(1, Relaxed);
    TABLE[nth].cpu.store(0, Relaxed);
    CHANGES.fetch_add(1, Relaxed);
}

/// Returns the counts of the place `nth` by [`Kind`].
pub(crate) fn counts(nth: usize) -> [u64; KINDS] {
    core::array::from_fn(|kind| TABLE[nth].counts[kind].load(Relaxed))
}

/// Notes that the calling thread is about to do something that may disturb all isolated CPUs,
/// except the one on which it runs. Costs one load if none is isolated.
#[inline]
pub(crate) fn note(kind: Kind) {
    if any() {
        note_where(kind, |_, unit, own| unit != own);
    }
}

/// Notes a `membarrier` for [`pinfold_rseq::watch_fences`]: on one CPU, or on all.
pub(crate) fn note_fence(cpu: Option<usize>) {
    if any() {
        let hits = |its: usize| cpu.is_none_or(|cpu| cpu == its);
        note_where(Kind::Fence, |its, unit, own| hits(its) && unit != own);
    }
}

/// Adds to the count of `kind` of each place for which `hit` returns true. `hit` gets the place's
/// CPU and unit, and the unit of the calling thread.
#[cold]
#[inline(never)]
fn note_where(kind: Kind, hit: impl Fn(usize, usize, usize) -> bool) {
    let own = current();
    for (_, cpu, place) in taken() {
        if hit(cpu, place.unit.load(Relaxed) as usize, own) {
            place.counts[kind as usize].fetch_add(1, Relaxed);
        }
    }
}

/// Empties the table, in the child of a fork.
pub(crate) fn forget() {
    TAKEN.store(0, Relaxed);
    TABLE.iter().for_each(|place| place.cpu.store(0, Relaxed));
    CHANGES.fetch_add(1, Relaxed);
}
