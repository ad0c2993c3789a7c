//! The counter that only counts up.

use super::exact::order_own_adds;
use super::{fork, pace};
use crate::percpu::{self, units};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// Bytes that the counter takes on each CPU.
const SIZE: usize = 8;
/// The offset that means "no block yet".
const NOWHERE: usize = 0;

/// Counts events, modulo 2^64.
///
/// Counting an event is one critical section of one add. It needs no lock, no atomic
/// read-modify-write and no system call. Any thread and any signal handler may count.
///
/// The counter takes eight bytes on each CPU that counts, packed side by side with those of other
/// counters. They are allocated by the first event. Without memory for them, the counter is one
/// shared atomic.
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
// The C header initialises statics with this layout.
#[repr(C)]
pub struct EventCounter {
    place: AtomicUsize,
    /// Events that were counted on CPUs without a unit.
    spilled: AtomicU64,
}

impl Default for EventCounter {
    fn default() -> Self {
        Self::new()
    }
}

impl EventCounter {
    /// Returns a counter at 0. A static can hold it.
    pub const fn new() -> Self {
        EventCounter {
            place: AtomicUsize::new(NOWHERE),
            spilled: AtomicU64::new(0),
        }
    }

    /// Counts one event.
    #[inline(always)]
    pub fn inc(&self) {
        self.add(1);
    }

    /// Counts `n` events.
    #[inline(always)]
    pub fn add(&self, n: u64) {
        // Acquire pairs with the release in `place`: a thread that sees the offset also sees the
        // block zeroed.
        let place = self.place.load(Acquire);
        // SAFETY: a place other than `NOWHERE` is the offset of this counter's block of one word,
        // which is freed only when the counter is dropped.
        if place == NOWHERE || !unsafe { units().add(place, n) } {
            self.add_slow(n);
        }
    }

    #[cold]
    #[inline(never)]
    fn add_slow(&self, n: u64) {
        let there = self.place().filter(|_| percpu::install_here().is_some());
        // SAFETY: `place` returned the offset of this counter's block of one word, which is freed
        // only when the counter is dropped.
        if !there.is_some_and(|place| unsafe { units().add(place, n) }) {
            self.spilled.fetch_add(n, Relaxed);
        }
    }

    /// Returns the number of events: at least those counted before the call, at most those counted
    /// before it returns.
    ///
    /// Reads one word for each CPU that has counted anything in this process, with no lock and no
    /// system call. If the count moved lately, the call spins for about a microsecond at its end,
    /// so that a thread that sums all the time does not slow down the CPUs that count.
    ///
    /// If all events are counted by [`inc`](Self::inc), the result was the count at one moment
    /// during the call, because such a count passes through every number.
    pub fn sum(&self) -> u64 {
        order_own_adds();
        let spilled = self.spilled.load(Acquire);
        // Acquire pairs with the release in `place`: a thread that sees the offset also sees the
        // block zeroed.
        let place = self.place.load(Acquire);
        if place == NOWHERE {
            return spilled;
        }
        let mut sum = spilled;
        percpu::for_each_used(place, |[word]| sum = sum.wrapping_add(word.load(Acquire)));
        // No event is counted in the shared unit, so the counter's word there is free for `pace`.
        pace::leave_adders_alone(percpu::shared(place), sum);
        sum
    }

    /// Returns the offset of the counter's block, and allocates the block if there is none. Returns
    /// `None` if the block cannot be allocated.
    fn place(&self) -> Option<usize> {
        let place = self.place.load(Acquire);
        if place != NOWHERE {
            return Some(place);
        }
        let fresh = fork::register().then(|| percpu::alloc(SIZE)).flatten()?;
        // Release: a thread that sees the offset sees the block zeroed. Acquire: this thread sees
        // the same if another thread was faster.
        match self.place.compare_exchange(NOWHERE, fresh, AcqRel, Acquire) {
            Ok(_) => Some(fresh),
            Err(theirs) => {
                // SAFETY: the exchange failed, so `fresh` was never published. Only this thread
                // knows the block.
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
            // SAFETY: `place` allocated the block with this size. `drop` has the only reference, so
            // no thread adds to the block any more.
            unsafe { percpu::free(place, SIZE) };
        }
    }
}
