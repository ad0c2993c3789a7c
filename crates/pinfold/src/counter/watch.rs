//! Which counters somebody folds in the background.
//!
//! One bit for each block that could be, by offset: so the folder follows no pointer to a counter, and a counter that is dropped
//! clears its bit under the locks of which the folder holds one while it looks.

use super::shards::{SIZE, Shards};
use crate::percpu;
use crate::sys;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// Bytes of a bitmap with a bit for each block of the largest unit.
const BYTES: usize = percpu::STRIDE_MOST / SIZE / 8;
/// Where the bitmap is; 0 until somebody watches.
static MAP: AtomicUsize = AtomicUsize::new(0);
/// How many of its words may not be 0.
static WORDS: AtomicUsize = AtomicUsize::new(0);

/// Has the blocks in `[offset, offset + size)` folded by [`fold_watched`] from now on, or not any more. False without memory
/// for the list.
pub(crate) fn watch_block(offset: usize, size: usize, watched: bool) -> bool {
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
            // SAFETY: nobody else knows of it.
            unsafe { sys::unmap(fresh, BYTES) };
        }
    }
    for block in offset / SIZE..(offset + size).div_ceil(SIZE) {
        WORDS.fetch_max(block / 64 + 1, Relaxed);
        let bit = 1 << (block % 64);
        // Release and acquire order the bit with the block's life; the locks do the rest.
        if watched {
            map()[block / 64].fetch_or(bit, Release);
        } else {
            map()[block / 64].fetch_and(!bit, Release);
        }
    }
    true
}

/// Takes blocks off the list before they are freed, with the locks of all their shards held.
pub(super) fn forget(offset: usize, size: usize) {
    watch_block(offset, size, false);
}

fn map() -> &'static [AtomicU64] {
    match MAP.load(Acquire) {
        0 => &[],
        // SAFETY: `watch_block` mapped that many bytes, for ever, zeroed.
        map => unsafe { core::slice::from_raw_parts(map as *const AtomicU64, BYTES / 8) },
    }
}

/// Folds every watched counter in the units that `wanted` says; returns how many shards had moved. Shards in whose slow path
/// somebody is at this moment are left for the next time.
pub(crate) fn fold_watched(wanted: &impl Fn(usize) -> bool) -> usize {
    let map = map();
    let words = WORDS.load(Relaxed).min(map.len());
    let blocks = map[..words].iter().enumerate().flat_map(|(at, bits)| {
        let mut left = bits.load(Acquire);
        core::iter::from_fn(move || {
            let bit = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some((bits, at * 64 + bit))
        })
    });
    blocks
        .map(|(bits, block)| {
            // Its counter may be dropped meanwhile.
            let still_there = || bits.load(Acquire) & 1 << (block % 64) != 0;
            // SAFETY: whoever frees the block clears the bit first, with the locks of all its shards held.
            unsafe { Shards::at(block * SIZE) }.fold(wanted, still_there)
        })
        .sum()
}
