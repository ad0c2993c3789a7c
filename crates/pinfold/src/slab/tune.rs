//! How many objects a cache's sheaves hold: by the size of the objects at first, more where a cache exchanges sheaves all the time,
//! less again when it is left alone; and all caches together within what one CPU may hold.
//!
//! A sheaf knows its own capacity ([`Sheaf`](super::sheaf::Sheaf)), so that a change concerns those that are filled or emptied from
//! then on. Only slow paths and the shepherd come here.

use super::KmemCache;
use super::cache::Cache;
use super::sheaf::CAPACITY_MOST;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// Bytes in a sheaf at first, up to [`CAPACITY_MOST`] objects and at least [`CAPACITY_LEAST`].
const SHEAF_BYTES: usize = 128 << 10;
pub(super) const CAPACITY_LEAST: usize = 4;
/// Bytes in full sheaves that a node's barn holds for a cache, within the bounds below.
const BARN_BYTES: usize = 2 << 20;
const BARN_LEAST: usize = 4;
const BARN_MOST: usize = 128;
/// Sheaves that a CPU has of a cache: the main one and the spare.
const SHEAVES: usize = 2;

/// Bytes that one CPU's sheaves may hold.
static BUDGET: AtomicUsize = AtomicUsize::new(16 << 20);
/// Bytes that they hold at most, by the capacities of all caches.
static CLAIMED: AtomicUsize = AtomicUsize::new(0);

/// Sets how many bytes one CPU's sheaves of all caches together may hold; 16 MiB at first. Caches grow their sheaves within it, and
/// those made when it is used up begin with the smallest. Sheaves that are larger already shrink as their caches are left alone.
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
        let more = claimed + bytes;
        (more <= BUDGET.load(Relaxed)).then_some(more)
    };
    CLAIMED.fetch_update(Relaxed, Relaxed, fits).is_ok()
}

/// A cache's capacity, and what it began with.
pub(super) struct Capacity {
    now: AtomicUsize,
    first: usize,
    /// Whether somebody has chosen it.
    chosen: bool,
}

impl Capacity {
    /// For objects of `size` bytes; `chosen` or by the size. Claims its part of the budget.
    pub(super) fn new(size: usize, chosen: Option<usize>) -> Capacity {
        let wanted = chosen.unwrap_or(SHEAF_BYTES / size);
        let wanted = wanted.clamp(CAPACITY_LEAST, CAPACITY_MOST);
        let bytes = |capacity| SHEAVES * capacity * size;
        let first = if claim(bytes(wanted)) {
            wanted
        } else {
            let capacity = if chosen.is_some() {
                wanted
            } else {
                CAPACITY_LEAST
            };
            // The least, or what was asked for, is had in any case.
            CLAIMED.fetch_add(bytes(capacity), Relaxed);
            capacity
        };
        Capacity {
            now: AtomicUsize::new(first),
            first,
            chosen: chosen.is_some(),
        }
    }
}

impl KmemCache {
    /// Sets how many objects this cache's sheaves hold, from 4 to 125, for those that are filled or emptied from now on.
    pub fn set_sheaf_capacity(&self, objects: usize) {
        let wanted = objects.clamp(CAPACITY_LEAST, CAPACITY_MOST);
        let (cache, now) = (self.descriptor, &self.descriptor.sheaves.now);
        let before = now.swap(wanted, Relaxed);
        CLAIMED.fetch_add(cache.sheaf_bytes(wanted), Relaxed);
        CLAIMED.fetch_sub(cache.sheaf_bytes(before), Relaxed);
    }
}

impl Cache {
    /// Objects that a sheaf filled now holds.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.sheaves.now.load(Relaxed)
    }

    /// Full sheaves in a barn at most.
    pub(super) fn barn_most(&self) -> usize {
        (BARN_BYTES / (self.size * self.capacity())).clamp(BARN_LEAST, BARN_MOST)
    }

    /// Bytes that a CPU's sheaves of this cache hold.
    fn sheaf_bytes(&self, capacity: usize) -> usize {
        SHEAVES * capacity * self.size
    }

    /// Gives the cache's part of the budget back.
    pub(super) fn unclaim(&self) {
        CLAIMED.fetch_sub(self.sheaf_bytes(self.capacity()), Relaxed);
    }

    /// The cache exchanges sheaves all the time: larger ones, if the budget allows.
    #[cold]
    pub(super) fn widen(&self) {
        let now = self.capacity();
        let wider = (2 * now).min(CAPACITY_MOST);
        if self.sheaves.chosen || wider == now {
            return;
        }
        let more = self.sheaf_bytes(wider) - self.sheaf_bytes(now);
        if claim(more) && !self.change(now, wider) {
            CLAIMED.fetch_sub(more, Relaxed);
        }
    }

    /// Nobody has exchanged a sheaf for a while: back towards what it began with.
    #[cold]
    pub(super) fn narrow(&self) {
        let now = self.capacity();
        let narrower = (now / 2).max(self.sheaves.first);
        if !self.sheaves.chosen && narrower < now && self.change(now, narrower) {
            CLAIMED.fetch_sub(self.sheaf_bytes(now) - self.sheaf_bytes(narrower), Relaxed);
        }
    }

    /// False when somebody else has changed it meanwhile.
    fn change(&self, from: usize, to: usize) -> bool {
        let now = &self.sheaves.now;
        now.compare_exchange(from, to, Relaxed, Relaxed).is_ok()
    }
}
