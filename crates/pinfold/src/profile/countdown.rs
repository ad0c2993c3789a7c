//! Decides which allocations are sampled: each CPU counts bytes down to its next sample.
//!
//! Each CPU has two words, in the unit that also holds the words of its sheaves:
//!
//! | offset | word |
//! |---|---|
//! | [`COUNTDOWN`] | the bytes that remain before the next sample, plus 1: a signed number |
//! | [`COUNTDOWN`] + 8 | the mean of the present interval |
//!
//! An allocation with room for its size subtracts the size from the first word. Any other
//! allocation is sampled, and begins a new interval. If the first word is 0 or less, or the second
//! word is 0, no interval has begun.
//!
//! # Who writes the words
//!
//! 1. The fast path, which takes an object and counts it in one critical section
//!    ([`kmalloc::alloc_counted`](crate::slab::kmalloc::alloc_counted)). It reads and writes only
//!    the first word. An interrupt inside the section can have it count the same allocation twice.
//!    That happens about as often as an interrupt hits one given instruction.
//! 2. [`due`], for all other allocations. It computes both words, and stores them only if the CPU's
//!    words are still those that it read. Otherwise it begins again.
//! 3. [`set_interval`], from any CPU. It stores 0 in both words. The fast path may subtract from
//!    the first 0, so a negative word means the same.
//!
//! # Why samples are not biased
//!
//! The length of an interval is drawn at random, from an exponential distribution. That
//! distribution has no memory: whatever was counted before, an allocation of S bytes is sampled
//! with the same probability, which depends on S and the interval's mean only. So it does not
//! matter on which CPU a thread counts, or what becomes of the rest of an interval.
//!
//! A sample costs microseconds. In a program that allocates many gigabytes a second, samples at the
//! default mean would take a tenth of the time or more. So [`pace`] chooses a longer mean for the
//! intervals that begin later. It knows only what was sampled before, and the present interval
//! keeps its mean. So each sample still stands for the inverse of its probability.

use super::math;
use crate::cache_units::{COUNTDOWN, units, word};
use crate::sys;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU64};
use pinfold_rseq::possible;

/// The mean bytes from one sample to the next, if the user does not choose another number.
pub const DEFAULT_INTERVAL: u64 = 512 << 10;
/// The longest mean interval: a tebibyte.
pub const MAX_INTERVAL: u64 = 1 << 40;

/// How often a thread tries to count an allocation on the current CPU. Only other threads' progress
/// makes a try fail.
const TRIES: usize = 16;

/// The mean of the intervals that begin from now on.
static INTERVAL: AtomicU64 = AtomicU64::new(DEFAULT_INTERVAL);
/// The state of the random numbers.
static RANDOM: AtomicU64 = AtomicU64::new(0);

/// Whether [`pace`] may choose the mean.
static IS_PACED: AtomicBool = AtomicBool::new(true);
/// The most samples a second, of all CPUs together, that [`pace`] aims at. A sample with a call
/// stack takes about 3 µs, so they take about a hundredth of one CPU's time.
const MOST_A_SECOND: u64 = 4000;
/// [`pace`] chooses the mean after this many samples, and at the first sample after
/// [`LONGEST_TURN`].
const TURN: u64 = 256;
/// Nanoseconds.
const LONGEST_TURN: u64 = 100_000_000;
/// When the present turn began, in nanoseconds.
static TURN_BEGAN: AtomicU64 = AtomicU64::new(0);
/// The samples of the present turn.
static TURN_SAMPLES: AtomicU64 = AtomicU64::new(0);

/// Returns the mean bytes from one sample to the next.
pub(super) fn interval() -> u64 {
    INTERVAL.load(Relaxed)
}

/// Seeds the random numbers.
pub(super) fn prepare() {
    RANDOM.store(sys::random(), Relaxed);
}

/// Sets the mean interval. [`DEFAULT_INTERVAL`] may become longer later; any other mean stays. The
/// intervals that have begun are forgotten, except that an allocation that is being counted
/// meanwhile may keep the one of its CPU.
pub(super) fn set_interval(interval: u64) {
    IS_PACED.store(interval == DEFAULT_INTERVAL, Relaxed);
    INTERVAL.store(interval.clamp(1, MAX_INTERVAL), Relaxed);
    let units = (0..possible()).map(|index| units().unit(index));
    for unit in units.filter(|unit| !unit.is_null()) {
        word(unit, COUNTDOWN).store(0, Relaxed);
        word(unit, COUNTDOWN + 8).store(0, Relaxed);
    }
}

