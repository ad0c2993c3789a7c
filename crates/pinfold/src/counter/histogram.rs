//! A histogram of event counts.

use super::fork;
use super::snapshot::{BUCKETS, Snapshot, bucket_of};
use crate::percpu::{self, shared, units, word_at};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// Bytes of the block on each CPU: the sum of the values, then a count for each bucket.
const SIZE: usize = 8 + 8 * BUCKETS;
/// The offset that means "no block yet".
const NOWHERE: usize = 0;

/// Counts how often values of each size occurred, per CPU. A bucket is at most a 32nd as wide as
/// the values in it.
///
/// Recording a value is two critical sections of one add each, on the CPU's own words. Any thread
/// and any signal handler may record. A CPU that records takes 15 KiB of address space. It takes
/// memory only for the pages with buckets that occur.
///
/// ```
/// use pinfold::counter::PercpuHistogram;
///
/// static LATENCY: PercpuHistogram = PercpuHistogram::new();
/// for microseconds in 1..=1000 {
///     LATENCY.record(microseconds);
/// }
/// let seen = LATENCY.snapshot();
/// assert_eq!((seen.count(), seen.sum()), (1000, 500_500));
/// assert!((500..=516).contains(&seen.quantile(0.5)));
/// ```
#[derive(Debug)]
pub struct PercpuHistogram {
    place: AtomicUsize,
    unrecorded: AtomicU64,
}

impl Default for PercpuHistogram {
    fn default() -> Self {
        Self::new()
    }
}

impl PercpuHistogram {
    /// Returns an empty histogram. A static can hold it.
    pub const fn new() -> Self {
        PercpuHistogram {
            place: AtomicUsize::new(NOWHERE),
            unrecorded: AtomicU64::new(0),
        }
    }

    /// Records `value`.
    #[inline]
    pub fn record(&self, value: u64) {
        let bucket = 8 + 8 * bucket_of(value);
        // Acquire pairs with the release in `place`: a thread that sees the offset also sees the
        // block zeroed.
        let place = self.place.load(Acquire);
        // SAFETY: a place other than `NOWHERE` is the offset of this histogram's block, and
        // `bucket` is below its size. The block is freed only when the histogram is dropped.
        let done = place != NOWHERE && unsafe { units().add(place + bucket, 1) };
        // SAFETY: `done` is only true if `place` is the offset of this histogram's block, which
        // begins with the sum.
        if !done || !unsafe { units().add(place, value) } {
            self.record_slow(bucket, value, done);
        }
    }

    #[cold]
    #[inline(never)]
    fn record_slow(&self, bucket: usize, value: u64, counted: bool) {
        let Some(place) = self.place() else {
            self.unrecorded.fetch_add(1, Relaxed);
            return;
        };
        percpu::install_here();
        // A CPU without a unit counts in the shared unit.
        // SAFETY: `place` is the offset of this histogram's block, and `bucket` is below its size.
        // The block is freed only when the histogram is dropped.
        if !counted && !unsafe { units().add(place + bucket, 1) } {
            shared(place + bucket).fetch_add(1, Relaxed);
        }
        // SAFETY: `place` is the offset of this histogram's block, which begins with the sum.
        if !unsafe { units().add(place, value) } {
            shared(place).fetch_add(value, Relaxed);
        }
    }

    /// Returns the counts: each bucket's count is at least what it was when the call began, and at
    /// most what it was when the call ended.
    ///
    /// Reads 15 KiB for each CPU that has recorded anything in this process, and interrupts no CPU.
    ///
    /// The snapshot itself is 15 KiB too. This is the only operation of this module that takes more
    /// than 2 KiB of stack.
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot::empty();
        snapshot.unrecorded = self.unrecorded.load(Relaxed);
        // Acquire pairs with the release in `place`: a thread that sees the offset also sees the
        // block zeroed.
        let place = self.place.load(Acquire);
        if place == NOWHERE {
            return snapshot;
        }
        for unit in percpu::used().chain(core::iter::once(pinfold_rseq::possible())) {
            let word = |at: usize| word_at(unit, place + at).load(Acquire);
            snapshot.sum = snapshot.sum.wrapping_add(word(0));
            for (bucket, count) in snapshot.counts.iter_mut().enumerate() {
                *count = count.wrapping_add(word(8 + 8 * bucket));
            }
        }
        snapshot
    }

    /// Returns the offset of the histogram's block, and allocates the block if there is none.
    /// Returns `None` if the block cannot be allocated.
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

impl Drop for PercpuHistogram {
    fn drop(&mut self) {
        let place = *self.place.get_mut();
        if place != NOWHERE {
            // SAFETY: `place` allocated the block with this size. `drop` has the only reference, so
            // no thread records in the block any more.
            unsafe { percpu::free(place, SIZE) };
        }
    }
}
