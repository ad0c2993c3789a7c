//! A series' metric, and what is read from it.

use crate::kinds::{Buckets, FloatGauge, FloatSum, lock};
use pinfold::counter::{EventCounter, PercpuHistogram};
use std::sync::{Arc, Mutex};

/// A counter that others may also raise to what they counted elsewhere.
pub struct Counter {
    events: EventCounter,
    /// Held while raising: two that raise at the same time must not both add the same difference.
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

    /// Makes the count at least `value`. What is added meanwhile counts on top.
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
}

/// A histogram, either way.
pub enum Histogram {
    /// Quantiles over everything recorded.
    Quantiles {
        scaled: Box<PercpuHistogram>,
        /// Recorded are values times this, as whole numbers.
        scale: f64,
        sum: FloatSum,
        shown: Arc<[f64]>,
    },
    /// Counts below bounds.
    Buckets(Buckets),
}

impl Histogram {
    pub fn record(&self, value: f64) {
        match self {
            Histogram::Quantiles {
                scaled, scale, sum, ..
            } => {
                scaled.record(to_scale(value, *scale));
                sum.add(value);
            }
            Histogram::Buckets(buckets) => buckets.observe(value),
        }
    }

    /// What Prometheus calls it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Histogram::Quantiles { .. } => "summary",
            Histogram::Buckets(_) => "histogram",
        }
    }

    pub fn distribution(&self) -> Distribution {
        match self {
            Histogram::Quantiles {
                scaled,
                scale,
                sum,
                shown,
            } => {
                let snapshot = scaled.snapshot();
                let count = snapshot.count();
                let value = |at| match count {
                    0 => 0.0,
                    _ => snapshot.quantile(at) as f64 / scale,
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

/// Nearest whole number; negative values are 0, and what is too large, or not a number, is the largest.
fn to_scale(value: f64, scale: f64) -> u64 {
    match (value * scale).round() {
        scaled if scaled.is_nan() => u64::MAX,
        // Casts to whole numbers saturate.
        scaled => scaled as u64,
    }
}

/// A series' metric, whatever its kind.
#[derive(Clone)]
pub enum Metric {
    Counter(Arc<Counter>),
    Gauge(Arc<FloatGauge>),
    Histogram(Arc<Histogram>),
}

impl Metric {
    pub fn value(&self) -> Value {
        match self {
            Metric::Counter(counter) => Value::Counter(counter.value()),
            Metric::Gauge(gauge) => Value::Gauge(gauge.value()),
            Metric::Histogram(histogram) => Value::Histogram(histogram.distribution()),
        }
    }
}

/// A series and its value at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The metric's name, as Prometheus allows it.
    pub name: String,
    /// Label names, as Prometheus allows them, and values, sorted by name.
    pub labels: Vec<(String, String)>,
    /// What was counted.
    pub value: Value,
}

/// What a series says.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Events since the start.
    Counter(u64),
    /// The present value.
    Gauge(f64),
    /// How values were distributed since the start.
    Histogram(Distribution),
}

/// How values were distributed.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    /// How many there were.
    pub count: u64,
    /// What they add up to.
    pub sum: f64,
    /// Quantiles (0 to 1) with the values at which they are; empty where there are buckets.
    pub quantiles: Vec<(f64, f64)>,
    /// Upper bounds, the last infinite, with how many values are not above them; empty where there are quantiles.
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
