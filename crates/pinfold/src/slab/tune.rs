//! How long a slab is, how many objects a sheaf holds, and how many full sheaves a barn holds.
//!
//! Large sheaves make slow paths rare, but keep free memory from other sizes. So a sheaf holds
//! [`SHEAF_BYTES`] of objects, or as many objects as the program chose. The sheaves of all caches
//! together claim bytes of one budget for each CPU. A cache that is made when the budget is used up
//! has the smallest sheaves, unless the program chose their capacity.
//!
//! A sheaf records its own capacity ([`Sheaf`](super::sheaf::Sheaf)). So a new capacity applies to
//! sheaves that are filled or emptied from then on. Only slow paths and the shepherd use this
//! module.

use super::KmemCache;
use super::cache::Cache;
use super::sheaf::CAPACITY_MOST;
use crate::page::GRANULE;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// Objects above this size have slabs of [`LARGE_SLAB`] granules or more. 64 KiB hold so few of
/// them that making and returning slabs would cost too much for each object. Pages of a slab that
/// were never used take no memory. Objects of a granule or more have a slab each.
const SMALL_SLAB: usize = 2048;
const LARGE_SLAB: usize = 4;
/// A slab becomes longer if colors and a guard page would take more than one part in this many of
/// it.
const UNUSED_MOST: usize = 16;
/// The lengths of slabs are compared by the unused part of the slab, in this many steps.
const UNUSED_STEPS: usize = 64;

/// Bytes of objects in a sheaf, which has at most [`CAPACITY_MOST`] objects.
const SHEAF_BYTES: usize = 128 << 10;
/// The smallest capacity that a program can choose. Also the capacity of a cache made when the
/// budget is used up, if [`SHEAF_BYTES`] have room for that many objects.
pub(super) const CAPACITY_LEAST: usize = 4;
/// Bytes in full sheaves that a node's barn holds for a cache, within the bounds below.
pub(super) const BARN_BYTES: usize = 2 << 20;
const BARN_LEAST: usize = 4;
/// The barn of a size class holds one part in this many of the bytes in the class's slabs, or
/// [`BARN_BYTES_LEAST`] if that is more.
const BARN_SHARE: usize = 8;
const BARN_BYTES_LEAST: usize = 256 << 10;
/// From this size on, the barn holds the share only: in a small heap one sheaf of each class would
/// be a large part.
const LARGE_CLASS: usize = 32 << 10;
const BARN_MOST: usize = 128;
/// Sheaves that a CPU has of a cache: the main one and the spare.
const SHEAVES: usize = 2;

/// Bytes that one CPU's sheaves may hold.
static BUDGET: AtomicUsize = AtomicUsize::new(32 << 20);
/// Bytes that one CPU's sheaves can hold at most, by the capacities of all caches.
static CLAIMED: AtomicUsize = AtomicUsize::new(0);

/// Sets how many bytes one CPU's sheaves of all caches together may hold. The default is 32 MiB.
/// Caches that are made when the budget is used up have the smallest sheaves. Costs one store.
///
/// ```
/// use pinfold::slab::set_sheaf_budget;
///
/// set_sheaf_budget(8 << 20);
/// ```
pub fn set_sheaf_budget(bytes: usize) {
    BUDGET.store(bytes, Relaxed);
}

/// Returns how many bytes one CPU's sheaves of all caches can hold at most now. Costs one load.
///
/// ```
/// use pinfold::slab::{KmemCache, sheaf_bytes};
/// use std::alloc::Layout;
///
/// let before = sheaf_bytes();
/// let cache = KmemCache::new("budgeted", Layout::new::<[u64; 8]>())?;
/// assert!(sheaf_bytes() > before);
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
pub fn sheaf_bytes() -> usize {
    CLAIMED.load(Relaxed)
}

