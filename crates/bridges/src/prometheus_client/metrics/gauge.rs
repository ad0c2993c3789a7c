//! The module `prometheus_client::metrics::gauge`, counting per CPU.

use super::store::{Level, Store, metric};
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
        self.store.add(N::Store::ONE);
    }

    /// Adds `v`.
    pub fn inc_by(&self, v: N) {
        self.store.add(v);
    }

    /// Subtracts 1.
    pub fn dec(&self) {
        self.store.sub(N::Store::ONE);
    }

    /// Subtracts `v`.
    pub fn dec_by(&self, v: N) {
        self.store.sub(v);
    }

    /// Sets the value and returns the exact previous one. A step of another thread at the same time
    /// counts either in the result or in the new value. Costs at least as much as
    /// [`get`](Gauge::get).
    pub fn set(&self, v: N) -> N {
        self.store.swap(v)
    }

    /// Returns the value, summed over the CPUs.
    pub fn get(&self) -> N {
        self.store.value()
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
pub trait GaugeValue: EncodeGaugeValue + fmt::Debug + Copy {
    #[doc(hidden)]
    type Store: Level<Self>;
}

impl GaugeValue for i64 {
    type Store = PerCpuCounter;
}

impl GaugeValue for u64 {
    type Store = PerCpuCounter;
}

impl GaugeValue for f64 {
    type Store = FloatGauge;
}

metric!(Gauge, GaugeValue, |encoder, value| encoder
    .encode_gauge(&value));
