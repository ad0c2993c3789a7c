//! Decides how many objects a sheaf holds, and how many full sheaves a barn holds.
//!
//! Large sheaves make slow paths rare, but other caches cannot use the free memory in them. So a
//! sheaf holds [`SHEAF_BYTES`] of objects, or as many objects as the program chose. The sheaves
//! that one CPU can have, of all caches together, have a budget of bytes. Each cache claims its
//! part when it is made. If the budget is used up by then, the cache has the smallest sheaves,
//! unless the program chose their capacity. When the budget changes, all caches but those with a
//! chosen capacity claim again, in the order of their numbers.
//!
//! A sheaf records its own capacity (`sheaf`). So when a cache's capacity changes, sheaves keep
//! theirs until they are next filled or emptied. Only slow paths and the shepherd use this module.

use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// The most objects that a sheaf can hold. A sheaf's block has two slots for links, and one for the
/// null below the objects (`sheaf`).
pub(crate) const MAX_CAPACITY: usize = pinfold_rseq::STACK_ALIGN / 8 - 3;
/// How many full sheaves a hardened cache's barn keeps back.
pub(crate) const QUARANTINE: usize = 2;

/// Bytes of objects in a sheaf, if the program did not choose the capacity: enough for 16 blocks of
/// malloc's class for 8 KiB, which have 8256 bytes. A sheaf holds at least one object, and at most
/// [`MAX_CAPACITY`].
const SHEAF_BYTES: usize = 129 << 10;
/// The smallest capacity that a program can choose. Also the capacity of a cache that is made when
/// the budget is used up, or less if [`SHEAF_BYTES`] have no room for that many objects.
pub(crate) const MIN_CAPACITY: usize = 4;
/// The most bytes in full sheaves that a cache's barn on a node holds. The number of these sheaves
/// is bounded too, by the constants below.
pub(crate) const BARN_BYTES: usize = 2 << 20;
const MIN_BARN: usize = 4;
/// For a size class, a barn holds at most 1/`BARN_SHARE` of the bytes in the class's slabs on the
/// node, or [`MIN_BARN_BYTES`] if that is more. It holds more if the program needs it again and
/// again.
const BARN_SHARE: usize = 8;
const MIN_BARN_BYTES: usize = 512 << 10;
/// The same for each part of a split cache.
const MIN_BARN_BYTES_SPLIT: usize = 256 << 10;
/// For blocks of this size or more, the barn holds at most that share, even if it is less than one
/// sheaf. In a small heap, one sheaf of each large class would be a large part of the heap.
const LARGE_CLASS: usize = 32 << 10;
pub(crate) const MAX_BARN: usize = 128;
/// The number of sheaves of a cache that a CPU has: the main sheaf and the spare.
const SHEAVES: usize = 2;

/// The budget: how many bytes one CPU's sheaves of all caches together may hold.
static BUDGET: AtomicUsize = AtomicUsize::new(32 << 20);
/// The claimed part of the budget: how many bytes one CPU's sheaves can hold, by the capacities of
/// all caches. May exceed the budget.
static CLAIMED: AtomicUsize = AtomicUsize::new(0);

/// Sets the budget. The caller then has all caches claim again.
pub(crate) fn set_budget(bytes: usize) {
    BUDGET.store(bytes, Relaxed);
}