/// Claims `bytes` of the budget. Returns false, and claims nothing, if the budget has fewer left.
fn claim(bytes: usize) -> bool {
    let fits = |claimed: usize| {
        let more = claimed.saturating_add(bytes);
        (more <= BUDGET.load(Relaxed)).then_some(more)
    };
    CLAIMED.fetch_update(Relaxed, Relaxed, fits).is_ok()
}

/// Set in [`Capacity::now`] when the cache is retired, so that its bytes are given back only once.
const RETIRED: usize = 1 << 16;

/// How many objects the sheaves of a cache hold.
pub(super) struct Capacity {
    now: AtomicUsize,
    /// Bytes of a CPU's sheaves for each object of capacity. 0 for a debugged cache, which uses no
    /// sheaves.
    unit: usize,
}

impl Capacity {
    /// Returns the capacity for objects of `size` bytes: the `chosen` one, or else one by the size.
    /// Claims its part of the budget if the cache `has_sheaves`.
    pub(super) fn new(size: usize, chosen: Option<usize>, has_sheaves: bool) -> Capacity {
        let unit = if has_sheaves { SHEAVES * size } else { 0 };
        let least = (SHEAF_BYTES / size).clamp(1, CAPACITY_LEAST);
        let wanted = chosen.map_or(SHEAF_BYTES / size, |chosen| chosen.max(CAPACITY_LEAST));
        let wanted = wanted.clamp(least, CAPACITY_MOST);
        let first = if claim(wanted * unit) {
            wanted
        } else {
            let capacity = if chosen.is_some() { wanted } else { least };
            // The smallest capacity and a chosen one are granted beyond the budget.
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
    /// Sets how many objects this cache's sheaves hold, from 4 to 125, for sheaves that are filled
    /// or emptied from now on. Lasts until the next call. Costs three atomic operations.
    ///
    /// ```
    /// use pinfold::slab::KmemCache;
    /// use std::alloc::Layout;
    ///
    /// let cache = KmemCache::new("packet", Layout::new::<[u8; 2048]>())?;
    /// cache.set_sheaf_capacity(16);
    /// assert_eq!(cache.statistics().sheaf_capacity, 16);
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    pub fn set_sheaf_capacity(&self, objects: usize) {
        let wanted = objects.clamp(CAPACITY_LEAST, CAPACITY_MOST);
        let sheaves = &self.descriptor.sheaves;
        // The new bytes are claimed first, so that the sum is never too small.
        CLAIMED.fetch_add(wanted * sheaves.unit, Relaxed);
        let before = sheaves.now.swap(wanted, Relaxed);
        CLAIMED.fetch_sub(before * sheaves.unit, Relaxed);
    }
}

impl Cache {
    /// Returns the capacity of a sheaf that is filled now.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.sheaves.now.load(Relaxed) & !RETIRED
    }

    /// Returns the most full sheaves in the barn of a node with `slabs` slabs.
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

    /// Gives a retired cache's part of the budget back.
    pub(super) fn unclaim(&self) {
        let sheaves = &self.sheaves;
        let before = sheaves.now.fetch_or(RETIRED, Relaxed);
        if before & RETIRED == 0 {
            CLAIMED.fetch_sub(before * sheaves.unit, Relaxed);
        }
    }
}

/// Returns how many granules a slab has for objects of `size` bytes, if `other` bytes of it are not
/// for objects.
pub(super) fn granules_for(size: usize, other: usize) -> usize {
    if size >= GRANULE {
        return (size + other).div_ceil(GRANULE);
    }
    let least = match size <= SMALL_SLAB && other < GRANULE / UNUSED_MOST {
        true => 1,
        false => LARGE_SLAB,
    };
    // The unused part of the slab, in steps of a sixty-fourth.
    let unused = |&granules: &usize| {
        let bytes = granules * GRANULE;
        (bytes - other) % size * UNUSED_STEPS / bytes
    };
    // The shortest of the lengths that leave least unused.
    (least..=2 * least).min_by_key(unused).unwrap_or(least)
}
