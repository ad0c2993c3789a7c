//! Two counters that one critical section counts.

use super::exact::order_own_adds;
use super::fork;
use crate::counter_units::{self, LazyBlock, units};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed};

/// Bytes that the pair takes on each CPU. The block's size, a power of two, also aligns it.
const SIZE: usize = 16;

/// Counts two things that happen together, for example packets and their bytes. Both count up,
/// modulo 2^64.
///
/// One critical section adds to both, in any thread or signal handler, with no lock and no system
/// call. On x86-64 it has no atomic read-modify-write, and on aarch64 one exclusive store. That is
/// one section instead of two. In a loop that does nothing else, each add waits for the one before,
/// and two [`EventCounter`](super::EventCounter)s can be faster. The kernel saves a second section
/// in the same way: it counts where interrupts are disabled already.
///
/// The pair takes sixteen bytes on each CPU that counts. They are allocated by the first add.
/// Without memory for them, the pair is two shared atomics.
///
/// ```
/// use pinfold::counter::EventPair;
///
/// /// Packets and bytes.
/// static RECEIVED: EventPair = EventPair::new();
/// RECEIVED.add(1, 1500);
/// RECEIVED.add(2, 128);
/// assert_eq!(RECEIVED.sum(), (3, 1628));
/// ```
#[derive(Debug)]
// The C header initialises statics with this layout.
#[repr(C)]
pub struct EventPair {
    block: LazyBlock,
    /// What was counted on CPUs without a unit.
    spilled: [AtomicU64; 2],
}

impl Default for EventPair {
    fn default() -> Self {
        Self::new()
    }
}

impl EventPair {
    /// Returns a pair at 0 and 0. A static can hold it.
    ///
    /// ```
    /// use pinfold::counter::EventPair;
    ///
    /// static BY_QUEUE: [EventPair; 4] = [const { EventPair::new() }; 4];
    /// BY_QUEUE[2].add(1, 64);
    /// assert_eq!(BY_QUEUE.each_ref().map(EventPair::sum)[1..3], [(0, 0), (1, 64)]);
    /// ```
    pub const fn new() -> Self {
        EventPair {
            block: LazyBlock::new(),
            spilled: [const { AtomicU64::new(0) }; 2],
        }
    }

    /// Adds `first` to the first count and `second` to the second one.
    ///
    /// Costs one critical section. Without restartable sequences, costs two atomic adds, and the
    /// child of a fork may find only the first of them made.
    #[inline(always)]
    pub fn add(&self, first: u64, second: u64) {
        let added = self.block.get().is_some_and(|offset| {
            // SAFETY: `offset` is that of this pair's block of two words, aligned to 16 bytes,
            // which only this function changes and which is freed only when the pair is dropped.
            unsafe { units().add_pair(offset, [first, second]) }
        });
        if !added {
            self.add_slow(first, second);
        }
    }

    #[cold]
    #[inline(never)]
    fn add_slow(&self, first: u64, second: u64) {
        let block = self
            .block
            .get_or_alloc(SIZE, fork::register, |offset| offset)
            .filter(|_| counter_units::install_here().is_some());
        // SAFETY: as in `add`.
        if !block.is_some_and(|offset| unsafe { units().add_pair(offset, [first, second]) }) {
            // Relaxed: nothing else depends on the spilled counts.
            self.spilled[0].fetch_add(first, Relaxed);
            self.spilled[1].fetch_add(second, Relaxed);
        }
    }

    /// Returns both counts. Each contains at least what was added before the call, and at most what
    /// is added before it returns. An add during the call may be in one of them only.
    ///
    /// Reads two words for each CPU that has counted anything in this process, with no lock and no
    /// system call.
    pub fn sum(&self) -> (u64, u64) {
        order_own_adds();
        let [mut first, mut second] = self.spilled.each_ref().map(|count| count.load(Acquire));
        if let Some(offset) = self.block.get() {
            counter_units::for_each_used(offset, |[one, other]| {
                // Acquire pairs with the commit of an add: this thread also sees what the adding
                // thread did before.
                first = first.wrapping_add(one.load(Acquire));
                second = second.wrapping_add(other.load(Acquire));
            });
        }
        (first, second)
    }
}

impl Drop for EventPair {
    fn drop(&mut self) {
        // SAFETY: `add_slow` allocated the block with this size. `drop` has the only reference, so
        // no thread adds to the block any more.
        unsafe { self.block.free(SIZE) };
    }
}