/// Returns the budget that [`set_sheaf_budget`](crate::slab::set_sheaf_budget) sets, in bytes.
/// Costs one load.
///
/// ```
/// use pinfold::slab::{set_sheaf_budget, sheaf_budget};
///
/// set_sheaf_budget(16 << 20);
/// assert_eq!(sheaf_budget(), 16 << 20);
/// ```
pub fn sheaf_budget() -> usize {
    BUDGET.load(Relaxed)
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

/// The bits of [`Capacity::now`] that count objects.
const OBJECTS: usize = 0xffff;
/// A bit of [`Capacity::now`]: the cache is retired and has given back its part of the budget. So
/// the cache must not claim again.
const RETIRED: usize = 1 << 16;
/// A bit of [`Capacity::now`]: the program chose the capacity, or the cache is one of sampled
/// blocks.
const CHOSEN: usize = 1 << 17;

/// How many objects a sheaf of a cache holds.
pub(crate) struct Capacity {
    /// The capacity in objects, with the bits [`RETIRED`] and [`CHOSEN`].
    now: AtomicUsize,
    /// How many bytes of the budget the cache claims for each object of the capacity. 0 for a
    /// debugged cache, which uses no sheaves.
    unit: usize,
}

impl Capacity {
    /// Returns the capacity for objects of `size` bytes: `chosen`, or a capacity by the size if
    /// that is `None`. If the cache `has_sheaves`, claims its part of the budget.
    pub(crate) fn new(size: usize, chosen: Option<usize>, has_sheaves: bool) -> Capacity {
        let unit = if has_sheaves { SHEAVES * size } else { 0 };
        let (least, most) = by_size(size);
        let wanted = chosen.map_or(most, |chosen| chosen.clamp(MIN_CAPACITY, MAX_CAPACITY));
        let wanted = wanted.max(least);
        let first = if claim(wanted * unit) {
            wanted
        } else {
            let capacity = if chosen.is_some() { wanted } else { least };
            // The smallest capacity, and a capacity that the program chose, are granted even beyond
            // the budget.
            CLAIMED.fetch_add(capacity * unit, Relaxed);
            capacity
        };
        let flag = if chosen.is_some() { CHOSEN } else { 0 };
        Capacity {
            now: AtomicUsize::new(first | flag),
            unit,
        }
    }

    /// Returns the capacity for a sheaf that is filled now.
    #[inline]
    pub(crate) fn now(&self) -> usize {
        self.now.load(Relaxed) & OBJECTS
    }

    /// Sets the capacity that the program chose, for sheaves that are filled or emptied from now
    /// on.
    pub(crate) fn set(&self, objects: usize) {
        let wanted = objects.clamp(MIN_CAPACITY, MAX_CAPACITY);
        // The new bytes are claimed before the old ones are given back, so that the sum is never
        // too small.
        CLAIMED.fetch_add(wanted * self.unit, Relaxed);
        let before = self.now.swap(wanted | CHOSEN, Relaxed);
        CLAIMED.fetch_sub((before & OBJECTS) * self.unit, Relaxed);
    }

    /// Sets the smallest capacity. Does nothing if the program chose the capacity, or if the cache
    /// is retired or has no sheaves.
    pub(crate) fn shrink(&self) {
        if self.unit == 0 {
            return;
        }
        let (least, most) = by_size(self.unit / SHEAVES);
        if self.replace(most, least) {
            CLAIMED.fetch_sub((most - least) * self.unit, Relaxed);
        }
    }

    /// Undoes [`shrink`](Self::shrink), if the budget has room for that.
    pub(crate) fn grow(&self) {
        if self.unit == 0 {
            return;
        }
        let (least, most) = by_size(self.unit / SHEAVES);
        let more = (most - least) * self.unit;
        if claim(more) && !self.replace(least, most) {
            CLAIMED.fetch_sub(more, Relaxed);
        }
    }

    /// Changes the capacity from `before` to `after`. Returns false, and changes nothing, if the
    /// capacity is not `before`, if it was chosen, or if the cache is retired.
    fn replace(&self, before: usize, after: usize) -> bool {
        self.now
            .compare_exchange(before, after, Relaxed, Relaxed)
            .is_ok()
    }

    /// Gives a retired cache's part of the budget back.
    pub(crate) fn retire(&self) {
        let before = self.now.fetch_or(RETIRED, Relaxed);
        if before & RETIRED == 0 {
            CLAIMED.fetch_sub((before & OBJECTS) * self.unit, Relaxed);
        }
    }
}

/// Returns the smallest and the largest capacity for objects of `size` bytes, if the program does
/// not choose the capacity.
fn by_size(size: usize) -> (usize, usize) {
    let least = (SHEAF_BYTES / size).clamp(1, MIN_CAPACITY);
    (least, (SHEAF_BYTES / size).clamp(least, MAX_CAPACITY))
}

/// Returns the most full sheaves that the barn of a part of a cache holds. Sheaves have `capacity`
/// objects of `size` bytes, and the barn at most `bytes`. `in_slabs` is the number of bytes in the
/// part's slabs if the cache is a size class's, and `None` otherwise. The barn of a size class may
/// hold `extra` sheaves more (`Stock::note_return`).
pub(crate) fn barn_most(
    size: usize,
    capacity: usize,
    bytes: usize,
    in_slabs: Option<usize>,
    extra: usize,
    is_split: bool,
) -> usize {
    let min_bytes = match is_split {
        true => MIN_BARN_BYTES_SPLIT,
        false => MIN_BARN_BYTES,
    };
    let sheaf = size * capacity;
    let (bytes, least) = match in_slabs {
        Some(in_slabs) => {
            let share = in_slabs / BARN_SHARE;
            if size >= LARGE_CLASS {
                return share.min(bytes) / sheaf;
            }
            let most = (share.max(min_bytes) + extra * sheaf).min(bytes);
            (most, (min_bytes / sheaf).clamp(1, MIN_BARN))
        }
        None => (bytes, MIN_BARN),
    };
    (bytes / sheaf).clamp(least, MAX_BARN)
}
