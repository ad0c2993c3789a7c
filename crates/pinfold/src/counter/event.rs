//! The counter that only goes up.

use super::exact::order_own_adds;
use super::{fork, pace};
use crate::percpu::{self, units};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// Bytes of the counter on each CPU.
const SIZE: usize = 8;
/// No block yet.
const NOWHERE: usize = 0;

/// Counts events: up only, modulo 2^64.
///
/// Eight bytes for each CPU that counts, packed with those of other counters; they are there from the first event on. An event is one
/// critical section of one add: no lock, no atomic read-modify-write, no system call, in any thread or signal handler. Where
/// there is no memory the count goes to one shared atomic.
///
/// ```
/// use pinfold::counter::EventCounter;
///
/// static HITS: EventCounter = EventCounter::new();
/// HITS.inc();
/// HITS.add(2);
/// assert_eq!(HITS.sum(), 3);
/// ```
#[derive(Debug)]
// The C header initialises statics of this layout.
#[repr(C)]
pub struct EventCounter {
    place: AtomicUsize,
    /// What was counted where no unit was to be had.
    spilled: AtomicU64,
}

impl Default for EventCounter {
    fn default() -> Self {
        Self::new()
    }
}

impl EventCounter {
    /// A counter at 0; usable in statics.
    pub const fn new() -> Self {
        EventCounter {
            place: AtomicUsize::new(NOWHERE),
            spilled: AtomicU64::new(0),
        }
    }

    /// Counts one.
    #[inline(always)]
    pub fn inc(&self) {
        self.add(1);
    }

    /// Counts `n`.
    #[inline(always)]
    pub fn add(&self, n: u64) {
        let place = self.place.load(Acquire);
        // SAFETY: a place is that of the counter's own block.
        if place == NOWHERE || !unsafe { units().add(place, n) } {
            self.add_slow(n);
        }
    }

    #[cold]
    #[inline(never)]
    fn add_slow(&self, n: u64) {
        let there = self.place().filter(|_| percpu::install_here().is_some());
        // SAFETY: as in `add`.
        if !there.is_some_and(|place| unsafe { units().add(place, n) }) {
            self.spilled.fetch_add(n, Relaxed);
        }
    }

    /// How many were counted: at least those that were counted when the call began, at most those when it ended.
    ///
    /// Reads one word for each CPU that has counted anything; no lock, no system call. While the count moves it waits some hundred
    /// nanoseconds at its end, so that who sums all the time leaves those who count in peace. A count by [`inc`](Self::inc) alone
    /// passes through every number, so it was the result at one moment during the call.
    pub fn sum(&self) -> u64 {
        order_own_adds();
        let spilled = self.spilled.load(Acquire);
        let place = self.place.load(Acquire);
        if place == NOWHERE {
            return spilled;
        }
        let mut sum = spilled;
        percpu::for_each_used(place, |[word]| sum = sum.wrapping_add(word.load(Acquire)));
        // Events are counted in the CPUs' units alone: the word that all share is free for this.
        pace::leave_adders_alone(percpu::shared(place), sum);
        sum
    }

    fn place(&self) -> Option<usize> {
        let place = self.place.load(Acquire);
        if place != NOWHERE {
            return Some(place);
        }
        let fresh = fork::register().then(|| percpu::alloc(SIZE)).flatten()?;
        match self.place.compare_exchange(NOWHERE, fresh, AcqRel, Acquire) {
            Ok(_) => Some(fresh),
            Err(theirs) => {
                // SAFETY: nobody else knows of it.
                unsafe { percpu::free(fresh, SIZE) };
                Some(theirs)
            }
        }
    }
}

impl Drop for EventCounter {
    fn drop(&mut self) {
        let place = *self.place.get_mut();
        if place != NOWHERE {
            // SAFETY: `place` allocated it, and the counter is nobody else's any more.
            unsafe { percpu::free(place, SIZE) };
        }
    }
}
