//! A gauge of `f64` that counts whole-numbered steps per CPU.
//!
//! A floating-point sum cannot be split over CPUs without a locked operation on each CPU. But the
//! steps that programs make by the million are whole numbers: one connection more, one request
//! less.
//!
//! So the value is `rest + whole`. Whole-numbered steps are added to `whole`, a per-CPU counter,
//! without a lock. All other steps are added to `rest`, under its lock.
//!
//! The rules:
//!
//! 1. `rest` is read and written only under its lock.
//! 2. `whole` is made under that lock. After that, any thread adds to it without the lock.
//! 3. `set` and `value` hold the lock, so that they see a `rest` and a `whole` that belong
//!    together.
//! 4. A `set` takes effect when it swaps `whole` for 0. A step before the swap counts in the result
//!    of `set`, and a step after the swap counts on top of the new value. No step is lost.

use super::lock;
use pinfold::counter::PerCpuCounter;
use std::sync::{Mutex, OnceLock};

/// The largest step that goes to `whole`. About 2^31 steps of this size in one direction fit into
/// the counter's 64 bits.
const MAX_WHOLE: f64 = 4_294_967_296.0;

/// A value that goes up and down; see the module for how it is kept.
#[derive(Default)]
pub struct FloatGauge {
    rest: Mutex<f64>,
    /// Made by the first whole-numbered step, so that a gauge that is only ever set takes no memory
    /// on the CPUs.
    whole: OnceLock<PerCpuCounter>,
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

    /// Adds `step` to `rest` if it is not a whole number, and makes `whole` otherwise.
    #[cold]
    fn add_slow(&self, step: f64, number: Option<i64>) {
        let mut rest = lock(&self.rest);
        match number {
            Some(number) => self.whole.get_or_init(PerCpuCounter::new).add(number),
            None => *rest += step,
        }
    }

    /// Sets the value and returns the previous one.
    pub fn set(&self, value: f64) -> f64 {
        let mut rest = lock(&self.rest);
        let whole = self.whole.get().map_or(0, |whole| whole.swap(0));
        std::mem::replace(&mut *rest, value) + whole as f64
    }

    /// Returns the value. It is exact while the value, and the sums of the steps, can be
    /// represented as `f64`.
    pub fn value(&self) -> f64 {
        let rest = lock(&self.rest);
        *rest + self.whole.get().map_or(0, PerCpuCounter::sum) as f64
    }
}

/// Returns `step` as a whole number, if it is one and small enough for `whole`.
#[inline]
fn whole_number(step: f64) -> Option<i64> {
    (step.abs() <= MAX_WHOLE && step.trunc() == step).then_some(step as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn only_small_whole_numbers_go_per_cpu() {
        assert_eq!(whole_number(-3.0), Some(-3));
        assert_eq!(whole_number(-0.0), Some(0));
        for other in [0.5, f64::NAN, f64::INFINITY, 1e300, -1e10] {
            assert_eq!(whole_number(other), None, "{other}");
        }
    }

    #[test]
    fn set_keeps_fractions_exact_and_returns_the_previous_value() {
        let gauge = FloatGauge::default();
        gauge.add(3.0);
        gauge.add(0.25);
        assert_eq!(gauge.set(0.1), 3.25);
        gauge.add(1e6);
        gauge.add(-1e6);
        assert_eq!(gauge.value(), 0.1);
    }

    #[test]
    fn sets_lose_no_steps_of_other_threads() {
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
            // Takes the value out, again and again. The amounts taken out and the value that is
            // left must make up all steps.
            let taken = scope.spawn(|| (0..2_000).map(|_| gauge.set(0.0)).sum::<f64>());
            let taken = taken.join().unwrap();
            gauge.add(taken);
        });
        assert_eq!(gauge.value(), 4.0 * 20_000.0 * 1.5);
    }
}
