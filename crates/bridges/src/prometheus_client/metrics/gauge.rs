//! The module `prometheus_client::metrics::gauge`, counting per CPU.

use crate::kinds::FloatGauge;
use ::prometheus_client::encoding::{EncodeGaugeValue, EncodeMetric, MetricEncoder};
use ::prometheus_client::metrics::{MetricType, TypedMetric};
use pinfold::counter::PerCpuCounter;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

/// Measures a value that goes up and down. Clones share the value.
///
/// `N` is `i64`, `u64` or `f64`. Whole-numbered steps are counted per CPU. Other steps of an `f64`
/// take a lock. `A` is not used: it lets programs write the type as with `prometheus-client`.
///
/// ```
/// use pinfold_bridges::prometheus_client::metrics::gauge::Gauge;
///
/// let connections: Gauge = Gauge::default();
/// connections.inc_by(3);
/// connections.dec();
/// assert_eq!(connections.get(), 2);
/// assert_eq!(connections.set(10), 2);
/// ```
pub struct Gauge<N: GaugeValue = i64, A = AtomicI64> {
    store: Arc<N::Store>,
    atomic: PhantomData<fn() -> A>,
}

impl<N: GaugeValue, A> Gauge<N, A> {
    /// Adds 1.
    pub fn inc(&self) {
        N::add(&self.store, N::ONE);
    }

    /// Adds `v`.
    pub fn inc_by(&self, v: N) {
        N::add(&self.store, v);
    }

    /// Subtracts 1.
    pub fn dec(&self) {
        N::sub(&self.store, N::ONE);
    }

    /// Subtracts `v`.
    pub fn dec_by(&self, v: N) {
        N::sub(&self.store, v);
    }

    /// Sets the value and returns the exact previous one. A step of another thread at the same time
    /// counts either in the result or in the new value. Costs at least as much as
    /// [`get`](Gauge::get).
    pub fn set(&self, v: N) -> N {
        N::swap(&self.store, v)
    }

    /// Returns the value, summed over the CPUs.
    pub fn get(&self) -> N {
        N::value(&self.store)
    }
}

/// Marks the types that a [`Gauge`] can measure in: `i64`, `u64` and `f64`.
///
/// ```
/// use pinfold_bridges::prometheus_client::metrics::gauge::{Gauge, GaugeValue};
///
/// fn move_to<N: GaugeValue>(from: &Gauge<N>, to: &Gauge<N>, amount: N) {
///     from.dec_by(amount);
///     to.inc_by(amount);
/// }
///
/// let (waiting, running): (Gauge, Gauge) = Default::default();
/// waiting.set(5);
/// move_to(&waiting, &running, 2);
/// assert_eq!((waiting.get(), running.get()), (3, 2));
/// ```
pub trait GaugeValue: EncodeGaugeValue + fmt::Debug + Copy + private::Sealed {
    #[doc(hidden)]
    type Store: Send + Sync + 'static;
    #[doc(hidden)]
    const ONE: Self;
    #[doc(hidden)]
    fn zero() -> Self::Store;
    #[doc(hidden)]
    fn add(store: &Self::Store, amount: Self);
    #[doc(hidden)]
    fn sub(store: &Self::Store, amount: Self);
    #[doc(hidden)]
    fn swap(store: &Self::Store, value: Self) -> Self;
    #[doc(hidden)]
    fn value(store: &Self::Store) -> Self;
}

mod private {
    pub trait Sealed {}
    impl Sealed for i64 {}
    impl Sealed for u64 {}
    impl Sealed for f64 {}
}

impl GaugeValue for i64 {
    type Store = PerCpuCounter;
    const ONE: i64 = 1;

    fn zero() -> PerCpuCounter {
        PerCpuCounter::new()
    }

    #[inline]
    fn add(store: &PerCpuCounter, amount: i64) {
        store.add(amount);
    }

    #[inline]
    fn sub(store: &PerCpuCounter, amount: i64) {
        store.sub(amount);
    }

    fn swap(store: &PerCpuCounter, value: i64) -> i64 {
        store.swap(value)
    }

    fn value(store: &PerCpuCounter) -> i64 {
        store.sum()
    }
}

/// Kept in the 64 bits of a counter of `i64`.
impl GaugeValue for u64 {
    type Store = PerCpuCounter;
    const ONE: u64 = 1;

    fn zero() -> PerCpuCounter {
        PerCpuCounter::new()
    }

    #[inline]
    fn add(store: &PerCpuCounter, amount: u64) {
        store.add(amount.cast_signed());
    }

    #[inline]
    fn sub(store: &PerCpuCounter, amount: u64) {
        store.sub(amount.cast_signed());
    }

    fn swap(store: &PerCpuCounter, value: u64) -> u64 {
        store.swap(value.cast_signed()).cast_unsigned()
    }

    fn value(store: &PerCpuCounter) -> u64 {
        store.sum().cast_unsigned()
    }
}

impl GaugeValue for f64 {
    type Store = FloatGauge;
    const ONE: f64 = 1.0;

    fn zero() -> FloatGauge {
        FloatGauge::default()
    }

    #[inline]
    fn add(store: &FloatGauge, amount: f64) {
        store.add(amount);
    }

    #[inline]
    fn sub(store: &FloatGauge, amount: f64) {
        store.add(-amount);
    }

    fn swap(store: &FloatGauge, value: f64) -> f64 {
        store.set(value)
    }

    fn value(store: &FloatGauge) -> f64 {
        store.value()
    }
}

impl<N: GaugeValue, A> Clone for Gauge<N, A> {
    fn clone(&self) -> Self {
        Gauge {
            store: Arc::clone(&self.store),
            atomic: PhantomData,
        }
    }
}

impl<N: GaugeValue, A> Default for Gauge<N, A> {
    fn default() -> Self {
        Gauge {
            store: Arc::new(N::zero()),
            atomic: PhantomData,
        }
    }
}

impl<N: GaugeValue, A> fmt::Debug for Gauge<N, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gauge").field("value", &self.get()).finish()
    }
}

impl<N: GaugeValue, A> TypedMetric for Gauge<N, A> {
    const TYPE: MetricType = MetricType::Gauge;
}

impl<N: GaugeValue, A> EncodeMetric for Gauge<N, A> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_gauge(&self.get())
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}
