//! The smallest and the largest value that a histogram has recorded, exactly.
//!
//! All CPUs share both words. A value between the two only reads them, so their cache line stays
//! with every CPU. Soon after the start, hardly any value lies outside.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// The smallest and the largest value, as bits of `f64`. No other memory depends on the words, so
/// all accesses are relaxed.
pub struct Extremes {
    least: AtomicU64,
    most: AtomicU64,
}

impl Default for Extremes {
    fn default() -> Self {
        Extremes {
            least: AtomicU64::new(f64::INFINITY.to_bits()),
            most: AtomicU64::new(f64::NEG_INFINITY.to_bits()),
        }
    }
}

impl Extremes {
    /// Notes `value`. Ignores what is not a number. Costs two loads if the value is not extreme.
    #[inline]
    pub fn note(&self, value: f64) {
        replace(&self.least, value, |least| value < least);
        replace(&self.most, value, |most| value > most);
    }

    /// Returns `value`, moved between the smallest and the largest value. Returns it as it is if no
    /// value was noted.
    pub fn bound(&self, value: f64) -> f64 {
        match self.range() {
            (least, most) if least <= most => value.clamp(least, most),
            _ => value,
        }
    }

    /// Returns the smallest and the largest value: infinity and minus infinity before the first.
    pub fn range(&self) -> (f64, f64) {
        let [least, most] =
            [&self.least, &self.most].map(|word| f64::from_bits(word.load(Relaxed)));
        (least, most)
    }
}

fn replace(word: &AtomicU64, value: f64, is_beyond: impl Fn(f64) -> bool) {
    if is_beyond(f64::from_bits(word.load(Relaxed))) {
        // The update fails if another thread noted a value that is as extreme.
        let _ = word.fetch_update(Relaxed, Relaxed, |now| {
            is_beyond(f64::from_bits(now)).then_some(value.to_bits())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_has_every_number() {
        let extremes = Extremes::default();
        extremes.note(f64::NAN);
        assert_eq!(extremes.bound(7.0), 7.0);
        for value in [3.0, -1.5, f64::NAN, 8.0, 2.0] {
            extremes.note(value);
        }
        assert_eq!(extremes.range(), (-1.5, 8.0));
        assert_eq!(
            [-9.0, 4.0, 9.0].map(|value| extremes.bound(value)),
            [-1.5, 4.0, 8.0]
        );
    }
}
