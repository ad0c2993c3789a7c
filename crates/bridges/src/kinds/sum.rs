//! A sum of non-negative `f64` that is added to per CPU, for histograms and for counters of `f64`.
//!
//! A value is split into its whole part and billionths. Each part has an event counter. So a
//! duration in seconds is exact to the nanosecond, and a value below 1 costs one add. A value that
//! cannot be split (negative, infinite, not a number, or above 2^40) is added to `odd`, under the
//! lock.
//!
//! The billionths of a service that observes a million values in a second fill 64 bits within a
//! day. So every reading continues from the previous one, in 128 bits. The sum is right if it is
//! read at least once between two overflows of a counter.

use super::lock;
use pinfold::counter::EventCounter;
use std::sync::Mutex;

/// Billionths in 1.
const BILLION: f64 = 1e9;
/// The largest value that is split, 2^40.
const MAX_SPLIT: f64 = 1_099_511_627_776.0;

/// A sum of values; see the module for how it is kept.
pub struct FloatSum {
    whole: EventCounter,
    billionths: EventCounter,
    reading: Mutex<Reading>,
}

/// The values that are not split, and what was read so far.
#[derive(Default)]
struct Reading {
    odd: f64,
    whole: Carry,
    billionths: Carry,
}

/// A count that continues a counter of 64 bits beyond its overflow.
#[derive(Default)]
struct Carry {
    seen: u64,
    total: u128,
}

impl Carry {
    /// Continues with `now`, the counter's present count. Returns the whole count.
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
    /// Adds `value`: one or two adds on the CPU's own words, or one under the lock if the value
    /// cannot be split.
    #[inline]
    pub fn add(&self, value: f64) {
        if !(0.0..=MAX_SPLIT).contains(&value) {
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

    /// Returns the sum of all values added so far.
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
    fn values_that_cannot_be_split_count_too() {
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
    fn a_count_continues_beyond_an_overflow() {
        let mut carry = Carry::default();
        assert_eq!(carry.advance(u64::MAX), u128::from(u64::MAX));
        assert_eq!(carry.advance(4), u128::from(u64::MAX) + 5);
    }
}
