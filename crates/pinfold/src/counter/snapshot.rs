//! A copy of a histogram's counts, and the statistics derived from it.

/// Buckets for each power of two. A bucket is at most a 32nd as wide as its least value.
const PER_POWER: usize = 32;
const POWER_BITS: u32 = PER_POWER.ilog2();
/// One bucket for each value below 32, then 32 buckets for each power of two up to 2^63.
pub(super) const BUCKETS: usize = PER_POWER + (64 - POWER_BITS as usize) * PER_POWER;

/// Returns the bucket to which `value` belongs.
#[inline]
pub(super) fn bucket_of(value: u64) -> usize {
    if value < PER_POWER as u64 {
        return value as usize;
    }
    let shift = value.ilog2() - POWER_BITS;
    shift as usize * PER_POWER + (value >> shift) as usize
}

/// Returns the least and the largest value of a bucket.
fn range_of(bucket: usize) -> (u64, u64) {
    if bucket < 2 * PER_POWER {
        return (bucket as u64, bucket as u64);
    }
    let shift = bucket / PER_POWER - 1;
    let least = ((bucket % PER_POWER + PER_POWER) as u64) << shift;
    (least, least + ((1 << shift) - 1))
}

/// The counts of a [`PerCpuHistogram`](super::PerCpuHistogram), taken by
/// [`snapshot`](super::PerCpuHistogram::snapshot).
///
/// ```
/// use pinfold::counter::PerCpuHistogram;
///
/// let sizes = PerCpuHistogram::new();
/// sizes.record(3);
/// let before = sizes.snapshot();
/// sizes.record(1000);
/// let new = sizes.snapshot().since(&before);
/// assert_eq!((new.count(), new.sum()), (1, 1000));
/// assert!(new.min() <= 1000 && 1000 <= new.max());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub(super) counts: [u64; BUCKETS],
    pub(super) sum: u64,
    pub(super) unrecorded: u64,
}

impl Snapshot {
    pub(super) const fn empty() -> Self {
        Snapshot {
            counts: [0; BUCKETS],
            sum: 0,
            unrecorded: 0,
        }
    }

    /// Returns the number of values that were recorded.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the exact sum of the values, modulo 2^64.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Returns the number of values that were not recorded, because the histogram's words could not
    /// be allocated. Usually there was no memory for them.
    pub fn unrecorded(&self) -> u64 {
        self.unrecorded
    }

    /// Returns a lower bound of the least value, at most a 32nd below it. Returns 0 if there are no
    /// values.
    pub fn min(&self) -> u64 {
        let first = self.counts.iter().position(|&count| count != 0);
        first.map_or(0, |bucket| range_of(bucket).0)
    }

    /// Returns an upper bound of the largest value, at most a 32nd above it. Returns 0 if there are
    /// no values.
    pub fn max(&self) -> u64 {
        let last = self.counts.iter().rposition(|&count| count != 0);
        last.map_or(0, |bucket| range_of(bucket).1)
    }

    /// Returns the quantile `q`, a number from 0 to 1. At least the fraction `q` of all values is
    /// less than or equal to the result.
    ///
    /// The result is the upper end of a bucket, and so at most a 32nd too large. It is 0 if there
    /// are no values.
    pub fn quantile(&self, q: f64) -> u64 {
        let count = self.count();
        // `rank` is the smallest number of values that makes up the fraction `q`. A NaN counts as
        // 0.
        let exact = q.clamp(0.0, 1.0) * count as f64;
        let whole = exact as u64;
        let rank = (whole + u64::from((whole as f64) < exact)).clamp(1, count.max(1));
        let mut seen = 0;
        let reached = self.counts.iter().position(|&count| {
            seen += count;
            seen >= rank
        });
        reached.map_or(0, |bucket| range_of(bucket).1)
    }

    /// Returns the buckets that are not empty, in ascending order: the largest value that belongs
    /// to the bucket, and the number of values in it.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        self.counts
            .iter()
            .enumerate()
            .filter(|&(_, &count)| count != 0)
            .map(|(bucket, &count)| (range_of(bucket).1, count))
    }

    /// Returns what was recorded since `earlier`, a snapshot of the same histogram.
    #[must_use]
    pub fn since(&self, earlier: &Snapshot) -> Snapshot {
        let mut new = self.clone();
        for (count, before) in new.counts.iter_mut().zip(&earlier.counts) {
            *count = count.wrapping_sub(*before);
        }
        new.sum = new.sum.wrapping_sub(earlier.sum);
        new.unrecorded = new.unrecorded.wrapping_sub(earlier.unrecorded);
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_every_value_in_order() {
        let mut next = 0u64;
        for bucket in 0..BUCKETS {
            let (least, most) = range_of(bucket);
            assert_eq!(least, next, "bucket {bucket}");
            assert_eq!(bucket_of(least), bucket);
            assert_eq!(bucket_of(most), bucket);
            assert!((most - least) <= least / 32);
            next = most.wrapping_add(1);
        }
        assert_eq!(next, 0, "the last bucket ends at the largest value");
    }

    #[test]
    fn quantiles_of_known_values() {
        let mut seen = Snapshot::empty();
        for value in 1..=10 {
            seen.counts[bucket_of(value)] += 1;
        }
        assert_eq!(seen.quantile(0.0), 1);
        assert_eq!(seen.quantile(0.5), 5);
        assert_eq!(seen.quantile(0.91), 10);
        assert_eq!(seen.quantile(f64::NAN), 1);
        assert_eq!((seen.min(), seen.max(), seen.count()), (1, 10, 10));
        assert_eq!(Snapshot::empty().quantile(0.5), 0);
        assert_eq!(seen.since(&seen).count(), 0);
    }
}
