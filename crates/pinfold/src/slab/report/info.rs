//! Views of caches, for programs that monitor them: what a cache is, holds and has counted.
//!
//! A thread that reads a cache's numbers, the *reader*, stops no CPU and moves no sheaf. It reads
//! two things, one after the other:
//!
//! * without a lock, the words in the CPUs' units, which say how many objects each sheaf has;
//! * under each node's lock, the node's barn, slabs and events. It walks the partial slabs under
//!   that lock.
//!
//! The numbers are exact if no other thread uses the cache during the reading. Otherwise the reader
//! may count a sheaf twice or not at all, if the sheaf moves between the two readings. The numbers
//! of objects are then wrong by the sheaf's objects. Objects that a thread moves in a slow path at
//! that moment, at most a sheaf for each thread, count as in use.
//!
//! Another thread may destroy the cache at any moment. So the reader pins the cache while it reads,
//! and no other cache gets the descriptor, or the words in the units, during that time
//! (`registry`). At the end, it checks whether the cache is still alive. If not, it discards
//! everything that it has read.

use crate::arena::GRANULE;
use crate::cache_units::{CacheId, DEFERRED, HELD, MAIN, SHEAF_UNITS, SPARE, word};
use crate::segment::{EVENTS, SlabEvent};
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::cache::registry::{self, birth_of, pin_same};
use crate::slab::cpu::sheaf::objects_in_word;
use crate::slab::node::geometry::Geometry;
use crate::slab::node::look::{Reading, Usage};
use crate::slab::node::objects::Name;
use crate::slab::{DebugFlags, KmemCache};
use crate::sys;
use core::fmt;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::possible;

/// What a cache's slow paths have counted, under the kernel's names. docs/slabinfo.md explains each
/// count. [`KmemCache::statistics`] returns this.
///
/// ```
/// use pinfold::slab::KmemCache;
/// use std::alloc::Layout;
///
/// let cache = KmemCache::new("job", Layout::new::<[u64; 4]>())?;
/// let before = cache.statistics();
/// let job = cache.alloc().expect("memory");
/// let after = cache.statistics();
/// println!("{} slow allocations", after.alloc_slowpath - before.alloc_slowpath);
/// assert!(after.refilled > before.refilled);
/// # // SAFETY: the object came from this cache and is not used afterwards.
/// # unsafe { cache.free(job) };
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Allocations that found the main sheaf empty.
    pub alloc_slowpath: u64,
    /// Frees that found the main sheaf full.
    pub free_slowpath: u64,
    /// Full sheaves taken from barns.
    pub barn_get: u64,
    /// Times that a barn had no full sheaf.
    pub barn_get_fail: u64,
    /// Full sheaves put into barns.
    pub barn_put: u64,
    /// Times that a barn had too many full sheaves and flushed one.
    pub barn_put_fail: u64,
    /// Objects taken from slabs, into sheaves or directly.
    pub refilled: u64,
    /// Objects given back to slabs, from sheaves or directly.
    pub flushed: u64,
    /// Slabs that were made.
    pub slab_alloc: u64,
    /// Slabs that were given back to the arena.
    pub slab_free: u64,
    /// Objects allocated from another node, because the requested node had no memory.
    pub alloc_node_mismatch: u64,
    /// Objects that a CPU of another node freed. Counted when their sheaf leaves the CPU.
    pub free_remote: u64,
    /// Objects that were freed deferred. Counted when their sheaf leaves the CPU.
    pub free_rcu_sheaf: u64,
    /// Objects that were freed deferred and lost, because there was no memory for a sheaf.
    pub free_rcu_sheaf_fail: u64,
    /// How many slabs the cache has now.
    pub slabs: usize,
    /// Largest number of objects in a sheaf; 0 in a debugged cache, which has no sheaves.
    pub sheaf_capacity: usize,
}

