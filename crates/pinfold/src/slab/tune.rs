//! Decides how long a slab is, how many objects a sheaf holds, and how many full sheaves a barn
//! holds.
//!
//! Large sheaves make slow paths rare, but other caches cannot use the free memory in them. So a
//! sheaf holds [`SHEAF_BYTES`] of objects, or as many objects as the program chose. The sheaves
//! that one CPU can have, of all caches together, have a budget of bytes. Each cache claims its
//! part when it is made. If the budget is used up by then, the cache has the smallest sheaves,
//! unless the program chose their capacity.
//!
//! A sheaf records its own capacity ([`Sheaf`](super::sheaf::Sheaf)). So when a cache's capacity
//! changes, sheaves keep theirs until they are next filled or emptied. Only slow paths and the
//! shepherd use this module.

use super::KmemCache;
use super::cache::Cache;
use super::sheaf::CAPACITY_MOST;
use crate::page::GRANULE;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// Objects above this size have slabs of [`LARGE_SLAB`] granules or more. One granule holds so few
/// of them that making and returning slabs would cost too much for each object. A longer slab
/// wastes little, because its pages take no memory until they are used. Objects of a granule or
/// more have a slab each.
const SMALL_SLAB: usize = 2048;
const LARGE_SLAB: usize = 4;
/// A slab has [`LARGE_SLAB`] granules or more also if its colors and its guard page would take at
/// least one part in this many of a granule.
const UNUSED_MOST: usize = 16;
/// To choose the length of a slab, its unused part is rounded down to one of this many steps.
const UNUSED_STEPS: usize = 64;

/// Bytes of objects in a sheaf, if the program did not choose the capacity. A sheaf holds at least
/// one object, and at most [`CAPACITY_MOST`].
const SHEAF_BYTES: usize = 128 << 10;
/// The smallest capacity that a program can choose. Also the capacity of a cache that is made when
/// the budget is used up, or less if [`SHEAF_BYTES`] have no room for that many objects.
pub(super) const CAPACITY_LEAST: usize = 4;
/// The most bytes in full sheaves that a cache's barn on a node holds. The number of these sheaves
/// is bounded too, by the constants below.
pub(super) const BARN_BYTES: usize = 2 << 20;
const BARN_LEAST: usize = 4;
/// For a size class, a barn holds at most one part in this many of the bytes in the class's slabs
/// on the node, or [`BARN_BYTES_LEAST`] if that is more.
const BARN_SHARE: usize = 8;
const BARN_BYTES_LEAST: usize = 256 << 10;
/// From this size on, the barn holds only that part, even if it is less than one sheaf. In a small
/// heap, one sheaf of each large class would be a large part of the heap.
const LARGE_CLASS: usize = 32 << 10;
const BARN_MOST: usize = 128;
/// The number of sheaves of a cache that a CPU has: the main sheaf and the spare.
const SHEAVES: usize = 2;

/// The budget: how many bytes one CPU's sheaves of all caches together may hold.
static BUDGET: AtomicUsize = AtomicUsize::new(32 << 20);
/// The claimed part of the budget: how many bytes one CPU's sheaves can hold, by the capacities of
/// all caches. May exceed the budget.
static CLAIMED: AtomicUsize = AtomicUsize::new(0);

/// Sets the budget: how many bytes one CPU's sheaves of all caches together may hold. The default
/// is 32 MiB. A cache that is made when the budget is used up has the smallest sheaves. Costs one
/// store.
///
/// ```
/// use pinfold::slab::set_sheaf_budget;
///
/// set_sheaf_budget(8 << 20);
/// ```
pub fn set_sheaf_budget(bytes: usize) {
    BUDGET.store(bytes, Relaxed);
}

/// Returns how many bytes one CPU's sheaves of all caches together can hold now. Costs one load.
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

/// A bit of [`Capacity::now`]: the cache is retired and has given back its part of the budget.
/// Prevents that the cache gives it back twice.
const RETIRED: usize = 1 << 16;

/// How many objects a sheaf of a cache holds.
pub(super) struct Capacity {
    now: AtomicUsize,
    /// How many bytes of the budget the cache claims for each object of the capacity. 0 for a
    /// debugged cache, which uses no sheaves.
    unit: usize,
}

impl Capacity {
    /// Returns the capacity for objects of `size` bytes: `chosen`, or a capacity by the size if
    /// that is `None`. If the cache `has_sheaves`, claims its part of the budget.
    pub(super) fn new(size: usize, chosen: Option<usize>, has_sheaves: bool) -> Capacity {
        let unit = if has_sheaves { SHEAVES * size } else { 0 };
        let least = (SHEAF_BYTES / size).clamp(1, CAPACITY_LEAST);
        let wanted = chosen.map_or(SHEAF_BYTES / size, |chosen| chosen.max(CAPACITY_LEAST));
        let wanted = wanted.clamp(least, CAPACITY_MOST);
        let first = if claim(wanted * unit) {
            wanted
        } else {
            let capacity = if chosen.is_some() { wanted } else { least };
            // The smallest capacity, and a capacity that the program chose, are granted even beyond
            // the budget.
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
    /// Sets how many objects each of this cache's sheaves holds, from 4 to 125. Applies to sheaves
    /// that are filled or emptied from now on, until the next call. Costs three atomic operations.
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
        // The new bytes are claimed before the old ones are given back, so that the sum is never
        // too small.
        CLAIMED.fetch_add(wanted * sheaves.unit, Relaxed);
        let before = sheaves.now.swap(wanted, Relaxed);
        CLAIMED.fetch_sub(before * sheaves.unit, Relaxed);
    }
}

impl Cache {
    /// Returns the capacity for a sheaf that is filled now.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.sheaves.now.load(Relaxed) & !RETIRED
    }

    /// Returns the most full sheaves that the cache's barn holds on a node where the cache has
    /// `slabs` slabs.
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

/// Returns how many granules a slab has for objects of `size` bytes. `other` bytes of the slab are
/// for colors and a guard page.
pub(super) fn granules_for(size: usize, other: usize) -> usize {
    if size >= GRANULE {
        return (size + other).div_ceil(GRANULE);
    }
    let least = match size <= SMALL_SLAB && other < GRANULE / UNUSED_MOST {
        true => 1,
        false => LARGE_SLAB,
    };
    // The unused part of the slab, in steps of a sixty-fourth of the slab.
    let unused = |&granules: &usize| {
        let bytes = granules * GRANULE;
        (bytes - other) % size * UNUSED_STEPS / bytes
    };
    // Among the lengths that leave the smallest part unused, the shortest.
    (least..=2 * least).min_by_key(unused).unwrap_or(least)
}
