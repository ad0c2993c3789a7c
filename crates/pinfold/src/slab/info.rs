//! What a cache is, holds and has counted, for programs that look on.
//!
//! Nobody is disturbed: no CPU is stopped, and no sheaf moves. Two things are read, one after the
//! other:
//!
//! * the words in the CPUs' units, which say how many objects each sheaf has, without a lock;
//! * each node's barn, slabs and events, with the node's lock, for as long as the walk over the
//!   partial slabs takes.
//!
//! So numbers are exact when nobody uses the cache meanwhile. Else a sheaf that moves between the first and the second reading is
//! counted in both places or in neither, and numbers of objects are wrong by so many. What a thread has in hand in the midst
//! of a slow path, a sheaf at most, looks as if it were in use.
//!
//! A cache may be destroyed at any moment. Its descriptor and its events stay, but its words in the
//! units may be its successor's. So whether it is still registered is asked after all else was
//! read: if not, nothing that was read counts.

use super::cache::{self, Cache};
use super::percpu::{DEFERRED, HELD, SPARE, UNITS};
use super::sheaf::objects_in_word;
use super::{DebugFlags, KmemCache, idle, kmalloc};
use crate::page::GRANULE;
use crate::segment::{EVENTS, SlabEvent};
use crate::sys;
use core::fmt;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::possible;

/// What a cache's slow paths have counted, with the kernel's names. docs/slabinfo.md says more about each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// Times that a barn had full sheaves enough, so that one was flushed.
    pub barn_put_fail: u64,
    /// Objects taken from slabs, into sheaves or past them.
    pub refilled: u64,
    /// Objects given back to slabs, out of sheaves or past them.
    pub flushed: u64,
    /// Slabs made.
    pub slab_alloc: u64,
    /// Slabs given back.
    pub slab_free: u64,
    /// Objects given out of another node's memory than wanted, for that had none.
    pub alloc_node_mismatch: u64,
    /// Objects freed on another node than theirs, as far as their sheaves have left the CPU.
    pub free_remote: u64,
    /// Objects freed deferred, as far as their sheaves were full or flushed.
    pub free_rcu_sheaf: u64,
    /// Objects freed deferred that are lost, for there was no memory for what waits.
    pub free_rcu_sheaf_fail: u64,
    /// Slabs there are.
    pub slabs: usize,
    /// Objects that a sheaf holds at most; 0 in a debugged cache, which has none.
    pub sheaf_capacity: usize,
}

/// Where a cache's objects are, and in which states its slabs.
///
/// `allocated = active + cpu_objects + barn_objects`, and `total = allocated + free objects in slabs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Objects in users' hands; also those that wait for readers outside the CPUs' sheaves, and those that debugging or hardening found written
    /// to and never gives out again.
    pub active: usize,
    /// Objects that are not free in their slab: active ones, and those in sheaves.
    pub allocated: usize,
    /// Objects in all slabs.
    pub total: usize,
    /// Sheaves that CPUs have, and the objects in them.
    pub cpu_sheaves: usize,
    /// See [`cpu_sheaves`](Self::cpu_sheaves).
    pub cpu_objects: usize,
    /// Full sheaves in the nodes' barns, and the objects in them.
    pub barn_sheaves: usize,
    /// See [`barn_sheaves`](Self::barn_sheaves).
    pub barn_objects: usize,
    /// Slabs there are.
    pub slabs: usize,
    /// Slabs with some objects free.
    pub slabs_partial: usize,
    /// Slabs with all objects free.
    pub slabs_empty: usize,
    /// Objects of partial slabs that are not free there.
    pub objects_partial: usize,
}

impl Usage {
    /// Slabs without a free object.
    pub fn slabs_full(&self) -> usize {
        self.slabs - self.slabs_partial - self.slabs_empty
    }
}

/// What is read of a cache at once.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reading {
    pub(super) usage: Usage,
    /// By [`SlabEvent`].
    pub(super) counts: [u64; EVENTS],
}

/// A cache as programs that look on see it. Stays valid when the cache is destroyed: all that changes reads as zero then.
#[derive(Clone, Copy)]
pub struct Info {
    pub(super) cache: &'static Cache,
}