/// A view of a cache, for programs that monitor the cache. Stays valid after the cache was
/// destroyed. From then on, every number that could change reads as 0. [`caches`] and
/// [`KmemCache::info`] return this.
///
/// ```
/// use pinfold::slab::{KmemCache, Statistics};
/// use std::alloc::Layout;
///
/// let cache = KmemCache::new("job", Layout::new::<[u64; 4]>())?;
/// let info = cache.info();
/// assert_ne!(info.statistics(), Statistics::default());
/// drop(cache);
/// assert_eq!((info.name(), info.statistics()), ("job", Statistics::default()));
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
#[derive(Clone, Copy)]
pub struct Info {
    id: CacheId,
    /// The cache's birth, which tells it from other caches with the same number (`registry`).
    birth: u32,
    // Copies of the properties that stay the same as long as the cache lives.
    name: Name,
    pub(crate) object: usize,
    pub(crate) align: usize,
    pub(crate) geometry: Geometry,
    pub(crate) is_constructed: bool,
    debug_flags: DebugFlags,
    is_hardened: bool,
}

/// Returns an iterator over all caches, including those of malloc's size classes. A size class has
/// a cache from its first allocation on. The iteration takes no lock.
///
/// The iteration may miss a cache that is made or destroyed while the iteration runs. A cache that
/// was dropped while objects were in use is returned until the process ends.
///
/// ```
/// use pinfold::slab::{KmemCache, caches};
/// use std::alloc::Layout;
///
/// let cache = KmemCache::new("packet", Layout::new::<[u8; 256]>())?;
/// let object = cache.alloc().expect("memory");
/// let packet = caches().find(|info| info.name() == "packet").unwrap();
/// assert_eq!(packet.usage().active, 1);
/// // SAFETY: the object came from this cache and is not used afterwards.
/// unsafe { cache.free(object) };
/// cache.destroy().expect("every object came back");
/// assert!(packet.is_destroyed());
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
pub fn caches() -> impl Iterator<Item = Info> {
    registry::all().map(|cache| Info::of(&cache))
}

impl Info {
    /// Returns a view of a cache that the caller owns or pins.
    fn of(cache: &Descriptor) -> Info {
        Info {
            id: cache.id,
            birth: birth_of(cache.id),
            name: cache.name,
            object: cache.object,
            align: cache.align,
            geometry: cache.geometry,
            is_constructed: cache.constructor.is_some(),
            debug_flags: cache.debug_flags(),
            is_hardened: cache.hardening.is_some(),
        }
    }

    /// Calls `read` with the cache. Returns the default if the cache was destroyed before the call
    /// or during the call.
    fn read_alive<R: Default>(&self, read: impl FnOnce(&Descriptor) -> R) -> R {
        let cache = pin_same(self.id, self.birth);
        let read = cache.map(|cache| (read(&cache), cache.is_alive()));
        read.filter(|&(_, is_alive)| is_alive)
            .map_or_else(R::default, |(read, _)| read)
    }

    /// Returns the cache's name.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Returns whether the cache has been destroyed.
    pub fn is_destroyed(&self) -> bool {
        pin_same(self.id, self.birth).is_none()
    }

    /// Returns the checks that the cache makes.
    pub fn debug_flags(&self) -> DebugFlags {
        self.debug_flags
    }

    /// Returns whether the cache is hardened.
    pub fn is_hardened(&self) -> bool {
        self.is_hardened
    }

    /// Returns what the slow paths have counted. Costs as much as [`usage`](Self::usage).
    pub fn statistics(&self) -> Statistics {
        let Reading { usage, counts } = self.read();
        let count = |event: SlabEvent| counts[event as usize];
        Statistics {
            alloc_slowpath: count(SlabEvent::AllocSlowpath) + count(SlabEvent::AllocLockless),
            free_slowpath: count(SlabEvent::FreeSlowpath) + count(SlabEvent::FreeLockless),
            barn_get: count(SlabEvent::BarnGet),
            barn_get_fail: count(SlabEvent::BarnGetFail),
            barn_put: count(SlabEvent::BarnPut),
            barn_put_fail: count(SlabEvent::BarnPutFail),
            refilled: count(SlabEvent::Refilled),
            flushed: count(SlabEvent::Flushed),
            slab_alloc: count(SlabEvent::SlabAlloc),
            slab_free: count(SlabEvent::SlabFree),
            alloc_node_mismatch: count(SlabEvent::AllocNodeMismatch),
            free_remote: count(SlabEvent::FreeRemote),
            free_rcu_sheaf: count(SlabEvent::FreeRcuSheaf),
            free_rcu_sheaf_fail: count(SlabEvent::FreeRcuSheafFail),
            slabs: usage.slabs,
            sheaf_capacity: self.sheaves().0,
        }
    }

