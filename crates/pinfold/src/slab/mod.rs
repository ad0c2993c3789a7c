//! Object caches: objects of one layout, kept ready per CPU.
//!
//! # The way of an object
//!
//! ```text
//!  alloc ◄── main sheaf ◄── spare sheaf ◄── barn ◄── partial slabs ◄── arena
//!  free  ──►  per CPU   ──►   per CPU   ──► per node ──►  per node  ──► per node
//!          no lock         no lock        node's lock  node's lock   arena's lock
//! ```
//!
//! * A **sheaf** is an array of pointers to free objects. Each CPU has a main one, which the fast paths pop from and push
//!   to in one critical section, and a spare (`percpu`).
//! * A **barn** holds full and empty sheaves; a CPU exchanges one for the other there (`node`).
//! * A **slab** is a run cut into objects, with a bit per free object in its frame (`slabs`). Objects carry no headers, and
//!   neither allocating nor freeing reads or writes them.
//!
//! * An object that others may still look at is freed deferred (`deferred`): it waits for a grace period ([`grace`]).
//! * Objects can be set apart, for a while ([`Prefilled`]) or for the worst case ([`MemPool`]).
//!
//! # Lock order
//!
//! See `lock`. The fast paths take none.

mod bundle;
mod cache;
mod deferred;
pub mod grace;
pub mod kmalloc;
mod mempool;
mod node;
mod percpu;
mod prefilled;
mod remote;
mod sheaf;
mod slabs;
mod typed;

pub use cache::{CACHES_MOST, CacheError, OBJECT_MOST};
pub use mempool::MemPool;
pub use prefilled::{OutOfMemory, Prefilled};
pub use typed::{Cache, Handle};

use crate::segment::SlabEvent;
use crate::{nodes, page};
use cache::Cache as Descriptor;
use core::alloc::Layout;
use core::fmt;
use core::ptr::{NonNull, null_mut};
use percpu::UNITS;
use pinfold_rseq::FenceError;

/// A cache of objects of one layout. Shared by reference; every method may be called from any thread at once.
///
/// ```
/// use pinfold::slab::KmemCache;
/// use std::alloc::Layout;
///
/// let cache = KmemCache::new("request", Layout::new::<[u64; 6]>())?;
/// let object = cache.alloc().expect("memory");
/// // SAFETY: the object came from this cache and is not used afterwards.
/// unsafe { cache.free(object) };
/// cache.destroy().expect("every object came back");
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
pub struct KmemCache {
    offset: usize,
    descriptor: &'static Descriptor,
}

impl KmemCache {
    /// Makes a cache. An empty cache holds a descriptor of some hundred bytes and no objects. `name` is kept up to 32
    /// bytes.
    ///
    /// # Errors
    ///
    /// [`CacheError`]: the layout is too large, there are too many caches, or the system has no memory.
    #[doc(alias = "kmem_cache_create")]
    pub fn new(name: &str, layout: Layout) -> Result<KmemCache, CacheError> {
        Self::create(name, layout, None)
    }

    /// Makes a cache whose objects are initialised by `constructor` when their slab is made, once, not at each
    /// allocation: who frees an object leaves it as the constructor did.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    ///
    /// # Safety
    ///
    /// `constructor` initialises an object of `layout` at the address it is given, and does not unwind nor use this
    /// cache: the node's lock is held.
    pub unsafe fn with_constructor(
        name: &str,
        layout: Layout,
        constructor: unsafe fn(*mut u8),
    ) -> Result<KmemCache, CacheError> {
        Self::create(name, layout, Some(constructor))
    }

    fn create(
        name: &str,
        layout: Layout,
        constructor: Option<unsafe fn(*mut u8)>,
    ) -> Result<KmemCache, CacheError> {
        let descriptor = Descriptor::create(name, layout, constructor)?;
        Ok(KmemCache {
            offset: descriptor.main(),
            descriptor,
        })
    }

    /// An object, uninitialised unless there is a constructor; `None` when the system has no memory.
    ///
    /// Costs one critical section on the common path. Else, once in a sheaf, an exchange under the node's lock; and
    /// a system call when the arena has to grow.
    #[doc(alias = "kmem_cache_alloc")]
    #[inline(always)]
    pub fn alloc(&self) -> Option<NonNull<u8>> {
        // SAFETY: the offset is the cache's place in the units.
        let object = unsafe { UNITS.pop_fast(self.offset) };
        if object.is_null() {
            return NonNull::new(self.descriptor.alloc_slow());
        }
        // SAFETY: compared just above.
        Some(unsafe { NonNull::new_unchecked(object) })
    }

