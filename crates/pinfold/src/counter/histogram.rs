//! A histogram of event counts.

use super::fork;
use super::snapshot::{BUCKETS, Snapshot, bucket_of};
use crate::percpu::{self, shared, units, word_at};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// The sum of the values, then a count for each bucket.
const SIZE: usize = 8 + 8 * BUCKETS;
const NOWHERE: usize = 0;

/// How often values of each size occurred: per-CPU event counts in buckets as wide as a 32nd of the values in them.
///
/// Recording is two critical sections of one add each, on the CPU's own words; any thread, any signal handler. A CPU that
/// records takes 15 KiB of address space, and memory for the pages whose buckets occur.
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
    /// An empty histogram; usable in statics.
    pub const fn new() -> Self {
        PercpuHistogram {
            place: AtomicUsize::new(NOWHERE),
            unrecorded: AtomicU64::new(0),
        }
    }

    /// Counts `value`.
    #[inline]
    pub fn record(&self, value: u64) {
        let bucket = 8 + 8 * bucket_of(value);
        let place = self.place.load(Acquire);
        // SAFETY: a place is that of the histogram's own block; the words lie in it.
        let done = place != NOWHERE && unsafe { units().add(place + bucket, 1) };
        // SAFETY: as above.
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
        // Without a unit the words that all CPUs share take it.
        // SAFETY: as in `record`.
        if !counted && !unsafe { units().add(place + bucket, 1) } {
            shared(place + bucket).fetch_add(1, Relaxed);
        }
        // SAFETY: as in `record`.
        if !unsafe { units().add(place, value) } {
            shared(place).fetch_add(value, Relaxed);
        }
    }

    /// The counts: each bucket's is at least what it was when the call began and at most what it was when it ended. Reads
    /// 15 KiB for each CPU that has recorded anything in this process; disturbs nobody.
    ///
    /// The snapshot itself is 15 KiB, too: the only operation of this module that takes more than 2
    /// KiB of stack.
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot::empty();
        snapshot.unrecorded = self.unrecorded.load(Relaxed);
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

impl Drop for PercpuHistogram {
    fn drop(&mut self) {
        let place = *self.place.get_mut();
        if place != NOWHERE {
            // SAFETY: `place` allocated it, and the histogram is nobody else's any more.
            unsafe { percpu::free(place, SIZE) };
        }
    }
}
