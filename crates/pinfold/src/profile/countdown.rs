//! Decides which allocations are sampled: each CPU counts bytes down to its next sample.
//!
//! Each CPU has two words: the bytes counted so far, and the count at which the next sample is due.
//! One bounded add counts an allocation. If there is no room for its size, the allocation is to be
//! sampled, and one exchange of both words begins a new interval.
//!
//! # Why no CPU's count is disturbed
//!
//! Between the failed add and the exchange, the thread may move to another CPU, or another thread
//! may begin a new interval. The exchange compares both words, so it succeeds only for words that
//! have no room for the size. If it fails, the thread begins again. So each interval ends with
//! exactly one sample.
//!
//! A new interval is drawn at random. The exponential distribution has no memory, so it does not
//! matter on which CPU a thread counts, or what remained of an interval.

use super::math;
use crate::counter_units::{self, LazyBlock, units};
use crate::sys;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::near;

/// The mean bytes from one sample to the next, if the user does not choose another number.
pub const DEFAULT_INTERVAL: u64 = 512 << 10;
/// The longest mean interval: a tebibyte.
pub const MAX_INTERVAL: u64 = 1 << 40;

/// Bytes of the two words. The block's size, a power of two, also aligns it.
const SIZE: usize = 16;
/// The count at which an interval begins. Words of 0 are those of a CPU that has not counted yet.
const FIRST: u64 = 1;
/// How often a thread tries to begin an interval, before it leaves an allocation out. Only other
/// threads' progress makes a try fail.
const TRIES: usize = 16;

// `near!` needs it.
#[used]
static BLOCK: LazyBlock = LazyBlock::new();
static INTERVAL: AtomicU64 = AtomicU64::new(DEFAULT_INTERVAL);
/// The state of the random numbers.
static RANDOM: AtomicU64 = AtomicU64::new(0);

/// Returns the mean bytes from one sample to the next.
pub(super) fn interval() -> u64 {
    INTERVAL.load(Relaxed)
}

/// Makes the words. Returns false if there is no memory.
pub(super) fn prepare() -> bool {
    RANDOM.store(sys::random(), Relaxed);
    let block = BLOCK.get_or_alloc(SIZE, counter_units::register_fork, |offset| offset);
    block.is_some()
}

/// Sets the mean interval. The intervals that have begun are forgotten.
pub(super) fn set_interval(interval: u64) {
    INTERVAL.store(interval.clamp(1, MAX_INTERVAL), Relaxed);
    if let Some(offset) = BLOCK.get() {
        for unit in counter_units::used() {
            for word in [offset, offset + 8] {
                counter_units::word_at(unit, word).store(0, Relaxed);
            }
        }
    }
}

/// Counts an allocation of `size` bytes. Returns whether it is to be sampled. Returns false before
/// the profile was ever on.
///
/// Costs one critical section, or a lock on the atomic backend. A sampled allocation costs some
/// more.
pub fn is_due(size: usize) -> bool {
    !count(size) && is_due_slow(size)
}

/// Counts an allocation of `size` bytes, if this CPU's interval has room for it. If there is no
/// room, counts nothing and returns false. The caller then calls [`is_due_slow`], which counts the
/// allocation. Costs one critical section. Always returns false on the atomic backend.
#[inline(always)]
pub fn count(size: usize) -> bool {
    let offset = near!(BLOCK, LazyBlock).load();
    // SAFETY: `offset` is that of a block of two words, which is never freed. Before there is a
    // block, it is that of a block where the add always fails.
    unsafe { units().add_within_fast(offset, signed(size)) }
}

/// Returns the bytes to count for an allocation of `size` bytes.
#[inline(always)]
fn signed(size: usize) -> i64 {
    size.clamp(1, isize::MAX as usize) as i64
}

/// Returns whether an allocation of `size` bytes is to be sampled, for which [`count`] has returned
/// false.
#[cold]
#[inline(never)]
pub fn is_due_slow(size: usize) -> bool {
    let Some(offset) = BLOCK.get() else {
        return false;
    };
    let size = signed(size);
    for _ in 0..TRIES {
        // SAFETY: `offset` is that of a block of two words, which is never freed.
        let words = unsafe { (units().load(offset), units().load(offset + 8)) };
        let (Some(counted), Some(due)) = words else {
            if counter_units::install_here().is_none() {
                return false;
            }
            continue;
        };
        let is_fresh = counted == 0 && due == 0;
        if is_fresh || (due.wrapping_sub(counted) as i64) < size {
            let next = [FIRST, FIRST + draw()];
            // SAFETY: `offset` is that of a block of two words, which is never freed. A block of 16
            // bytes is aligned to 16 bytes, and units to pages.
            let begun = unsafe { units().compare_exchange_pair(offset, [counted, due], next) };
            if begun && !is_fresh {
                return true;
            }
        }
        // SAFETY: `offset` is that of a block of two words, which is never freed.
        if unsafe { units().add_within(offset, size) } {
            return false;
        }
    }
    false
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