    /// Takes an object back. Costs as [`alloc`](Self::alloc) does; never fails.
    ///
    /// # Safety
    ///
    /// The object came from this cache, and nobody uses it any more.
    #[doc(alias = "kmem_cache_free")]
    #[inline(always)]
    pub unsafe fn free(&self, object: NonNull<u8>) {
        // SAFETY: the offset is the cache's place in the units; the object is given up.
        if !unsafe { UNITS.push_fast(self.offset, object.as_ptr()) } {
            // SAFETY: the caller's promise.
            unsafe { self.descriptor.free_slow(object.as_ptr()) };
        }
    }

    /// An object of node `node`'s memory, or of another with memory, which [`statistics`](Self::statistics) count; past the CPU's sheaves, under the node's lock.
    #[doc(alias = "kmem_cache_alloc_node")]
    pub fn alloc_node(&self, node: usize) -> Option<NonNull<u8>> {
        let mut object = [null_mut()];
        self.descriptor
            .alloc_from(node % nodes::count(), &mut object);
        NonNull::new(object[0])
    }

    /// Fills `objects` from its start; returns how many, fewer only when the system has no memory. One critical
    /// section for as many as the sheaf holds; what the sheaves do not have comes from the slabs in one go.
    #[doc(alias = "kmem_cache_alloc_bulk")]
    pub fn alloc_bulk(&self, objects: &mut [*mut u8]) -> usize {
        let mut got = 0;
        while got < objects.len() {
            // SAFETY: the offset is the cache's place in the units.
            let popped = unsafe { UNITS.pop_batch(self.offset, &mut objects[got..]) };
            got += popped;
            if got == objects.len() {
                break;
            }
            if objects.len() - got >= self.descriptor.capacity {
                let number = nodes::current();
                let taken = self.descriptor.alloc_from(number, &mut objects[got..]);
                got += taken;
                if taken > 0 {
                    continue;
                }
            }
            let Some(object) = NonNull::new(self.descriptor.alloc_slow()) else {
                break;
            };
            objects[got] = object.as_ptr();
            got += 1;
        }
        got
    }

    /// Takes objects back, many in one critical section.
    ///
    /// # Safety
    ///
    /// As for [`free`](Self::free), for each of them.
    #[doc(alias = "kmem_cache_free_bulk")]
    pub unsafe fn free_bulk(&self, objects: &[*mut u8]) {
        let mut given = 0;
        while given < objects.len() {
            // SAFETY: the offset is the cache's place in the units; the objects are given up.
            given += unsafe { UNITS.push_batch(self.offset, &objects[given..]) };
            if let Some(&object) = objects.get(given) {
                // SAFETY: the caller's promise.
                unsafe { self.descriptor.free_slow(object) };
                given += 1;
            }
        }
    }

    /// Gives everything that is free back to the system, what CPUs have cached included; returns how many slabs.
    ///
    /// Interrupts the CPUs that run threads of this process, once; some microseconds. When objects were [freed
    /// deferred](Self::free_deferred) it waits for their readers: it is not for readers then.
    ///
    /// # Errors
    ///
    /// [`FenceError`] when the kernel cannot fence; then what CPUs have cached stays, the rest is given back.
    #[doc(alias = "kmem_cache_shrink")]
    pub fn shrink(&self) -> Result<usize, FenceError> {
        let drained = self.drain();
        let released = self.release();
        drained.map(|()| released)
    }

    fn release(&self) -> usize {
        let nodes = self.descriptor.nodes().iter();
        nodes.map(|node| node.shrink(self.descriptor)).sum()
    }

    /// Ends the cache and gives its memory back. Waits for the readers of objects [freed deferred](Self::free_deferred), as dropping
    /// the cache does.
    ///
    /// # Errors
    ///
    /// [`Leak`] when objects have not come back: it says how many and holds the cache, which works as before.
    #[doc(alias = "kmem_cache_destroy")]
    pub fn destroy(self) -> Result<(), Leak> {
        let drained = self.drain();
        self.release();
        let objects = self.in_use();
        if objects > 0 || drained.is_err() {
            return Err(Leak {
                objects,
                cache: self,
            });
        }
        // `drop` retires the descriptor.
        Ok(())
    }