/// All caches there are, those of [`kmalloc`](super::kmalloc) included.
///
/// Takes no lock: a cache that is made or destroyed meanwhile is or is not among them. One whose objects had not come back when it was
/// dropped is, for as long as the process lives.
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
    kmalloc::make_all();
    cache::all().map(|cache| Info { cache })
}

impl Info {
    /// The name the cache was made with.
    pub fn name(&self) -> &'static str {
        self.cache.name()
    }

    /// Whether the cache has been destroyed.
    pub fn is_destroyed(&self) -> bool {
        !self.cache.is_registered()
    }

    /// The checks that the cache makes.
    pub fn debug_flags(&self) -> DebugFlags {
        self.cache
            .plan()
            .map_or(DebugFlags::NONE, |plan| plan.flags)
    }

    /// Whether the cache is hardened.
    pub fn is_hardened(&self) -> bool {
        self.cache.hardening.is_some()
    }

    /// What the slow paths have counted. Costs what [`usage`](Self::usage) does.
    pub fn statistics(&self) -> Statistics {
        let Reading { usage, counts } = self.read();
        let count = |event: SlabEvent| counts[event as usize];
        let statistics = Statistics {
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
        };
        self.unless_destroyed(statistics)
    }

    /// Objects in a sheaf at most, and full sheaves in a barn; a debugged cache has neither.
    pub(super) fn sheaves(&self) -> (usize, usize) {
        match self.cache.plan() {
            Some(_) => (0, 0),
            None => (
                self.cache.capacity(),
                self.cache.barn_most(usize::MAX / self.cache.slab_bytes),
            ),
        }
    }

    /// Pages of the system in a slab.
    pub(super) fn pages_per_slab(&self) -> usize {
        self.cache.granules * GRANULE / sys::page_size()
    }

    /// Reads what the slow paths have counted, without a lock.
    pub(super) fn counts(&self) -> [u64; EVENTS] {
        let mut counts = [0; EVENTS];
        let nodes = self.cache.nodes().iter();
        nodes.for_each(|node| node.add_events(&mut counts));
        self.unless_destroyed(counts)
    }

    /// Where the objects are. Reads three words for each CPU; takes each node's lock and walks its barn and partial slabs.
    ///
    /// Exact when nobody uses the cache meanwhile; else wrong by the sheaves that moved. A signal handler that interrupted a
    /// slow path misses what that has locked.
    pub fn usage(&self) -> Usage {
        self.read().usage
    }

    /// Reads the CPUs' sheaves, and what the nodes have.
    pub(super) fn read(&self) -> Reading {
        let mut reading = Reading::default();
        count_sheaves(self.cache, &mut reading.usage);
        let nodes = self.cache.nodes().iter();
        nodes.for_each(|node| node.tally(self.cache, &mut reading));
        let usage = &mut reading.usage;
        usage.total = usage.slabs * self.cache.per_slab;
        let in_sheaves = usage.cpu_objects + usage.barn_objects;
        usage.active = usage.allocated.saturating_sub(in_sheaves);
        self.unless_destroyed(reading)
    }

    /// What was read, or nothing, if it may have been the successor's.
    fn unless_destroyed<T: Default>(&self, read: T) -> T {
        if self.is_destroyed() {
            return T::default();
        }
        read
    }
}

/// Adds the sheaves of all CPUs to `usage`, by their words.
fn count_sheaves(cache: &Cache, usage: &mut Usage) {
    let units = (0..possible()).map(|index| UNITS.unit(index));
    for unit in units.filter(|unit| !unit.is_null()) {
        for place in [0, SPARE, DEFERRED, HELD] {
            let word = idle::word(unit, cache.main() + place).load(Relaxed);
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
    /// The cache as programs that look on see it.
    pub fn info(&self) -> Info {
        Info {
            cache: self.descriptor,
        }
    }

    /// What the slow paths have counted.
    pub fn statistics(&self) -> Statistics {
        self.info().statistics()
    }

    /// Where the objects are; see [`Info::usage`].
    pub fn usage(&self) -> Usage {
        self.info().usage()
    }
}
