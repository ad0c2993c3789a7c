//! A histogram with bounds that its owner chose: an event counter for each bucket, so that a value that equals a bound is
//! counted below it, as Prometheus wants it. (`PercpuHistogram` chooses its own bounds, and would round.)

use super::FloatSum;
use pinfold::counter::EventCounter;

/// See the module.
pub struct Buckets {
    /// Ascending, finite, without repetitions.
    bounds: Box<[f64]>,
    /// One more than there are bounds: the last counts what is above all of them, and what is not a number.
    counts: Box<[EventCounter]>,
    sum: FloatSum,
}

impl Buckets {
    /// With these upper bounds, in any order. Infinite ones and those that are not a number are left out: the bucket
    /// without a bound is always there.
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

    /// The sum of what was observed.
    pub fn sum(&self) -> f64 {
        self.sum.value()
    }

    /// Upper bounds, the last infinite, and how many values each bucket has; not cumulative.
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
