//! As `prometheus_client::metrics::histogram`.

use crate::kinds::Buckets;
use ::prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
pub use ::prometheus_client::metrics::histogram::{
    exponential_buckets, exponential_buckets_range, linear_buckets,
};
use ::prometheus_client::metrics::{MetricType, TypedMetric};
use std::fmt;
use std::sync::Arc;

/// Buckets with the bounds that the owner chose, each counted per CPU. Clones count together.
///
/// Bounds are sorted; infinite ones and those that are not a number are left out, as the bucket without a bound is always there.
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
    /// A histogram with these upper bounds.
    pub fn new(buckets: impl IntoIterator<Item = f64>) -> Histogram {
        Histogram {
            buckets: Arc::new(Buckets::new(buckets)),
        }
    }

    /// Counts `v`.
    pub fn observe(&self, v: f64) {
        self.buckets.observe(v);
    }

    /// The sum of all that was observed, each value exact to the billionth.
    pub fn sum(&self) -> f64 {
        self.buckets.sum()
    }

    /// How many values were observed.
    pub fn count(&self) -> u64 {
        total(&self.buckets.counts())
    }
}

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
        // The count is that of the buckets just read, so that it equals the last of them whatever is observed meanwhile.
        let buckets = self.buckets.counts();
        encoder.encode_histogram::<NoLabelSet>(self.sum(), total(&buckets), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}
