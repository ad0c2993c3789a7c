//! What the process's own allocator says, for both interfaces.

use crate::families::{
    ACTIVE, ALLOCATED, CACHE_FLUSHES, CACHE_REFILLS, CACHE_REMOTE_FREES, CACHE_SLOW_CALLS, DIRTY,
    Family, HELD, HELD_PEAK, MAPPED, METADATA, RESIDENT,
};
use pinfold::memory::{self, ArenaItem};
use pinfold::slab::{Info, Statistics, caches};

/// The most caches that are exported.
const CACHES: usize = 512;

/// What a cache says.
pub struct Cache {
    pub info: Info,
    pub counts: Statistics,
    /// Bytes of an object, and how many of them a slab has.
    size: u64,
    per_slab: u64,
}

impl Cache {
    /// Reads a cache. Returns `None` for one that was never used.
    fn of(info: Info) -> Option<Cache> {
        let counts = info.statistics();
        (counts.refilled > 0).then(|| Cache {
            counts,
            size: info.attribute("slab_size").unwrap_or(0),
            per_slab: info.attribute("objs_per_slab").unwrap_or(0),
            info,
        })
    }

    /// Returns how many objects are out of their slabs.
    fn active(&self) -> u64 {
        self.counts.refilled.saturating_sub(self.counts.flushed)
    }

    /// Returns how many objects are in each state.
    pub fn objects(&self) -> [(&'static str, u64); 2] {
        let all = (self.counts.slabs as u64).saturating_mul(self.per_slab);
        let free = all.saturating_sub(self.active());
        [("active", self.active()), ("free", free)]
    }
}

/// Reads a count of a cache.
type Count = fn(&Statistics) -> u64;

/// The counters of each cache.
pub const COUNTERS: [(Family, Count); 4] = [
    (CACHE_REFILLS, |counts| counts.refilled),
    (CACHE_FLUSHES, |counts| counts.flushed),
    (CACHE_SLOW_CALLS, |counts| {
        counts.alloc_slowpath.wrapping_add(counts.free_slowpath)
    }),
    (CACHE_REMOTE_FREES, |counts| counts.free_remote),
];

/// One reading of the allocator.
pub struct Reading {
    /// The gauges, in bytes.
    pub gauges: [(Family, u64); 8],
    /// Bytes given back to the system so far.
    pub returned: u64,
    /// The caches that the program has used, at most [`CACHES`].
    pub caches: Vec<Cache>,
}

impl Reading {
    pub fn now() -> Reading {
        let caches: Vec<Cache> = caches().filter_map(Cache::of).take(CACHES).collect();
        let objects = caches
            .iter()
            .map(|cache| cache.active().saturating_mul(cache.size));
        let large = (memory::large_in_use() + memory::huge_total()) as u64;
        let allocated = objects.fold(large, u64::saturating_add);
        let (held, dirty) = (memory::held(), memory::dirty());
        let metadata = memory::metadata_mapped();
        let mapped = memory::ARENA_STAT.read(ArenaItem::Mapped) + memory::huge_total() as u64;
        Reading {
            gauges: [
                (ALLOCATED, allocated),
                (ACTIVE, held.saturating_sub(dirty)),
                (DIRTY, dirty),
                (HELD, held),
                (HELD_PEAK, memory::held_peak()),
                (METADATA, metadata),
                (RESIDENT, held.saturating_add(metadata)),
                (MAPPED, mapped.saturating_add(metadata)),
            ],
            returned: memory::returned(),
            caches,
        }
    }
}
