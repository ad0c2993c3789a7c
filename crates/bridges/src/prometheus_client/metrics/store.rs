//! What the counters and gauges of each type of number are kept in, and what both have in common.

use crate::kinds::{FloatGauge, FloatSum};
use pinfold::counter::{EventCounter, PerCpuCounter};

/// Keeps a count in numbers of type `N`. Programs cannot name this trait, so they cannot add types
/// of numbers.
pub trait Store<N>: Default + Send + Sync + 'static {
    const ONE: N;
    fn add(&self, amount: N);
    fn value(&self) -> N;
}

/// Keeps a value that also goes down.
pub trait Level<N>: Store<N> {
    fn sub(&self, amount: N);
    /// Sets the value and returns the previous one.
    fn swap(&self, value: N) -> N;
}

macro_rules! store {
    ($store:ty, $number:ty, $one:literal, $add:expr, $value:expr) => {
        impl Store<$number> for $store {
            const ONE: $number = $one;

            #[inline]
            fn add(&self, amount: $number) {
                $add(self, amount);
            }

            fn value(&self) -> $number {
                $value(self)
            }
        }
    };
    ($store:ty, $number:ty, $one:literal, $add:expr, $value:expr, $negated:expr, $swap:expr) => {
        store!($store, $number, $one, $add, $value);

        impl Level<$number> for $store {
            #[inline]
            fn sub(&self, amount: $number) {
                Store::add(self, $negated(amount));
            }

            fn swap(&self, value: $number) -> $number {
                $swap(self, value)
            }
        }
    };
}

store!(EventCounter, u64, 1, EventCounter::add, EventCounter::sum);
store!(FloatSum, f64, 1.0, FloatSum::add, FloatSum::value);
store!(
    PerCpuCounter,
    i64,
    1,
    PerCpuCounter::add,
    PerCpuCounter::sum,
    i64::wrapping_neg,
    PerCpuCounter::swap
);
// A `u64` is kept in the 64 bits of a counter of `i64`.
store!(
    PerCpuCounter,
    u64,
    1,
    |counter: &Self, amount: u64| counter.add(amount.cast_signed()),
    |counter: &Self| counter.sum().cast_unsigned(),
    u64::wrapping_neg,
    |counter: &Self, value: u64| counter.swap(value.cast_signed()).cast_unsigned()
);
store!(
    FloatGauge,
    f64,
    1.0,
    FloatGauge::add,
    FloatGauge::value,
    |amount: f64| -amount,
    FloatGauge::set
);

/// Implements for a type of metrics what all of them implement. A metric is an `Arc` of what it is
/// kept in, and a type that it does not use.
macro_rules! metric {
    ($metric:ident, $number:ident, |$encoder:ident, $value:ident| $encode:expr) => {
        impl<N: $number, A> Clone for $metric<N, A> {
            fn clone(&self) -> Self {
                $metric {
                    store: Arc::clone(&self.store),
                    atomic: PhantomData,
                }
            }
        }

        impl<N: $number, A> Default for $metric<N, A> {
            fn default() -> Self {
                $metric {
                    store: Arc::default(),
                    atomic: PhantomData,
                }
            }
        }

        impl<N: $number, A> fmt::Debug for $metric<N, A> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($metric))
                    .field("value", &self.get())
                    .finish()
            }
        }

        impl<N: $number, A> TypedMetric for $metric<N, A> {
            const TYPE: MetricType = MetricType::$metric;
        }

        impl<N: $number, A> EncodeMetric for $metric<N, A> {
            fn encode(&self, mut $encoder: MetricEncoder<'_>) -> fmt::Result {
                let $value = self.get();
                $encode
            }

            fn metric_type(&self) -> MetricType {
                Self::TYPE
            }
        }
    };
}
pub(super) use metric;
