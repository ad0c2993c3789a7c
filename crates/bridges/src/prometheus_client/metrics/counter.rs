//! The module `prometheus_client::metrics::counter`, counting per CPU.

use crate::kinds::FloatSum;
use ::prometheus_client::encoding::{EncodeCounterValue, EncodeMetric, MetricEncoder, NoLabelSet};
use ::prometheus_client::metrics::{MetricType, TypedMetric};
use pinfold::counter::EventCounter;
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
        N::add(&self.store, N::ONE);
    }

    /// Adds `v`.
    pub fn inc_by(&self, v: N) {
        N::add(&self.store, v);
    }

    /// Returns the count, summed over the CPUs.
    pub fn get(&self) -> N {
        N::value(&self.store)
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
pub trait CounterValue: EncodeCounterValue + fmt::Debug + Copy + private::Sealed {
    #[doc(hidden)]
    type Store: Send + Sync + 'static;
    #[doc(hidden)]
    const ONE: Self;
    #[doc(hidden)]
    fn zero() -> Self::Store;
    #[doc(hidden)]
    fn add(store: &Self::Store, amount: Self);
    #[doc(hidden)]
    fn value(store: &Self::Store) -> Self;
}

mod private {
    pub trait Sealed {}
    impl Sealed for u64 {}
    impl Sealed for f64 {}
}

impl CounterValue for u64 {
    type Store = EventCounter;
    const ONE: u64 = 1;

    fn zero() -> EventCounter {
        EventCounter::new()
    }

    #[inline]
    fn add(store: &EventCounter, amount: u64) {
        store.add(amount);
    }

    fn value(store: &EventCounter) -> u64 {
        store.sum()
    }
}

impl CounterValue for f64 {
    type Store = FloatSum;
    const ONE: f64 = 1.0;

    fn zero() -> FloatSum {
        FloatSum::default()
    }

    #[inline]
    fn add(store: &FloatSum, amount: f64) {
        store.add(amount);
    }

    fn value(store: &FloatSum) -> f64 {
        store.value()
    }
}

impl<N: CounterValue, A> Clone for Counter<N, A> {
    fn clone(&self) -> Self {
        Counter {
            store: Arc::clone(&self.store),
            atomic: PhantomData,
        }
    }
}

impl<N: CounterValue, A> Default for Counter<N, A> {
    fn default() -> Self {
        Counter {
            store: Arc::new(N::zero()),
            atomic: PhantomData,
        }
    }
}

impl<N: CounterValue, A> fmt::Debug for Counter<N, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counter")
            .field("value", &self.get())
            .finish()
    }
}

impl<N: CounterValue, A> TypedMetric for Counter<N, A> {
    const TYPE: MetricType = MetricType::Counter;
}

impl<N: CounterValue, A> EncodeMetric for Counter<N, A> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_counter::<NoLabelSet, _, u64>(&self.get(), None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}