/// Counts an allocation of `size` bytes. If it is to be sampled, returns the mean of the interval
/// that ends with it. Samples have been started.
///
/// Costs one critical section, or a lock on the atomic backend. A sampled allocation costs some
/// more.
pub fn due(size: usize) -> Option<u64> {
    let size = size.clamp(1, isize::MAX as usize) as u64;
    for _ in 0..TRIES {
        // SAFETY: every unit has both words.
        let words = unsafe { (units().load(COUNTDOWN), units().load(COUNTDOWN + 8)) };
        let (Some(word), Some(mean)) = words else {
            break;
        };
        let has_begun = word as i64 > 0 && mean != 0;
        let [left, ends] = if has_begun { [word, mean] } else { begin() };
        let is_due = left <= size;
        let next = if is_due { begin() } else { [left - size, ends] };
        // SAFETY: every unit has both words. Units are aligned to pages, and `COUNTDOWN` is a
        // multiple of 16.
        if unsafe { units().compare_exchange_pair(COUNTDOWN, [word, mean], next) } {
            return is_due.then_some(ends);
        }
    }
    // This CPU has no unit yet, or another thread holds the unit. An interval that begins and ends
    // with this allocation serves as well.
    let [left, mean] = begin();
    (left <= size).then_some(mean)
}

/// Returns the two words of a new interval.
fn begin() -> [u64; 2] {
    let mean = interval();
    [draw(mean) + 1, mean]
}

/// Counts a sample. Now and then, chooses the mean of the intervals that begin from now on, so that
/// the next turn has at most about [`MOST_A_SECOND`] samples a second. Does nothing unless the mean
/// is the default. Costs a look at the clock.
pub(super) fn pace() {
    if !IS_PACED.load(Relaxed) {
        return;
    }
    let (now, began) = (sys::nanoseconds(), TURN_BEGAN.load(Relaxed));
    let samples = TURN_SAMPLES.fetch_add(1, Relaxed) + 1;
    let elapsed = now.saturating_sub(began).max(1);
    let is_over = samples >= TURN || elapsed >= LONGEST_TURN;
    if !is_over
        || TURN_BEGAN
            .compare_exchange(began, now, Relaxed, Relaxed)
            .is_err()
    {
        return;
    }
    TURN_SAMPLES.store(0, Relaxed);
    INTERVAL.store(paced(interval(), samples, elapsed), Relaxed);
}

/// Returns the mean for the next turn, after `samples` with the mean `before` in `elapsed`
/// nanoseconds.
///
/// | bytes a second | mean |
/// |---|---|
/// | up to 2 GiB | 512 KiB, the default |
/// | 8 GiB | 2 MiB |
/// | 40 GiB | 10 MiB |
fn paced(before: u64, samples: u64, elapsed: u64) -> u64 {
    let bytes_a_second = before as f64 * samples as f64 * 1e9 / elapsed as f64;
    let mean = (bytes_a_second / MOST_A_SECOND as f64) as u64;
    mean.clamp(DEFAULT_INTERVAL, MAX_INTERVAL)
}

/// Returns how many bytes an interval with this mean has room for before the allocation that is
/// sampled.
///
/// Let x be the random distance to the next sample. An allocation of S bytes is sampled if x < S. S
/// is a whole number, so this is so exactly if the whole part of x is below S.
fn draw(mean: u64) -> u64 {
    (mean as f64 * -math::ln(uniform())) as u64
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
        const TIMES: usize = 100;
        assert!(kmalloc::init() && !kmalloc::alloc(64).is_null());
        set_interval(1 << 20);
        let due = (0..TIMES).filter(|_| {
            let units = (0..possible()).map(|index| units().unit(index));
            for unit in units.filter(|unit| !unit.is_null()) {
                word(unit, COUNTDOWN).store(-5i64 as u64, Relaxed);
            }
            due(1 << 20).is_some()
        });
        // Each is due with probability 1 − 1/e. The bounds are six standard deviations away.
        let due = due.count();
        assert!((34..=92).contains(&due), "{due} of {TIMES} are due");
    }

    #[test]
    fn the_mean_follows_the_rate_and_is_never_below_the_default() {
        let default = DEFAULT_INTERVAL;
        let (slow, fast) = (1_000_000_000 * TURN / 100, 1_000_000_000 * TURN / 40_000);
        assert_eq!(paced(default, TURN, slow), default);
        assert_eq!(paced(default, TURN, fast), 10 * default);
        // A turn of the mean that this rate asks for does not change the mean.
        let steady = 1_000_000_000 * TURN / MOST_A_SECOND;
        assert_eq!(paced(10 * default, TURN, steady), 10 * default);
        assert_eq!(paced(10 * default, 1, LONGEST_TURN), default);
        assert_eq!(paced(MAX_INTERVAL, TURN, 1), MAX_INTERVAL);
    }
}
