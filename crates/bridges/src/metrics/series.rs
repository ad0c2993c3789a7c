//! The metric of a series, and the values that are read from it.

use crate::kinds::{Buckets, Extremes, FloatGauge, FloatSum, lock};
use pinfold::counter::{EventCounter, PerCpuHistogram};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A counter that can also be raised to a count that was made elsewhere.
pub struct Counter {
    events: EventCounter,
    /// Held while raising, so that two threads that raise at once do not both add the same
    /// difference.
    raising: Mutex<()>,
}

impl Counter {
    pub fn new() -> Self {
        Counter {
            events: EventCounter::new(),
            raising: Mutex::new(()),
        }
    }

    #[inline]
    pub fn add(&self, amount: u64) {
        self.events.add(amount);
    }

    /// Raises the count to at least `value`. Amounts that other threads add during the call count
    /// on top.
    pub fn raise_to(&self, value: u64) {
        let _raising = lock(&self.raising);
        let missing = value.saturating_sub(self.events.sum());
        if missing > 0 {
            self.events.add(missing);
        }
    }

    pub fn value(&self) -> u64 {
        self.events.sum()
    }

    /// Returns the counter of the events.
    pub fn events(&self) -> &EventCounter {
        &self.events
    }
}

/// A metric, and when it was last used.
///
/// A thread that uses the metric sets `touched`, unless it is set already. A reader clears it and
/// notes the time. So a use writes to memory that all CPUs share once for each reading, at most.
pub struct Tracked<M> {
    metric: M,
    touched: AtomicBool,
    /// When a reader last found the metric touched, in nanoseconds since the recorder was made.
    seen: AtomicU64,
}

impl<M> Tracked<M> {
    pub fn new(metric: M) -> Self {
        Tracked {
            metric,
            touched: AtomicBool::new(true),
            seen: AtomicU64::new(0),
        }
    }

    /// Returns the metric, for a use.
    #[inline]
    pub fn touch(&self) -> &M {
        if !self.touched.load(Relaxed) {
            self.touched.store(true, Relaxed);
        }
        &self.metric
    }

    /// Returns the metric, for a reader.
    pub fn metric(&self) -> &M {
        &self.metric
    }

    /// Returns whether the metric was not used for longer than `limit`, as far as the readings
    /// tell. `now` is the time since the recorder was made.
    fn is_idle(&self, now: Duration, limit: Duration) -> bool {
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        if self.touched.swap(false, Relaxed) {
            self.seen.store(now, Relaxed);
        }
        u128::from(now.saturating_sub(self.seen.load(Relaxed))) > limit.as_nanos()
    }
}

/// A histogram, of one of two kinds.
pub enum Histogram {
    /// Shows quantiles over everything recorded.
    Quantiles {
        scaled: Box<PerCpuHistogram>,
        /// `scaled` records the values times this factor, rounded to whole numbers.
        scale: f64,
        sum: FloatSum,
        extremes: Extremes,
        /// The quantiles to show, from 0 to 1.
        shown: Arc<[f64]>,
    },
    /// Shows how many values are not above each of some bounds.
    Buckets(Buckets),
}

impl Histogram {
    pub fn record(&self, value: f64) {
        match self {
            Histogram::Quantiles {
                scaled,
                scale,
                sum,
                extremes,
                ..
            } => {
                extremes.note(value);
                scaled.record(to_scale(value, *scale));
                sum.add(value);
            }
            Histogram::Buckets(buckets) => buckets.observe(value),
        }
    }

    /// Returns Prometheus's name for this kind.
    pub fn type_name(&self) -> &'static str {
        match self {
            Histogram::Quantiles { .. } => "summary",
            Histogram::Buckets(_) => "histogram",
        }
    }

    /// Reads the histogram.
    pub fn distribution(&self) -> Distribution {
        match self {
            Histogram::Quantiles {
                scaled,
                scale,
                sum,
                extremes,
                shown,
            } => {
                let snapshot = scaled.snapshot();
                let count = snapshot.count();
                let value = |at| {
                    let near = snapshot.quantile(at) as f64 / scale;
                    let value = match (count, at) {
                        (0, _) => 0.0,
                        (_, 0.0) => extremes.bound(f64::NEG_INFINITY),
                        (_, 1.0) => extremes.bound(f64::INFINITY),
                        _ => extremes.bound(near),
                    };
                    // What is no number has no extremes.
                    if value.is_finite() { value } else { near }
                };
                Distribution {
                    count,
                    sum: sum.value(),
                    quantiles: shown.iter().map(|&at| (at, value(at))).collect(),
                    buckets: Vec::new(),
                }
            }
            Histogram::Buckets(buckets) => {
                let mut below = 0;
                let buckets_below = (buckets.counts().into_iter()).map(|(bound, count)| {
                    below += count;
                    (bound, below)
                });
                Distribution {
                    buckets: buckets_below.collect(),
                    count: below,
                    sum: buckets.sum(),
                    quantiles: Vec::new(),
                }
            }
        }
    }
}

