//! How long a slab is, how many objects a sheaf holds, and how many full sheaves a barn holds.
//!
//! Large sheaves make slow paths rare, and keep free memory away from other sizes. So a sheaf holds
//! [`SHEAF_BYTES`] of objects, or as many objects as the program chose. The sheaves of all caches
//! together claim bytes of one budget for each CPU. A cache that is made when the budget is used up
//! has the smallest sheaves, unless the program chose their capacity.
//!
//! A sheaf knows its own capacity ([`Sheaf`](super::sheaf::Sheaf)). So a new capacity concerns the
//! sheaves that are filled or emptied from then on. Only slow paths and the shepherd come here.

use super::KmemCache;
use super::cache::Cache;
use super::sheaf::CAPACITY_MOST;
use crate::page::GRANULE;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// Objects above this size have slabs of [`LARGE_SLAB`] granules or more: 64 KiB hold so few of them
/// that making and returning slabs would show in the cost of an object. Pages of a slab that were
/// never used take no memory. Objects of a granule or more have slabs of their own.
const SMALL_SLAB: usize = 2048;
const LARGE_SLAB: usize = 4;
/// The part of a slab that colors and guard pages may take, before the slab becomes longer.
const UNUSED_MOST: usize = 16;
/// Lengths of slabs compare by what they leave unused, in this many steps.
const UNUSED_STEPS: usize = 64;

/// Bytes in a sheaf, up to [`CAPACITY_MOST`] objects and at least [`CAPACITY_LEAST`].
const SHEAF_BYTES: usize = 128 << 10;
pub(super) const CAPACITY_LEAST: usize = 4;
/// Bytes in full sheaves that a node's barn holds for a cache, within the bounds below.
pub(super) const BARN_BYTES: usize = 2 << 20;
const BARN_LEAST: usize = 4;
/// A barn of a size class holds this part of the bytes in the class's slabs, or this many bytes if
/// that is more.
const BARN_SHARE: usize = 8;
const BARN_BYTES_LEAST: usize = 256 << 10;
/// From this size on, only the share counts: one sheaf of each class would be much of a small heap.
const LARGE_CLASS: usize = 32 << 10;
const BARN_MOST: usize = 128;
/// Sheaves that a CPU has of a cache: the main one and the spare.
const SHEAVES: usize = 2;

/// Bytes that one CPU's sheaves may hold.
static BUDGET: AtomicUsize = AtomicUsize::new(32 << 20);
/// Bytes that one CPU's sheaves hold at most, by the capacities of all caches.
static CLAIMED: AtomicUsize = AtomicUsize::new(0);

/// Sets how many bytes one CPU's sheaves of all caches together may hold; 32 MiB at first. Caches
/// that are made when the budget is used up have the smallest sheaves.
pub fn set_sheaf_budget(bytes: usize) {
    BUDGET.store(bytes, Relaxed);
}

/// Bytes that one CPU's sheaves of all caches hold at most as they are now.
pub fn sheaf_bytes() -> usize {
    CLAIMED.load(Relaxed)
}

/// Takes `bytes` off the budget, if they are there.
fn claim(bytes: usize) -> bool {
    let fits = |claimed: usize| {
        let more = claimed.saturating_add(bytes);
        (more <= BUDGET.load(Relaxed)).then_some(more)
    };
    CLAIMED.fetch_update(Relaxed, Relaxed, fits).is_ok()
}

/// Set in [`Capacity::now`] when the cache is gone, so that its bytes are given back only once.
const RETIRED: usize = 1 << 16;

/// A cache's capacity.
pub(super) struct Capacity {
    now: AtomicUsize,
    /// Bytes of a CPU's sheaves for each object of capacity; 0 for a debugged cache, which has no
    /// sheaves.
    unit: usize,
}

impl Capacity {
    /// For objects of `size` bytes; `chosen` or by the size. Claims its part of the budget, if the
    /// cache `has_sheaves`.
    pub(super) fn new(size: usize, chosen: Option<usize>, has_sheaves: bool) -> Capacity {
        let unit = if has_sheaves { SHEAVES * size } else { 0 };
        let least = (SHEAF_BYTES / size).clamp(1, CAPACITY_LEAST);
        let wanted = chosen.map_or(SHEAF_BYTES / size, |chosen| chosen.max(CAPACITY_LEAST));
        let wanted = wanted.clamp(least, CAPACITY_MOST);
        let first = if claim(wanted * unit) {
            wanted
        } else {
            let capacity = if chosen.is_some() { wanted } else { least };
            // The least, or what was asked for, is had in any case.
            CLAIMED.fetch_add(capacity * unit, Relaxed);
            capacity
        };
        Capacity {
            now: AtomicUsize::new(first),
            unit,
        }
    }
}

impl KmemCache {
    /// Sets how many objects this cache's sheaves hold, from 4 to 125, for those that are filled or
    /// emptied from now on. It stays so until the next call.
    pub fn set_sheaf_capacity(&self, objects: usize) {
        let wanted = objects.clamp(CAPACITY_LEAST, CAPACITY_MOST);
        let sheaves = &self.descriptor.sheaves;
        // Claimed first, so that the sum never falls short.
        CLAIMED.fetch_add(wanted * sheaves.unit, Relaxed);
        let before = sheaves.now.swap(wanted, Relaxed);
        CLAIMED.fetch_sub(before * sheaves.unit, Relaxed);
    }
}

impl Cache {
    /// Objects that a sheaf filled now holds.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.sheaves.now.load(Relaxed) & !RETIRED
    }

    /// Full sheaves at most in the barn of a node with `slabs` slabs.
    pub(super) fn barn_most(&self, slabs: usize) -> usize {
        let sheaf = self.size * self.capacity();
        let (bytes, least) = match self.class() {
            Some(_) => {
                let share = slabs * self.slab_bytes / BARN_SHARE;
                if self.size >= LARGE_CLASS {
                    return share.min(self.barn_bytes) / sheaf;
                }
                let most = share.max(BARN_BYTES_LEAST).min(self.barn_bytes);
                (most, (BARN_BYTES_LEAST / sheaf).clamp(1, BARN_LEAST))
            }
            None => (self.barn_bytes, BARN_LEAST),
        };
        (bytes / sheaf).clamp(least, BARN_MOST)
    }

    /// Gives the cache's part of the budget back; the cache is gone.
    pub(super) fn unclaim(&self) {
        let sheaves = &self.sheaves;
        let before = sheaves.now.fetch_or(RETIRED, Relaxed);
        if before & RETIRED == 0 {
            CLAIMED.fetch_sub(before * sheaves.unit, Relaxed);
        }
    }
}

/// Granules in a slab for objects of `size` bytes, of which `other` bytes are not for objects.
pub(super) fn granules_for(size: usize, other: usize) -> usize {
    if size >= GRANULE {
        return (size + other).div_ceil(GRANULE);
    }
    let least = match size <= SMALL_SLAB && other < GRANULE / UNUSED_MOST {
        true => 1,
        false => LARGE_SLAB,
    };
    // Sixty-fourths of the slab that stay unused.
    let unused = |&granules: &usize| {
        let bytes = granules * GRANULE;
        (bytes - other) % size * UNUSED_STEPS / bytes
    };
    // The shortest of those that leave least.
    (least..=2 * least).min_by_key(unused).unwrap_or(least)
}
