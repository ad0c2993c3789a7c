//! What the crate `metrics` gets to hold: an `Arc` for each CPU, made when it is first asked for there.
//!
//! A handle is cloned and dropped with every call of a macro. Were there one `Arc` for all, its count would be as contended
//! as the counter that is to be avoided.

use super::series::{Counter, Histogram};
use crate::kinds::FloatGauge;
use ::metrics::{CounterFn, GaugeFn, HistogramFn};
use std::sync::{Arc, OnceLock};

/// With more CPUs than this several share an `Arc`: the places of every series cost 16 bytes each.
const MOST: usize = 16;

/// A series and its `Arc`s.
pub struct Handles<M> {
    metric: Arc<M>,
    by_cpu: Box<[OnceLock<Arc<Handle<M>>>]>,
}

/// One CPU's way to the metric. On a cache line of its own, with the count that `Arc` puts before it.
#[repr(align(64))]
pub struct Handle<M>(Arc<M>);

impl<M> Handles<M> {
    pub fn new(metric: Arc<M>) -> Self {
        let places = pinfold_rseq::possible().clamp(1, MOST);
        Handles {
            metric,
            by_cpu: (0..places).map(|_| OnceLock::new()).collect(),
        }
    }

    /// The `Arc` of the CPU that runs this now; by the time it is used, any other will do as well.
    pub fn here(&self) -> Arc<Handle<M>> {
        let place = &self.by_cpu[pinfold_rseq::current() % self.by_cpu.len()];
        Arc::clone(place.get_or_init(|| Arc::new(Handle(Arc::clone(&self.metric)))))
    }
}

impl CounterFn for Handle<Counter> {
    fn increment(&self, value: u64) {
        self.0.add(value);
    }

    fn absolute(&self, value: u64) {
        self.0.raise_to(value);
    }
}

impl GaugeFn for Handle<FloatGauge> {
    fn increment(&self, value: f64) {
        self.0.add(value);
    }

    fn decrement(&self, value: f64) {
        self.0.add(-value);
    }

    fn set(&self, value: f64) {
        self.0.set(value);
    }
}

impl HistogramFn for Handle<Histogram> {
    fn record(&self, value: f64) {
        self.0.record(value);
    }
}
