//! The counters that are folded in the background.
//!
//! There is one bit for each block that a counter could have, by offset. So the folding thread
//! follows no pointer to a counter. A counter that is dropped clears its bit while it holds the
//! locks of all its shards. The folding thread holds one of these locks while it checks the bit and
//! stores an [estimate](super::estimate).
//!
//! In most ticks, most watched counters are idle. The folding thread recognises these by reading
//! their words, without the lock.

use super::estimate::distance;
use super::fork;
use super::shards::{SIZE, Shards};
use super::stripe;
use crate::counter_units;
use crate::sys;
use crate::topology::bits;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// Bytes of a bitmap with a bit for each block of the largest unit.
const BYTES: usize = counter_units::MAX_STRIDE / SIZE / 8;
/// The address of the bitmap, or 0 until a counter is watched.
static MAP: AtomicUsize = AtomicUsize::new(0);
/// How many words of the bitmap, from the first on, may have a bit set.
static WORDS: AtomicUsize = AtomicUsize::new(0);

/// Makes [`fold_watched`] fold the blocks in `[offset, offset + size)` from now on, or leave them
/// out if `watched` is false. Returns false without memory for the bitmap.
pub(crate) fn watch_block(offset: usize, size: usize, watched: bool) -> bool {
    // Acquire pairs with the release of the exchange below: a thread that sees the address also
    // sees the bitmap zeroed.
    if MAP.load(Acquire) == 0 {
        if !watched {
            return true;
        }
        let Some(map) = sys::map_sparse(BYTES) else {
            return false;
        };
        let fresh = map.as_ptr();
        if MAP
            .compare_exchange(0, fresh as usize, Release, Relaxed)
            .is_err()
        {
            // SAFETY: the exchange failed, so `fresh` was never published. Only this thread knows
            // the mapping.
            unsafe { sys::unmap(fresh, BYTES) };
        }
    }
    for block in offset / SIZE..(offset + size).div_ceil(SIZE) {
        WORDS.fetch_max(block / 64 + 1, Relaxed);
        let bit = 1 << (block % 64);
        // Release pairs with the acquire in `fold_word`: a thread that sees the bit also sees
        // the block prepared. `forget` clears bits under the shards' locks, and a folding thread
        // checks the bit under such a lock. So it never touches a freed block.
        if watched {
            map()[block / 64].fetch_or(bit, Release);
        } else {
            map()[block / 64].fetch_and(!bit, Release);
        }
    }
    true
}

/// Ends the folding of blocks that are about to be freed. The caller holds the locks of all their
/// shards.
pub(super) fn forget(offset: usize, size: usize) {
    watch_block(offset, size, false);
}

/// Returns the bitmap, or no words while there is none.
fn map() -> &'static [AtomicU64] {
    // Acquire pairs with the release in `watch_block`: a thread that sees the address also sees the
    // bitmap zeroed.
    match MAP.load(Acquire) {
        0 => &[],
        // SAFETY: `watch_block` mapped `BYTES` zeroed bytes there, and never unmaps them once they
        // are published.
        map => unsafe { core::slice::from_raw_parts(map as *const AtomicU64, BYTES / 8) },
    }
}

/// The watched counters that share a word of the bitmap.
const TOGETHER: usize = u64::BITS as usize;

/// Estimates what every watched counter holds in the units that `wanted` accepts. Returns how many
/// shards hold something, of counters whose estimate has changed. Leaves out counters of which
/// another thread holds a lock.
pub(crate) fn fold_watched(wanted: &impl Fn(usize) -> bool) -> usize {
    let map = map();
    let words = &map[..WORDS.load(Relaxed).min(map.len())];
    let places = words.iter().enumerate();
    places
        .map(|(at, word)| fold_word(at * TOGETHER * SIZE, word, wanted))
        .sum()
}

/// Folds this CPU's shard of every watched counter, so that it holds nothing. Leaves out counters
/// of which another thread holds a lock.
pub(crate) fn fold_watched_here() {
    let map = map();
    for (at, word) in map[..WORDS.load(Relaxed).min(map.len())].iter().enumerate() {
        // Acquire, here and below, pairs with the release in `watch_block`.
        for bit in bits(word.load(Acquire)) {
            let offset = (at * TOGETHER + bit) * SIZE;
            // The counter is not dropped while the lock is held and its bit is set.
            if let Some(_held) = stripe::try_hold(0, offset)
                && word.load(Acquire) & 1 << bit != 0
            {
                // SAFETY: a thread that frees the block has cleared the bit before, while it held
                // this lock.
                unsafe { Shards::at(offset) }.fold_from(1);
            }
        }
    }
}

/// Estimates the watched counters of one word of the bitmap, whose first block is at `first`.
///
/// Goes through one unit after the other, so that neighbouring counters are read from the same
/// cache lines in sequence. Writes nothing for a counter whose estimate stays.
///
/// Not inlined, so that what a tick calls next does not lie above the distances on the stack.
#[inline(never)]
fn fold_word(first: usize, word: &AtomicU64, wanted: &impl Fn(usize) -> bool) -> usize {
    // Acquire pairs with the release in `watch_block`: this thread sees the blocks prepared.
    let watched = word.load(Acquire);
    if watched == 0 {
        return 0;
    }
    let mut found = [0i64; TOGETHER];
    for unit in counter_units::used().filter(|&unit| wanted(unit)) {
        let shard = counter_units::blocks_of::<4>(unit);
        for bit in bits(watched) {
            found[bit] = found[bit].wrapping_add(distance(shard(first + bit * SIZE)));
        }
    }
    let folded = bits(watched).map(|bit| {
        // The block's counter may be dropped meanwhile.
        let still_there = || word.load(Acquire) & 1 << bit != 0;
        // SAFETY: `estimate` asks `still_there` with a lock of the block held, before it writes. A
        // thread that frees the block has cleared the bit before, while it held all these locks.
        let shards = unsafe { Shards::at(first + bit * SIZE) };
        // A shard that a fork has left claimed counts as 0 here, so `estimate` must look at it.
        let left_behind = || (shards.active()).any(|unit| shards.look_at(unit).is_stale());
        match found[bit] == shards.estimated() && !(fork::has_happened() && left_behind()) {
            true => 0,
            false => shards.estimate(wanted, still_there),
        }
    });
    folded.sum()
}
