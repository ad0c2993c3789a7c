//! The counters that are folded in the background.
//!
//! There is one bit for each block that a counter could have, by offset. So the folding thread
//! follows no pointer to a counter. A counter that is dropped clears its bit while it holds the
//! locks of all its shards. The folding thread holds one of these locks while it checks the bit and
//! folds.
//!
//! In most ticks, most watched counters are idle. [`has_moved`] recognises these by reading their
//! words, without the lock.

use super::shards::{SIZE, Shards};
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
        // Release pairs with the acquire in `fold_watched_in`: a thread that sees the bit also sees
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

/// Folds every watched counter in the units that `wanted` accepts. Returns how many shards had
/// moved. Leaves out shards whose lock another thread holds.
///
/// Goes through one unit after the other, so that neighbouring counters are read from the same
/// cache lines in sequence.
pub(crate) fn fold_watched(wanted: &impl Fn(usize) -> bool) -> usize {
    let map = map();
    let watched = &map[..WORDS.load(Relaxed).min(map.len())];
    let units = counter_units::used().filter(|&unit| wanted(unit));
    units.map(|unit| fold_watched_in(unit, watched)).sum()
}

/// Folds the watched counters of one unit. Returns how many shards had moved.
fn fold_watched_in(unit: usize, watched: &[AtomicU64]) -> usize {
    let shard = counter_units::blocks_of::<4>(unit);
    let blocks = watched.iter().enumerate().flat_map(|(at, word)| {
        // Acquire pairs with the release in `watch_block`: this thread sees the block prepared.
        bits(word.load(Acquire)).map(move |bit| (word, bit, (at * 64 + bit) * SIZE))
    });
    let moved = blocks.filter(|&(word, bit, offset)| {
        // The block's counter may be dropped during the fold.
        let still_there = || word.load(Acquire) & 1 << bit != 0;
        // SAFETY: `fold_on` asks `still_there` with the lock of the shard held, before it changes
        // the shard. A thread that frees the block has cleared the bit before, while it held this
        // lock.
        has_moved(shard(offset)) && unsafe { Shards::at(offset) }.fold_on(unit, still_there)
    });
    moved.count()
}

/// Returns whether a fold of the shard would change a total. Reads one cache line, takes no lock
/// and writes nothing.
///
/// Both limits are the same distance ahead of their folded values, and a freeze takes the same from
/// both. So if both words have the same headroom, they have moved by the same distance since the
/// last fold, and the totals already have the right difference. A shard that was never used is all
/// zeroes.
///
/// The loads may see a word before an add and a limit after a fold. Then the fold finds nothing to
/// do, or the next call finds what is left.
fn has_moved([up, up_limit, down, down_limit]: &[AtomicU64; 4]) -> bool {
    // Relaxed: `fold_on` reads the words again, with the shard's lock held.
    let headroom =
        |word: &AtomicU64, limit: &AtomicU64| limit.load(Relaxed).wrapping_sub(word.load(Relaxed));
    headroom(up, up_limit) != headroom(down, down_limit)
}

#[cfg(test)]
mod tests {
    use super::super::shards::FREEZE;
    use super::*;

    /// Returns whether a shard with this headroom has moved, for words near the end of their range.
    fn moved(of_up: u64, of_down: u64) -> bool {
        let (up, down) = (u64::MAX - 2, 5u64);
        let limits = (up.wrapping_add(of_up), down.wrapping_add(of_down));
        has_moved(&[up, limits.0, down, limits.1].map(AtomicU64::new))
    }

    #[test]
    fn a_shard_has_moved_if_its_words_have_different_headroom() {
        const BATCH: u64 = 1 << 20;
        assert!(!moved(BATCH, BATCH));
        assert!(moved(BATCH - 1, BATCH) && moved(BATCH, BATCH - 1));
        assert!(moved(0, BATCH) && moved(BATCH, 0));
        // What went up and what went down cancel each other.
        assert!(!moved(BATCH - 7, BATCH - 7));
        for less in [FREEZE, 3 * FREEZE] {
            let [whole, used] = [BATCH, BATCH - 9].map(|headroom| headroom.wrapping_sub(less));
            assert!(!moved(whole, whole) && moved(used, whole) && moved(whole, used));
        }
        assert!(!has_moved(&[0; 4].map(AtomicU64::new)));
    }
}