/// Returns the whole number nearest to `value` times `scale`. Returns 0 for a negative value, and
/// the largest number for one that is too large or not a number.
fn to_scale(value: f64, scale: f64) -> u64 {
    match (value * scale).round() {
        scaled if scaled.is_nan() => u64::MAX,
        // A cast to a whole number saturates.
        scaled => scaled as u64,
    }
}

/// The metric of a series, of any kind.
#[derive(Clone)]
pub enum Metric {
    Counter(Arc<Tracked<Counter>>),
    Gauge(Arc<Tracked<FloatGauge>>),
    Histogram(Arc<Tracked<Histogram>>),
}

impl Metric {
    /// Reads the metric.
    pub fn value(&self) -> Value {
        match self {
            Metric::Counter(counter) => Value::Counter(counter.metric().value()),
            Metric::Gauge(gauge) => Value::Gauge(gauge.metric().value()),
            Metric::Histogram(histogram) => Value::Histogram(histogram.metric().distribution()),
        }
    }

    /// Returns whether the metric was not used for longer than `limit`. `now` is the time since the
    /// recorder was made.
    pub fn is_idle(&self, now: Duration, limit: Duration) -> bool {
        match self {
            Metric::Counter(counter) => counter.is_idle(now, limit),
            Metric::Gauge(gauge) => gauge.is_idle(now, limit),
            Metric::Histogram(histogram) => histogram.is_idle(now, limit),
        }
    }
}

/// A series with its value at the time of the snapshot.
/// [`PinfoldRecorder::snapshot`](super::PinfoldRecorder::snapshot) returns them.
///
/// ```
/// use pinfold_bridges::metrics::PinfoldRecorder;
///
/// let recorder = PinfoldRecorder::new();
/// metrics::with_local_recorder(&recorder, || {
///     metrics::counter!("jobs", "queue" => "mail").increment(3);
/// });
/// let jobs = recorder.snapshot().next().expect("one series");
/// assert_eq!(jobs.labels, [("queue".to_owned(), "mail".to_owned())]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The metric's name, with the characters that Prometheus allows.
    pub name: String,
    /// The names of the labels, with the characters that Prometheus allows, and their values. They
    /// are sorted by name.
    pub labels: Vec<(String, String)>,
    /// The value.
    pub value: Value,
}

/// The value of a series.
///
/// ```
/// use pinfold_bridges::metrics::{PinfoldRecorder, Value};
///
/// let recorder = PinfoldRecorder::new();
/// metrics::with_local_recorder(&recorder, || metrics::gauge!("depth").set(1.5));
/// let depth = recorder.snapshot().next().expect("one series");
/// assert_eq!(depth.value, Value::Gauge(1.5));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// The events since the recorder was made.
    Counter(u64),
    /// The value when it was read.
    Gauge(f64),
    /// The distribution of the values since the recorder was made.
    Histogram(Distribution),
}

/// The distribution of a histogram's values.
///
/// ```
/// use pinfold_bridges::metrics::{PinfoldRecorder, Value};
///
/// let recorder = PinfoldRecorder::builder().buckets([1.0]).build()?;
/// metrics::with_local_recorder(&recorder, || {
///     let took = metrics::histogram!("took");
///     took.record(0.5);
///     took.record(2.5);
/// });
/// let took = recorder.snapshot().next().expect("one series");
/// let Value::Histogram(took) = took.value else { panic!("a histogram") };
/// assert_eq!((took.count, took.sum), (2, 3.0));
/// assert_eq!(took.buckets, [(1.0, 1), (f64::INFINITY, 2)]);
/// # Ok::<(), pinfold_bridges::metrics::BuildError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    /// The number of values.
    pub count: u64,
    /// The sum of the values.
    pub sum: f64,
    /// Quantiles, from 0 to 1, each with its value. Empty if the histogram has buckets.
    pub quantiles: Vec<(f64, f64)>,
    /// Upper bounds, the last of which is infinite, each with the number of values that are not
    /// above it. Empty if the histogram shows quantiles.
    pub buckets: Vec<(f64, u64)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaling_saturates() {
        assert_eq!(to_scale(0.004, 1e9), 4_000_000);
        assert_eq!(to_scale(-3.0, 1e9), 0);
        for large in [1e11, f64::INFINITY, f64::NAN] {
            assert_eq!(to_scale(large, 1e9), u64::MAX, "{large}");
        }
    }

    #[test]
    fn raising_never_lowers() {
        let counter = Counter::new();
        counter.add(5);
        counter.raise_to(3);
        assert_eq!(counter.value(), 5);
        counter.raise_to(9);
        assert_eq!(counter.value(), 9);
    }
}
