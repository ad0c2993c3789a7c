//! The sum of non-negative `f64`, added to per CPU, as histograms have it.
//!
//! A value is split into its whole part and billionths, each of which is an event counter: a duration in seconds is exact to
//! the nanosecond, and a value below 1 costs one add. What fits neither (negative, infinite, not a number, above 2^40) is
//! added to `odd`, under the lock.
//!
//! Billionths of a service that observes a million values a second fill 64 bits within a day. Every reading therefore
//! carries on from the previous one, in 128 bits: sums are right as long as someone reads between two overflows.

use super::lock;
use pinfold::counter::EventCounter;
use std::sync::Mutex;

const BILLION: f64 = 1e9;
const SPLIT_MOST: f64 = 1_099_511_627_776.0;

/// See the module.
pub struct FloatSum {
    whole: EventCounter,
    billionths: EventCounter,
    reading: Mutex<Reading>,
}

#[derive(Default)]
struct Reading {
    odd: f64,
    whole: Carry,
    billionths: Carry,
}

/// A count of 64 bits that has come round, continued.
#[derive(Default)]
struct Carry {
    seen: u64,
    total: u128,
}

impl Carry {
    fn advance(&mut self, now: u64) -> u128 {
        self.total += u128::from(now.wrapping_sub(self.seen));
        self.seen = now;
        self.total
    }
}

impl Default for FloatSum {
    fn default() -> Self {
        FloatSum {
            whole: EventCounter::new(),
            billionths: EventCounter::new(),
            reading: Mutex::default(),
        }
    }
}

impl FloatSum {
    /// Adds `value`.
    #[inline]
    pub fn add(&self, value: f64) {
        if !(0.0..=SPLIT_MOST).contains(&value) {
            lock(&self.reading).odd += value;
            return;
        }
        let whole = value as u64;
        let billionths = ((value - whole as f64) * BILLION).round() as u64;
        if whole > 0 {
            self.whole.add(whole);
        }
        if billionths > 0 {
            self.billionths.add(billionths);
        }
    }

    /// The sum of everything added so far.
    pub fn value(&self) -> f64 {
        let mut reading = lock(&self.reading);
        let whole = reading.whole.advance(self.whole.sum());
        let billionths = reading.billionths.advance(self.billionths.sum());
        let sum = whole * 1_000_000_000 + billionths;
        sum as f64 / BILLION + reading.odd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimal_fractions_add_up_exactly() {
        let sum = FloatSum::default();
        for _ in 0..10 {
            sum.add(0.1);
        }
        sum.add(41.0);
        assert_eq!(sum.value(), 42.0);
    }

    #[test]
    fn odd_values_count_too() {
        let sum = FloatSum::default();
        sum.add(-2.5);
        sum.add(1e13);
        sum.add(0.5);
        assert_eq!(sum.value(), 1e13 - 2.0);
        sum.add(f64::INFINITY);
        assert_eq!(sum.value(), f64::INFINITY);
        sum.add(f64::NAN);
        assert!(sum.value().is_nan());
    }

    #[test]
    fn an_overflow_is_carried() {
        let mut carry = Carry::default();
        assert_eq!(carry.advance(u64::MAX), u128::from(u64::MAX));
        assert_eq!(carry.advance(4), u128::from(u64::MAX) + 5);
    }
}
