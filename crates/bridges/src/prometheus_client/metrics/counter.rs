//! The module `prometheus_client::metrics::counter`, counting per CPU.

use super::store::{Store, metric};
use crate::kinds::FloatSum;
use ::prometheus_client::encoding::{EncodeCounterValue, EncodeMetric, MetricEncoder, NoLabelSet};
use ::prometheus_client::metrics::{MetricType, TypedMetric};
use pinfold::counter::EventCounter;
use pinfold::export::{ShowError, show};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Counts what only grows. Clones share the count.
///
/// `N` is `u64`, or `f64` for sums such as seconds spent, which are exact to the billionth. `A` is
/// not used: it lets programs write the type as with `prometheus-client`.
///
/// ```
/// use pinfold_bridges::prometheus_client::metrics::counter::Counter;
/// use std::sync::atomic::AtomicU64;
///
/// let requests: Counter = Counter::default();
/// requests.inc();
/// requests.inc_by(2);
/// assert_eq!(requests.get(), 3);
///
/// let seconds = Counter::<f64, AtomicU64>::default();
/// seconds.inc_by(0.25);
/// assert_eq!(seconds.get(), 0.25);
/// ```
pub struct Counter<N: CounterValue = u64, A = AtomicU64> {
    store: Arc<N::Store>,
    atomic: PhantomData<fn() -> A>,
}

impl<N: CounterValue, A> Counter<N, A> {
    /// Adds 1.
    pub fn inc(&self) {
        self.store.add(N::Store::ONE);
    }

    /// Adds `v`.
    pub fn inc_by(&self, v: N) {
        self.store.add(v);
    }

    /// Returns the count, summed over the CPUs.
    pub fn get(&self) -> N {
        self.store.value()
    }
}

impl<A> Counter<u64, A> {
    /// Shows the counter to other processes under `name`, until the process ends: `pinfold vmstat
    /// PID` prints it. The counter stays in memory from then on.
    ///
    /// # Errors
    ///
    /// [`ShowError`], for example if the process does not run on Pinfold's malloc.
    ///
    /// ```
    /// use pinfold::export::ShowError;
    /// use pinfold_bridges::prometheus_client::metrics::counter::Counter;
    ///
    /// let requests: Counter = Counter::default();
    /// // This test does not run on Pinfold's malloc.
    /// assert_eq!(requests.show("requests"), Err(ShowError::NoSegment));
    /// ```
    pub fn show(&self, name: &str) -> Result<(), ShowError> {
        let store: &'static Arc<EventCounter> = Box::leak(Box::new(Arc::clone(&self.store)));
        show::<EventCounter>(name, store)
    }
}

/// Marks the types that a [`Counter`] can count in: `u64` and `f64`.
///
/// ```
/// use pinfold_bridges::prometheus_client::metrics::counter::{Counter, CounterValue};
///
/// fn add_all<N: CounterValue>(counter: &Counter<N>, values: &[N]) {
///     values.iter().for_each(|&value| counter.inc_by(value));
/// }
///
/// let seconds: Counter<f64> = Counter::default();
/// add_all(&seconds, &[0.25, 0.5]);
/// assert_eq!(seconds.get(), 0.75);
/// ```
pub trait CounterValue: EncodeCounterValue + fmt::Debug + Copy {
    #[doc(hidden)]
    type Store: Store<Self>;
}

impl CounterValue for u64 {
    type Store = EventCounter;
}

impl CounterValue for f64 {
    type Store = FloatSum;
}

metric!(Counter, CounterValue, |encoder, value| {
    encoder.encode_counter::<NoLabelSet, _, u64>(&value, None)
});
