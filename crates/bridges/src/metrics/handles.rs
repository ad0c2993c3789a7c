//! The handles that the crate `metrics` holds: one `Arc` for each CPU, made when it is first needed
//! there.
//!
//! A macro clones and drops a handle at every call. If all CPUs shared one `Arc`, its reference
//! count would be as contended as the counter that this crate avoids.

use super::series::{Counter, Histogram, Tracked};
use crate::kinds::FloatGauge;
use ::metrics::{CounterFn, GaugeFn, HistogramFn};
use std::sync::{Arc, OnceLock};

/// The largest number of `Arc`s for a series. With more CPUs, several share an `Arc`, because each
/// place costs 16 bytes for every series.
const MOST: usize = 16;

/// The metric of a series, and its `Arc`s.
pub struct Handles<M> {
    metric: Arc<Tracked<M>>,
    by_cpu: Box<[OnceLock<Arc<Handle<M>>>]>,
}

/// A handle that the threads on one CPU use. It lies on a cache line of its own, together with the
/// reference count that `Arc` puts before it.
#[repr(align(64))]
pub struct Handle<M>(Arc<Tracked<M>>);

impl<M> Handles<M> {
    pub fn new(metric: Arc<Tracked<M>>) -> Self {
        let places = pinfold_rseq::possible().clamp(1, MOST);
        Handles {
            metric,
            by_cpu: (0..places).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Returns a clone of the `Arc` of the CPU that the thread runs on. The thread may move to
    /// another CPU during the call. Then the clone only costs more.
    pub fn here(&self) -> Arc<Handle<M>> {
        let place = &self.by_cpu[pinfold_rseq::current() % self.by_cpu.len()];
        Arc::clone(place.get_or_init(|| Arc::new(Handle(Arc::clone(&self.metric)))))
    }
}

impl CounterFn for Handle<Counter> {
    fn increment(&self, value: u64) {
        self.0.touch().add(value);
    }

    fn absolute(&self, value: u64) {
        self.0.touch().raise_to(value);
    }
}

impl GaugeFn for Handle<FloatGauge> {
    fn increment(&self, value: f64) {
        self.0.touch().add(value);
    }

    fn decrement(&self, value: f64) {
        self.0.touch().add(-value);
    }

    fn set(&self, value: f64) {
        self.0.touch().set(value);
    }
}

impl HistogramFn for Handle<Histogram> {
    fn record(&self, value: f64) {
        self.0.touch().record(value);
    }
}
