//! A histogram with bounds that its owner chose. Each bucket has an event counter. A value that
//! equals a bound counts in the bucket below that bound, as Prometheus requires.
//!
//! `PerCpuHistogram` has bounds of its own, so that its counts would not fit other bounds exactly.

use super::FloatSum;
use pinfold::counter::EventCounter;

/// Counts values in buckets.
pub struct Buckets {
    /// The upper bounds: finite, in ascending order, each once.
    bounds: Box<[f64]>,
    /// One counter for each bound, and a last one for values above all bounds and for what is not a
    /// number.
    counts: Box<[EventCounter]>,
    sum: FloatSum,
}

impl Buckets {
    /// Makes buckets with these upper bounds, in any order.
    ///
    /// Leaves out bounds that are infinite or not a number, because there is always a bucket
    /// without a bound.
    pub fn new(bounds: impl IntoIterator<Item = f64>) -> Buckets {
        let mut bounds: Vec<f64> = (bounds.into_iter())
            .filter(|bound| bound.is_finite())
            .collect();
        bounds.sort_by(f64::total_cmp);
        bounds.dedup();
        let counts = (0..=bounds.len()).map(|_| EventCounter::new()).collect();
        Buckets {
            bounds: bounds.into(),
            counts,
            sum: FloatSum::default(),
        }
    }

    /// Counts `value`.
    #[inline]
    pub fn observe(&self, value: f64) {
        let bucket = (self.bounds).partition_point(|&bound| bound < value || value.is_nan());
        self.counts[bucket].inc();
        self.sum.add(value);
    }

    /// Returns the sum of the observed values.
    pub fn sum(&self) -> f64 {
        self.sum.value()
    }

    /// Returns each bucket's upper bound, the last of which is infinite, and the number of values
    /// in that bucket alone.
    pub fn counts(&self) -> Vec<(f64, u64)> {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        bounds
            .zip(self.counts.iter().map(EventCounter::sum))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_belong_to_the_bucket_below() {
        let buckets = Buckets::new([2.0, 1.0, f64::INFINITY, 2.0, f64::NAN]);
        for value in [-1.0, 0.5, 1.0, 1.5, 2.0, 2.1, f64::INFINITY, f64::NAN] {
            buckets.observe(value);
        }
        assert_eq!(buckets.counts(), [(1.0, 3), (2.0, 2), (f64::INFINITY, 3)]);
    }
}
