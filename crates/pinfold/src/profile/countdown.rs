//! Decides which allocations are sampled: each CPU counts bytes down to its next sample.
//!
//! Each CPU has one word, in the unit that also holds the words of its sheaves ([`COUNTDOWN`]). The
//! word is a signed number: the bytes that remain before the next sample, plus 1. If it is 0 or
//! less, no interval has begun. An allocation with room for its size subtracts the size from the
//! word. Any other allocation is sampled, and begins a new interval.
//!
//! # Who writes a word
//!
//! 1. The fast path, which takes an object and counts it in one critical section
//!    ([`kmalloc::alloc_counted`](crate::slab::kmalloc::alloc_counted)). An interrupt inside the
//!    section can have it count the same allocation twice. That happens about as often as an
//!    interrupt hits one given instruction.
//! 2. [`is_due`], for all other allocations. It computes the new word, and stores the new word only
//!    if the CPU's word is still the one that it read. Otherwise it begins again.
//! 3. [`set_interval`], from any CPU. It stores 0. The fast path may subtract from that 0, so a
//!    negative word means the same.
//!
//! # Why samples are not biased
//!
//! Intervals are drawn at random. The exponential distribution has no memory: whatever was counted
//! before, an allocation of S bytes is sampled with the same probability. So it does not matter on
//! which CPU a thread counts, or what becomes of the rest of an interval.

use super::math;
use crate::cache_units::{COUNTDOWN, units, word};
use crate::sys;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::possible;

/// The mean bytes from one sample to the next, if the user does not choose another number.
pub const DEFAULT_INTERVAL: u64 = 512 << 10;
/// The longest mean interval: a tebibyte.
pub const MAX_INTERVAL: u64 = 1 << 40;

/// How often a thread tries to count an allocation on the current CPU. Only other threads' progress
/// makes a try fail.
const TRIES: usize = 16;

static INTERVAL: AtomicU64 = AtomicU64::new(DEFAULT_INTERVAL);
/// The state of the random numbers.
static RANDOM: AtomicU64 = AtomicU64::new(0);

/// Returns the mean bytes from one sample to the next.
pub(super) fn interval() -> u64 {
    INTERVAL.load(Relaxed)
}

/// Seeds the random numbers.
pub(super) fn prepare() {
    RANDOM.store(sys::random(), Relaxed);
}

/// Sets the mean interval. The intervals that have begun are forgotten, except that an allocation
/// that is being counted meanwhile may keep the one of its CPU.
pub(super) fn set_interval(interval: u64) {
    INTERVAL.store(interval.clamp(1, MAX_INTERVAL), Relaxed);
    let units = (0..possible()).map(|index| units().unit(index));
    for unit in units.filter(|unit| !unit.is_null()) {
        word(unit, COUNTDOWN).store(0, Relaxed);
    }
}

/// Counts an allocation of `size` bytes. Returns whether it is to be sampled. Samples have been
/// started.
///
/// Costs one critical section, or a lock on the atomic backend. A sampled allocation costs some
/// more.
pub fn is_due(size: usize) -> bool {
    let size = size.clamp(1, isize::MAX as usize) as u64;
    for _ in 0..TRIES {
        // SAFETY: every unit has a word at `COUNTDOWN`.
        let Some(word) = (unsafe { units().load(COUNTDOWN) }) else {
            break;
        };
        let has_begun = word as i64 > 0;
        let left = if has_begun { word } else { draw() + 1 };
        let is_due = left <= size;
        let next = if is_due { draw() + 1 } else { left - size };
        // SAFETY: every unit has a word at `COUNTDOWN`.
        if unsafe { units().store_if_equal(COUNTDOWN, word, next) } {
            return is_due;
        }
    }
    // This CPU has no unit yet, or another thread holds the unit. An interval that begins and ends
    // with this allocation serves as well.
    draw() < size
}

/// Returns how many bytes an interval has room for before the allocation that is sampled.
///
/// Let x be the random distance to the next sample. An allocation of S bytes is sampled if x < S. S
/// is a whole number, so this is so exactly if the whole part of x is below S.
fn draw() -> u64 {
    (interval() as f64 * -math::ln(uniform())) as u64
}

/// Returns a random number above 0, and at most 1.
fn uniform() -> f64 {
    // The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), on a Weyl sequence.
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut bits = RANDOM.fetch_add(STEP, Relaxed).wrapping_add(STEP);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    ((bits >> 11) + 1) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::kmalloc;

    #[test]
    fn a_negative_word_begins_an_interval() {
        const TRIES: usize = 100;
        assert!(kmalloc::init() && !kmalloc::alloc(64).is_null());
        set_interval(1 << 20);
        let due = (0..TRIES).filter(|_| {
            let units = (0..possible()).map(|index| units().unit(index));
            for unit in units.filter(|unit| !unit.is_null()) {
                word(unit, COUNTDOWN).store(-5i64 as u64, Relaxed);
            }
            is_due(1 << 20)
        });
        // Each is due with probability 1 − 1/e. The bounds are six standard deviations away.
        let due = due.count();
        assert!((34..=92).contains(&due), "{due} of {TRIES} are due");
    }
}