    /// Returns the largest number of objects in a sheaf, and the largest number of full sheaves in
    /// a barn. Both are 0 for a debugged cache, and for a destroyed one.
    pub(crate) fn sheaves(&self) -> (usize, usize) {
        self.read_alive(|cache| match cache.slot_layout.as_ref() {
            Some(_) => (0, 0),
            None => {
                let most = cache.barn_most(usize::MAX / cache.geometry.slab_bytes, 0);
                (cache.capacity(), most)
            }
        })
    }

    /// Returns how many of the system's pages a slab has.
    pub(crate) fn pages_per_slab(&self) -> usize {
        self.geometry.granules * GRANULE / sys::page_size()
    }

    /// Returns what the slow paths have counted, without a lock.
    pub(crate) fn counts(&self) -> [u64; EVENTS] {
        let counts = self.read_alive(|cache| {
            let mut counts = [0; EVENTS];
            let parts = cache.parts();
            parts.for_each(|part| part.add_events(&mut counts));
            Reading {
                counts,
                ..Reading::default()
            }
        });
        counts.counts
    }

    /// Returns where the objects are.
    ///
    /// Reads four words for each CPU. Takes each node's lock, and walks its barn and its partial
    /// slabs.
    ///
    /// Exact if no other thread uses the cache during the call. Otherwise wrong by the objects of
    /// the sheaves that moved. In a signal handler that interrupted a slow path, the numbers lack
    /// the node that the slow path has locked.
    pub fn usage(&self) -> Usage {
        self.read().usage
    }

    /// Reads the CPUs' sheaves and the nodes.
    pub(crate) fn read(&self) -> Reading {
        self.read_alive(read)
    }
}

/// Reads the CPUs' sheaves and the nodes of a cache.
pub(super) fn read(cache: &Descriptor) -> Reading {
    let mut reading = Reading::default();
    count_sheaves(cache, &mut reading.usage);
    let parts = cache.parts();
    parts.for_each(|part| part.tally(cache, &mut reading));
    let usage = &mut reading.usage;
    usage.total = usage.slabs * cache.geometry.per_slab;
    let in_sheaves = usage.cpu_objects + usage.barn_objects;
    usage.active = usage.allocated.saturating_sub(in_sheaves);
    reading
}

/// Adds the sheaves of all CPUs to `usage`.
fn count_sheaves(cache: &Descriptor, usage: &mut Usage) {
    let units = (0..possible()).map(|index| SHEAF_UNITS.unit(index));
    for unit in units.filter(|unit| !unit.is_null()) {
        for kind in [MAIN, SPARE, DEFERRED, HELD] {
            let word = word(unit, cache.main() + kind).load(Relaxed);
            if let Some(objects) = objects_in_word(word) {
                usage.cpu_sheaves += 1;
                usage.cpu_objects += objects;
            }
        }
    }
}

impl fmt::Debug for Info {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Info")
            .field("name", &self.name())
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}

impl KmemCache {
    /// Returns a view of the cache that stays valid after the cache was destroyed.
    pub fn info(&self) -> Info {
        Info::of(self.descriptor)
    }

    /// Returns what the slow paths have counted. Costs as much as [`usage`](Self::usage).
    ///
    /// ```
    /// use pinfold::slab::KmemCache;
    /// use std::alloc::Layout;
    ///
    /// let cache = KmemCache::new("job", Layout::new::<[u64; 4]>())?;
    /// let job = cache.alloc().expect("memory");
    /// assert_eq!(cache.statistics().slab_alloc, 1);
    /// assert_eq!(cache.usage().active, 1);
    /// // SAFETY: the object came from this cache and is not used afterwards.
    /// unsafe { cache.free(job) };
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    pub fn statistics(&self) -> Statistics {
        self.info().statistics()
    }

    /// Returns where the objects are; see [`Info::usage`].
    pub fn usage(&self) -> Usage {
        self.info().usage()
    }
}
