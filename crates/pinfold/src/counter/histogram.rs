//! A histogram of event counts.

use super::fork;
use super::snapshot::{BUCKETS, Snapshot, bucket_of};
use crate::counter_units::{self, LazyBlock, units, word_at};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed};

/// Bytes of the block on each CPU: the sum of the values, then a count for each bucket.
const SIZE: usize = 8 + 8 * BUCKETS;

/// Counts how often values of each size occurred, per CPU. A bucket is at most a 32nd as wide as
/// the values in it.
///
/// Recording a value is two critical sections of one add each, on the CPU's own words. Any thread
/// and any signal handler may record. A CPU that records takes 15 KiB of address space. It takes
/// memory only for the pages with buckets that occur.
///
/// ```
/// use pinfold::counter::PerCpuHistogram;
///
/// static LATENCY: PerCpuHistogram = PerCpuHistogram::new();
/// for microseconds in 1..=1000 {
///     LATENCY.record(microseconds);
/// }
/// let seen = LATENCY.snapshot();
/// assert_eq!((seen.count(), seen.sum()), (1000, 500_500));
/// assert!((500..=516).contains(&seen.quantile(0.5)));
/// ```
#[derive(Debug)]
pub struct PerCpuHistogram {
    block: LazyBlock,
    unrecorded: AtomicU64,
}

impl Default for PerCpuHistogram {
    fn default() -> Self {
        Self::new()
    }
}

impl PerCpuHistogram {
    /// Returns an empty histogram. A static can hold it.
    ///
    /// ```
    /// use pinfold::counter::PerCpuHistogram;
    ///
    /// let empty = PerCpuHistogram::new().snapshot();
    /// assert_eq!((empty.count(), empty.quantile(0.99), empty.max()), (0, 0, 0));
    /// ```
    pub const fn new() -> Self {
        PerCpuHistogram {
            block: LazyBlock::new(),
            unrecorded: AtomicU64::new(0),
        }
    }

    /// Records `value`.
    #[inline]
    pub fn record(&self, value: u64) {
        let block = self.block.get();
        let bucket = 8 + 8 * bucket_of(value);
        if !(self.add(block, bucket, 1) && self.add(block, 0, value)) {
            self.unrecorded.fetch_add(1, Relaxed);
        }
    }

    /// Adds `n` to the word at `at` in the block. `block` is the block's offset, or `None` if it is
    /// not allocated yet. Returns false if it cannot be allocated.
    #[inline]
    fn add(&self, block: Option<usize>, at: usize, n: u64) -> bool {
        // SAFETY: `offset` is that of this histogram's block, and `at` is below its size. The block
        // is freed only when the histogram is dropped.
        block.is_some_and(|offset| unsafe { units().add(offset + at, n) }) || self.add_slow(at, n)
    }

    #[cold]
    #[inline(never)]
    fn add_slow(&self, at: usize, n: u64) -> bool {
        let block = self
            .block
            .get_or_alloc(SIZE, fork::register, |offset| offset);
        // SAFETY: the block is this histogram's, and `at` is below its size. The block is freed
        // only when the histogram is dropped.
        block
            .map(|offset| unsafe { counter_units::add_slow(offset + at, n) })
            .is_some()
    }

    /// Returns the counts: each bucket's count is at least what it was when the call began, and at
    /// most what it was when the call ended.
    ///
    /// Reads 15 KiB for each CPU that has counted anything in this process, and interrupts no CPU.
    ///
    /// The snapshot itself is 15 KiB too. This is the only operation of this module that takes more
    /// than 2 KiB of stack.
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot::empty();
        snapshot.unrecorded = self.unrecorded.load(Relaxed);
        let Some(offset) = self.block.get() else {
            return snapshot;
        };
        for unit in counter_units::used().chain(core::iter::once(pinfold_rseq::possible())) {
            let word = |at: usize| word_at(unit, offset + at).load(Acquire);
            snapshot.sum = snapshot.sum.wrapping_add(word(0));
            for (bucket, count) in snapshot.counts.iter_mut().enumerate() {
                *count = count.wrapping_add(word(8 + 8 * bucket));
            }
        }
        snapshot
    }
}

impl Drop for PerCpuHistogram {
    fn drop(&mut self) {
        // SAFETY: `add_slow` allocated the block with this size. `drop` has the only reference, so
        // no thread records in the block any more.
        unsafe { self.block.free(SIZE) };
    }
}