    /// Objects in use, with those in CPUs' and barns' sheaves, and those that wait for readers. Takes the nodes' locks and walks their partial slabs.
    pub fn in_use(&self) -> usize {
        let nodes = self.descriptor.nodes().iter();
        nodes.map(|node| node.in_use(self.descriptor)).sum()
    }

    /// Checks the cache's own records: every slab's count against its bits, the lists' links, no object of the barn free
    /// in its slab. Takes the nodes' locks.
    ///
    /// # Errors
    ///
    /// What is wrong, and at which address.
    pub fn validate(&self) -> Result<(), Inconsistency> {
        let mut nodes = self.descriptor.nodes().iter();
        nodes
            .try_for_each(|node| node.validate(self.descriptor))
            .map_err(|(what, address)| Inconsistency { what, address })
    }

    /// The name it was made with.
    pub fn name(&self) -> &str {
        self.descriptor.name()
    }

    /// Bytes from one object to the next.
    pub fn object_size(&self) -> usize {
        self.descriptor.size
    }

    /// What the slow paths have counted.
    pub fn statistics(&self) -> Statistics {
        let events = &self.descriptor.events;
        Statistics {
            alloc_slowpath: events.sum(SlabEvent::AllocSlowpath),
            free_slowpath: events.sum(SlabEvent::FreeSlowpath),
            barn_get: events.sum(SlabEvent::BarnGet),
            barn_put: events.sum(SlabEvent::BarnPut),
            slab_alloc: events.sum(SlabEvent::SlabAlloc),
            slab_free: events.sum(SlabEvent::SlabFree),
            alloc_node_mismatch: events.sum(SlabEvent::AllocNodeMismatch),
            free_remote: events.sum(SlabEvent::FreeRemote),
            free_rcu_sheaf: events.sum(SlabEvent::FreeRcuSheaf),
            free_rcu_sheaf_fail: events.sum(SlabEvent::FreeRcuSheafFail),
            slabs: self.descriptor.nodes().iter().map(node::Node::slabs).sum(),
            sheaf_capacity: self.descriptor.capacity,
        }
    }
}

impl Drop for KmemCache {
    /// Gives back what can be; where objects are still in use the cache's memory stays, as they may be used.
    fn drop(&mut self) {
        let drained = self.drain();
        self.release();
        if drained.is_ok() && self.in_use() == 0 {
            self.descriptor.retire();
        }
    }
}

impl fmt::Debug for KmemCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KmemCache")
            .field("name", &self.name())
            .field("object_size", &self.object_size())
            .finish_non_exhaustive()
    }
}

/// What a cache's slow paths have counted, with the kernel's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statistics {
    /// Allocations that found the main sheaf empty.
    pub alloc_slowpath: u64,
    /// Frees that found the main sheaf full.
    pub free_slowpath: u64,
    /// Full sheaves taken from barns.
    pub barn_get: u64,
    /// Full sheaves put into barns.
    pub barn_put: u64,
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
    /// Objects that a sheaf holds at most.
    pub sheaf_capacity: usize,
}

/// Objects had not come back when their cache was to be destroyed.
#[derive(Debug)]
pub struct Leak {
    /// How many; 0 when the CPUs' caches could not be drained for want of a fence.
    pub objects: usize,
    /// The cache, as it was.
    pub cache: KmemCache,
}

impl fmt::Display for Leak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.cache.name();
        match self.objects {
            0 => write!(
                f,
                "cache {name} cannot be destroyed: the kernel cannot fence, so CPUs keep their sheaves"
            ),
            n => write!(
                f,
                "cache {name} cannot be destroyed: {n} objects have not been freed"
            ),
        }
    }
}

impl core::error::Error for Leak {}

/// A cache's records contradict each other: somebody wrote where they should not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inconsistency {
    /// Which invariant does not hold.
    pub what: &'static str,
    /// The slab or object.
    pub address: *const u8,
}

impl fmt::Display for Inconsistency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {:p}", self.what, self.address)
    }
}

impl core::error::Error for Inconsistency {}

/// Gives all free memory of all caches back to the system, what CPUs have cached included; returns bytes.
///
/// # Errors
///
/// As for [`KmemCache::shrink`].
pub fn shrink_all() -> Result<usize, FenceError> {
    let drained = percpu::drain(|_| true);
    deferred::progress();
    cache::for_each(|cache| {
        cache.nodes().iter().for_each(|node| {
            node.shrink(cache);
        });
    });
    let bytes = page::trim();
    drained.map(|()| bytes)
}

mod fork;
mod idle;
pub use fork::{fork_child, fork_parent, fork_prepare};
