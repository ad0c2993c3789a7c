//! A gauge of `f64` whose whole-numbered steps go per CPU.
//!
//! The value is `rest + whole`. Whole numbers (a connection more, a request less) are added to `whole`, a per-CPU counter,
//! without a lock; everything else is added to `rest`, under its lock. A floating-point sum cannot be split over CPUs
//! without a locked operation on each, and whole steps are what programs make millions of.
//!
//! Who may touch what: `rest` only under its lock; `whole` is made under the lock and then added to by anyone. `set` and
//! `value` hold the lock, so they see `rest` and `whole` belong together: a `set` takes effect when it swaps `whole` for 0, and no
//! step is lost, wherever it falls. A step that comes after the swap counts on top of what was set.

use super::lock;
use pinfold::counter::PercpuCounter;
use std::sync::{Mutex, OnceLock};

/// Larger steps go to `rest`: then 2^31 of them in one direction still fit the counter's 64 bits.
const WHOLE_MOST: f64 = 4_294_967_296.0;

/// See the module.
#[derive(Default)]
pub struct FloatGauge {
    rest: Mutex<f64>,
    /// Made by the first whole-numbered step: a gauge that is only ever set has no memory per CPU.
    whole: OnceLock<PercpuCounter>,
}

impl FloatGauge {
    /// Adds `step`, which may be negative.
    #[inline]
    pub fn add(&self, step: f64) {
        match (whole_number(step), self.whole.get()) {
            (Some(number), Some(whole)) => whole.add(number),
            (number, _) => self.add_slow(step, number),
        }
    }

    #[cold]
    fn add_slow(&self, step: f64, number: Option<i64>) {
        let mut rest = lock(&self.rest);
        match number {
            Some(number) => self.whole.get_or_init(PercpuCounter::new).add(number),
            None => *rest += step,
        }
    }

    /// Sets the value and says what it was.
    pub fn set(&self, value: f64) -> f64 {
        let mut rest = lock(&self.rest);
        let whole = self.whole.get().map_or(0, |whole| whole.swap(0));
        std::mem::replace(&mut *rest, value) + whole as f64
    }

    /// The value: exact as long as it, and what was added to it, fit an `f64`.
    pub fn value(&self) -> f64 {
        let rest = lock(&self.rest);
        *rest + self.whole.get().map_or(0, PercpuCounter::sum) as f64
    }
}

#[inline]
fn whole_number(step: f64) -> Option<i64> {
    (step.abs() <= WHOLE_MOST && step.trunc() == step).then_some(step as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn whole_numbers_are_told_from_others() {
        assert_eq!(whole_number(-3.0), Some(-3));
        assert_eq!(whole_number(-0.0), Some(0));
        for other in [0.5, f64::NAN, f64::INFINITY, 1e300, -1e10] {
            assert_eq!(whole_number(other), None, "{other}");
        }
    }

    #[test]
    fn set_keeps_fractions_exact_and_returns_what_was() {
        let gauge = FloatGauge::default();
        gauge.add(3.0);
        gauge.add(0.25);
        assert_eq!(gauge.set(0.1), 3.25);
        gauge.add(1e6);
        gauge.add(-1e6);
        assert_eq!(gauge.value(), 0.1);
    }

    #[test]
    fn no_step_is_lost_beside_sets() {
        let gauge = FloatGauge::default();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        gauge.add(2.0);
                        gauge.add(0.5);
                        gauge.add(-1.0);
                    }
                });
            }
            // Takes out what is there: what was taken and what is left must be everything.
            let taken = scope.spawn(|| (0..2_000).map(|_| gauge.set(0.0)).sum::<f64>());
            let taken = taken.join().unwrap();
            gauge.add(taken);
        });
        assert_eq!(gauge.value(), 4.0 * 20_000.0 * 1.5);
    }
}
