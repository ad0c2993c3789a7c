//! The counter that only counts up.

use super::exact::order_own_adds;
use super::{fork, pace};
use crate::counter_units::{self, LazyBlock, units};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed};

/// Bytes that the counter takes on each CPU.
const SIZE: usize = 8;

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
    block: LazyBlock,
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
    ///
    /// ```
    /// use pinfold::counter::EventCounter;
    ///
    /// static BY_QUEUE: [EventCounter; 4] = [const { EventCounter::new() }; 4];
    /// BY_QUEUE[2].inc();
    /// assert_eq!(BY_QUEUE.each_ref().map(EventCounter::sum), [0, 0, 1, 0]);
    /// ```
    pub const fn new() -> Self {
        EventCounter {
            block: LazyBlock::new(),
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
        let added = self.block.get().is_some_and(|offset| {
            // SAFETY: `offset` is that of this counter's block of one word, which is freed only
            // when the counter is dropped.
            unsafe { units().add(offset, n) }
        });
        if !added {
            self.add_slow(n);
        }
    }

    #[cold]
    #[inline(never)]
    fn add_slow(&self, n: u64) {
        let block = self
            .block
            .get_or_alloc(SIZE, fork::register, |offset| offset)
            .filter(|_| counter_units::install_here().is_some());
        // SAFETY: `block` is the offset of this counter's block of one word, which is freed only
        // when the counter is dropped.
        if !block.is_some_and(|offset| unsafe { units().add(offset, n) }) {
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
        let sum = self.tally();
        if let Some(offset) = self.block.get() {
            // No event is counted in the shared unit, so the counter's word there is free for
            // `pace`.
            pace::leave_adders_alone(counter_units::shared(offset), sum);
        }
        sum
    }

    /// Returns what [`sum`](Self::sum) returns, and never spins.
    pub(crate) fn tally(&self) -> u64 {
        order_own_adds();
        let spilled = self.spilled.load(Acquire);
        let Some(offset) = self.block.get() else {
            return spilled;
        };
        let mut sum = spilled;
        counter_units::for_each_used(offset, |[word]| sum = sum.wrapping_add(word.load(Acquire)));
        sum
    }
}

impl Drop for EventCounter {
    fn drop(&mut self) {
        // SAFETY: `add_slow` allocated the block with this size. `drop` has the only reference, so
        // no thread adds to the block any more.
        unsafe { self.block.free(SIZE) };
    }
}
