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
//! matter on which CPU a thread counts, or whether an interval is dropped before its end.
//!
//! A sample costs microseconds. In a program that allocates many gigabytes a second, samples at the
//! default mean would take a tenth of the time or more. So [`pace`] chooses a longer mean for the
//! intervals that begin later. It knows only what was sampled before, and the present interval
//! keeps its mean. So each sample still stands for the inverse of its probability.

use super::math;
use crate::cache_units::{COUNTDOWN, units, word};
use crate::sys;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
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

/// Whether [`pace`] may choose the mean: the user has chosen none.
static IS_PACED: AtomicBool = AtomicBool::new(true);
/// The most samples a second, of all CPUs together, that [`pace`] aims at. A sample with a call
/// stack takes about 3 µs, so they take about a hundredth of one CPU's time.
const MOST_A_SECOND: u64 = 4000;
/// The samples that end a *turn*: a period in which [`pace`] measures the rate of samples. At the
/// end of each turn, it chooses the mean.
const TURN: u64 = 256;
/// The shortest and the longest turn, in nanoseconds. A thread that is late may count its sample to
/// the next turn. The shortest turn bounds what that does to the measured rate.
const SHORTEST_TURN: u64 = 1_000_000;
const LONGEST_TURN: u64 = 100_000_000;
/// The mean grows at most by this factor in a turn.
const MOST_GROWTH: u64 = 8;
/// The longest mean that [`pace`] chooses: 512 MiB.
const LONGEST_PACED: u64 = DEFAULT_INTERVAL << 10;
/// When the present turn began, in nanoseconds.
static TURN_BEGAN: AtomicU64 = AtomicU64::new(0);
/// The samples of the present turn, and the sum of their means.
static TURN_SAMPLES: AtomicU64 = AtomicU64::new(0);
static TURN_BYTES: AtomicU64 = AtomicU64::new(0);

/// Returns the mean bytes from one sample to the next.
pub(super) fn interval() -> u64 {
    INTERVAL.load(Relaxed)
}

/// Seeds the random numbers.
pub(super) fn prepare() {
    RANDOM.store(sys::random(), Relaxed);
}

/// Sets the mean interval. [`DEFAULT_INTERVAL`] may become longer later; any other mean stays. Ends
/// the interval of each CPU. While a CPU is counting an allocation, its interval may survive.
pub(super) fn set_interval(interval: u64) {
    IS_PACED.store(interval == DEFAULT_INTERVAL, Relaxed);
    // Release pairs with the acquire in `pace`: a thread that sees this mean also sees whether it
    // may grow.
    INTERVAL.store(interval.clamp(1, MAX_INTERVAL), Release);
    let units = (0..possible()).map(|index| units().unit(index));
    for unit in units.filter(|unit| !unit.is_null()) {
        // Release pairs with the acquire of the load in `due`: a thread that sees that no interval
        // has begun also sees the mean for the next one.
        word(unit, COUNTDOWN).store(0, Release);
        word(unit, COUNTDOWN + 8).store(0, Release);
    }
}

/// Gives the child of a fork other random numbers than its parent and its siblings have. `pid` is
/// the child's PID. Each CPU's present interval stays: ending it would copy a page for each CPU.
pub(super) fn in_child(pid: u32) {
    RANDOM.fetch_add(u64::from(pid) << 32, Relaxed);
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
    // This CPU has no unit yet, or another thread holds the unit. So this function draws an
    // interval for this allocation alone. The distribution has no memory, so the probability is the
    // same.
    let [left, mean] = begin();
    (left <= size).then_some(mean)
}

/// Returns the two words of a new interval. With a mean of 1, each allocation is sampled.
fn begin() -> [u64; 2] {
    match interval() {
        1 => [1, 1],
        mean => [draw(mean) + 1, mean],
    }
}

/// Counts a sample that ended an interval of mean `mean`. At the end of a turn, sets the mean of
/// the intervals that begin later, so that the next turn has at most about [`MOST_A_SECOND`]
/// samples a second. Does nothing if the user chose the mean. Costs a reading of the clock.
pub(super) fn pace(mean: u64) {
    // Acquire pairs with the release in `set_interval`.
    let before = INTERVAL.load(Acquire);
    if !IS_PACED.load(Relaxed) {
        return;
    }
    TURN_BYTES.fetch_add(mean, Relaxed);
    let samples = TURN_SAMPLES.fetch_add(1, Relaxed) + 1;
    let (now, began) = (sys::nanoseconds(), TURN_BEGAN.load(Relaxed));
    let elapsed = now.saturating_sub(began);
    let is_over = elapsed >= LONGEST_TURN || (samples >= TURN && elapsed >= SHORTEST_TURN);
    let ends_turn = || TURN_BEGAN.compare_exchange(began, now, Relaxed, Relaxed);
    if is_over && ends_turn().is_ok() {
        TURN_SAMPLES.store(0, Relaxed);
        let after = paced(before, TURN_BYTES.swap(0, Relaxed), elapsed);
        // If the user has chosen a mean meanwhile, that mean stays.
        let _ = INTERVAL.compare_exchange(before, after, Relaxed, Relaxed);
    }
}

/// Returns the mean for the next turn, if the samples of the last turn stand for `bytes` in
/// `elapsed` nanoseconds. `before` is the mean until now.
///
/// | bytes a second | mean |
/// |---|---|
/// | up to 2 GB | 512 KiB, the default |
/// | 8 GB | 2 MB |
/// | 40 GB | 10 MB |
fn paced(before: u64, bytes: u64, elapsed: u64) -> u64 {
    let bytes_a_second = bytes as f64 * 1e9 / elapsed as f64;
    let mean = (bytes_a_second / MOST_A_SECOND as f64) as u64;
    let longest = LONGEST_PACED.min(before.saturating_mul(MOST_GROWTH));
    mean.min(longest).max(DEFAULT_INTERVAL)
}

/// Returns how many bytes an interval with this mean has room for before the allocation that is
/// sampled.
///
/// Let x be the random distance to the next sample. An allocation of S bytes is sampled if x < S. S
/// is an integer, so x < S if and only if the integer part of x is below S.
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
        const SECOND: u64 = 1_000_000_000;
        let (default, most) = (DEFAULT_INTERVAL, MOST_A_SECOND);
        assert_eq!(paced(default, 100 * default, SECOND), default);
        assert_eq!(paced(default, 5 * most * default, SECOND), 5 * default);
        // A turn with as many samples as there may be does not change the mean.
        assert_eq!(paced(5 * default, 5 * most * default, SECOND), 5 * default);
        assert_eq!(paced(20 * default, 20 * default, LONGEST_TURN), default);
        assert_eq!(paced(default, u64::MAX, 1), MOST_GROWTH * default);
        assert_eq!(paced(LONGEST_PACED, u64::MAX, 1), LONGEST_PACED);
    }

    #[test]
    fn children_of_a_fork_draw_other_numbers() {
        let draws = [1, 2].map(|pid| {
            let before = RANDOM.load(Relaxed);
            in_child(pid);
            let drawn = uniform();
            RANDOM.store(before, Relaxed);
            drawn
        });
        assert_ne!(draws[0], draws[1]);
    }
}
