//! The module `prometheus_client::metrics::histogram`, counting per CPU.

use crate::kinds::Buckets;
use ::prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
pub use ::prometheus_client::metrics::histogram::{
    exponential_buckets, exponential_buckets_range, linear_buckets,
};
use ::prometheus_client::metrics::{MetricType, TypedMetric};
use std::fmt;
use std::sync::Arc;

/// Counts values in buckets with bounds that the owner chose, per CPU. Clones share the counts.
///
/// The bounds may be in any order. Bounds that are infinite or not a number are left out, because
/// there is always a bucket without a bound.
///
/// ```
/// use pinfold_bridges::prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
///
/// let latency = Histogram::new(exponential_buckets(0.001, 2.0, 12));
/// latency.observe(0.004);
/// latency.observe(0.5);
/// assert_eq!((latency.count(), latency.sum()), (2, 0.504));
/// ```
#[derive(Clone)]
pub struct Histogram {
    buckets: Arc<Buckets>,
}

impl Histogram {
    /// Makes a histogram with these upper bounds.
    ///
    /// ```
    /// use pinfold_bridges::prometheus_client::metrics::histogram::Histogram;
    ///
    /// let sizes = Histogram::new([100.0, 10.0, f64::INFINITY]);
    /// sizes.observe(10.0);
    /// // A value that equals a bound counts in the bucket below that bound.
    /// assert!(format!("{sizes:?}").contains("[(10.0, 1), (100.0, 0), (inf, 0)]"));
    /// ```
    pub fn new(buckets: impl IntoIterator<Item = f64>) -> Histogram {
        Histogram {
            buckets: Arc::new(Buckets::new(buckets)),
        }
    }

    /// Counts `v`.
    pub fn observe(&self, v: f64) {
        self.buckets.observe(v);
    }

    /// Returns the sum of all observed values, each exact to the billionth.
    pub fn sum(&self) -> f64 {
        self.buckets.sum()
    }

    /// Returns the number of observed values.
    pub fn count(&self) -> u64 {
        total(&self.buckets.counts())
    }
}

/// Returns the number of values in all buckets.
fn total(buckets: &[(f64, u64)]) -> u64 {
    buckets.iter().map(|bucket| bucket.1).sum()
}

impl fmt::Debug for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Histogram")
            .field("sum", &self.sum())
            .field("buckets", &self.buckets.counts())
            .finish()
    }
}

impl TypedMetric for Histogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        // The sum of the buckets that were just read, so that the count equals the last cumulative
        // bucket, even if other threads observe values at the same time.
        let buckets = self.buckets.counts();
        encoder.encode_histogram::<NoLabelSet>(self.sum(), total(&buckets), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}
