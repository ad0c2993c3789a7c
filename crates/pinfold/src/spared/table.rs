//! The table of isolated CPUs. It does not know which thread calls: the module above tells it. So a
//! model can run this file.

use super::primitive::{AtomicU32, AtomicU64, AtomicUsize, PLACES, fence};
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

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

/// Why a CPU has no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Another thread has isolated this CPU, or tries to do so at the same time.
    Taken,
    /// [`PLACES`] CPUs are isolated.
    Full,
}

pub(super) struct Place {
    /// The CPU plus 1, or 0 while the place is free.
    pub(super) cpu: AtomicU32,
    /// The index of the unit that the isolating thread used when it claimed the place.
    pub(super) unit: AtomicU32,
    /// The isolating thread's pointer.
    pub(super) thread: AtomicUsize,
    pub(super) counts: [AtomicU64; KINDS],
}

/// The places, and what a thread reads before it looks at them.
pub(super) struct Table {
    pub(super) places: [Place; PLACES],
    /// The number of places that are taken.
    pub(super) taken: AtomicU32,
    /// Changes whenever a CPU is isolated or no longer isolated.
    pub(super) changes: AtomicU32,
}

impl Table {
    /// Returns whether any CPU is isolated. One load.
    #[inline]
    pub(super) fn any(&self) -> bool {
        // Relaxed, because the answer guards no memory.
        self.taken.load(Relaxed) != 0
    }

    /// Returns the places in use, each with its number and its CPU. Costs one load if none is.
    pub(super) fn taken(&self) -> impl Iterator<Item = (usize, usize, &Place)> {
        let places: &[Place] = if self.any() { &self.places } else { &[] };
        places.iter().enumerate().filter_map(|(nth, place)| {
            let cpu = place.cpu.load(Relaxed).checked_sub(1)?;
            Some((nth, cpu as usize, place))
        })
    }

    /// Takes a place for `cpu`, for a thread that uses the unit `unit`. Returns the place's number.
    pub(super) fn claim(&self, cpu: usize, unit: usize, thread: usize) -> Result<usize, Refused> {
        let value = cpu as u32 + 1;
        let free = |place: &Place| {
            place
                .cpu
                .compare_exchange(0, value, Relaxed, Relaxed)
                .is_ok()
        };
        let nth = self.places.iter().position(free).ok_or(Refused::Full)?;
        let place = &self.places[nth];
        // Of two threads that claim places for one CPU at once, at least one finds the other's
        // place.
        fence(SeqCst);
        let same =
            |(other, place): (usize, &Place)| other != nth && place.cpu.load(Relaxed) == value;
        if self.places.iter().enumerate().any(same) {
            place.cpu.store(0, Relaxed);
            return Err(Refused::Taken);
        }
        place
            .counts
            .iter()
            .for_each(|count| count.store(0, Relaxed));
        place.unit.store(unit as u32, Relaxed);
        place.thread.store(thread, Relaxed);
        self.taken.fetch_add(1, Relaxed);
        self.changes.fetch_add(1, Relaxed);
        Ok(nth)
    }

    /// Gives the place `nth` back, which the caller has claimed.
    pub(super) fn release(&self, nth: usize) {
        self.taken.fetch_sub(1, Relaxed);
        self.places[nth].cpu.store(0, Relaxed);
        self.changes.fetch_add(1, Relaxed);
    }

    /// Returns the counts of the place `nth` by [`Kind`].
    pub(super) fn counts(&self, nth: usize) -> [u64; KINDS] {
        core::array::from_fn(|kind| self.places[nth].counts[kind].load(Relaxed))
    }

    /// Adds to the count of `kind` of each place for which `hit` returns true. `hit` gets the
    /// place's CPU and thread.
    pub(super) fn note(&self, kind: Kind, hit: impl Fn(usize, usize) -> bool) {
        for (_, cpu, place) in self.taken() {
            if hit(cpu, place.thread.load(Relaxed)) {
                place.counts[kind as usize].fetch_add(1, Relaxed);
            }
        }
    }

    /// Empties the table. No other thread uses it.
    pub(super) fn forget(&self) {
        self.taken.store(0, Relaxed);
        self.places
            .iter()
            .for_each(|place| place.cpu.store(0, Relaxed));
        self.changes.fetch_add(1, Relaxed);
    }
}
