//! Object caches: objects of one layout, kept ready on each CPU.
//!
//! Allocating each object under a lock, or with an atomic instruction, is slow and does not scale.
//! So each CPU keeps arrays of pointers to free objects, and moves whole arrays to shared places.
//!
//! ```text
//!  alloc ◄── main sheaf ◄── spare sheaf ◄── barn ◄── partial slabs ◄── arena
//!  free  ──►  per CPU   ──►   per CPU   ──► per node ──►  per node  ──► per node
//!          no lock         no lock        node's lock  node's lock   arena's lock
//! ```
//!
//! * A **sheaf** is an array of pointers to free objects (`sheaf`). Each CPU has a main sheaf and a
//!   spare sheaf (`percpu`). The fast paths pop from the main sheaf, or push to it, in one
//!   **critical section**: a restartable sequence, or a short lock where the kernel offers none.
//! * A **barn** is a node's store of full and empty sheaves. CPUs exchange sheaves there (`node`).
//! * A **slab** is a run of memory from the node's arena (`page`), cut into objects (`slabs`). The
//!   run's record has a bit for each object, set while the object is free. So allocating and
//!   freeing do not touch the objects.
//! * A **deferred** free is for an object that other threads may still read. The object becomes
//!   free after a grace period, when all these readers have left (`deferred`, [`grace`]).
//! * A caller can reserve objects: for code that must not fail halfway ([`Prefilled`]), or for when
//!   the system has no memory ([`MemPool`]).
//! * A cache that **checks** is debugged (`debug`) or hardened (`harden`), and has no main sheaf.
//!
//! The module `lock` has the order in which slow paths take locks. Fast paths take none.

#[cfg(feature = "allocator-api2")]
mod allocator;
mod aside;
mod attributes;
mod builder;
mod bundle;
mod cache;
mod constructor;
pub mod debug;
mod deferred;
mod events;
mod fast;
pub mod grace;
mod guard;
mod hands;
mod harden;
mod info;
mod key;
pub mod kmalloc;
mod look;
mod mempool;
mod node;
mod objects;
mod percpu;
mod prefilled;
mod purge;
mod remote;
mod sheaf;
mod slabinfo;
mod slabs;
mod tune;
mod typed;

#[cfg(feature = "allocator-api2")]
pub use allocator::Kmalloc;
pub use attributes::Attributes;
pub use builder::Builder;
pub use cache::{CACHES_MOST, CacheError, OBJECT_MOST};
pub use debug::DebugFlags;
pub use info::{Info, Statistics, Usage, caches};
pub use mempool::MemPool;
#[doc(hidden)]
pub use percpu::tick;
pub use prefilled::{OutOfMemory, Prefilled};
#[doc(hidden)]
pub use reclaim::{make_room, or_reclaim, or_reclaim_for};
pub use slabinfo::{Slabinfo, slabinfo};
pub use tune::{set_sheaf_budget, sheaf_bytes};
pub use typed::{
    Cache, Handle, Kept, ObjectCache, Reusable, Shared, SharedCache, TryAllocError, UninitHandle,
};

use crate::nodes;
use crate::page::{self, Ask};
use cache::Cache as Descriptor;
use core::alloc::Layout;
use core::fmt;
use core::ptr::{NonNull, null_mut};
use percpu::units;
use pinfold_rseq::FenceError;

/// A cache of objects of one layout. Every method may be called from any thread at any time.
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
    /// The offset of the main sheaf's word in each CPU's unit, or 0 for a cache that checks.
    offset: usize,
    descriptor: &'static Descriptor,
}

impl KmemCache {
    /// Makes a cache. `name` is cut to 32 bytes. Make one cache for each kind of object, and keep
    /// it: `destroy` leaves its descriptor mapped, because another thread may [look](caches) at it.
    ///
    /// # Errors
    ///
    /// [`CacheError`], if the layout is too large, there are too many caches, or the system has no
    /// memory.
    #[doc(alias = "kmem_cache_create")]
    pub fn new(name: &str, layout: Layout) -> Result<KmemCache, CacheError> {
        Self::builder(name, layout).build()
    }

    /// Returns a builder for a cache with settings of its own.
    pub const fn builder(name: &str, layout: Layout) -> Builder<'_> {
        Builder::new(name, layout)
    }

    /// Makes a cache whose objects `constructor` initialises once, when their slab is made.
    /// Allocating does not initialise an object again, so a caller frees an object in the
    /// constructed state.
    ///
    /// # Errors
    ///
    /// [`CacheError`], as [`new`](Self::new) returns it.
    ///
    /// # Safety
    ///
    /// `constructor` initialises an object of `layout` at the address that it is given. It does not
    /// unwind. It does not use this cache, because its caller holds a node's lock.
    pub unsafe fn with_constructor(
        name: &str,
        layout: Layout,
        constructor: unsafe fn(*mut u8),
    ) -> Result<KmemCache, CacheError> {
        // SAFETY: the caller promises what `Builder::constructor` requires of a constructor.
        unsafe { Self::builder(name, layout).constructor(constructor) }.build()
    }

    fn of(descriptor: &'static Descriptor) -> KmemCache {
        let offset = if descriptor.checks() {
            0
        } else {
            descriptor.main()
        };
        KmemCache { offset, descriptor }
    }

    /// Allocates an object, uninitialised unless the cache has a constructor. Returns `None` if the
    /// system has no memory. May return `None` in a signal handler that interrupted a slow path.
    ///
    /// Costs one critical section. If both sheaves are empty, costs a lock and perhaps a system
    /// call.
    #[doc(alias = "kmem_cache_alloc")]
    #[inline(always)]
    pub fn alloc(&self) -> Option<NonNull<u8>> {
        if self.offset == 0 {
            return NonNull::new(self.descriptor.alloc_checked());
        }
        // SAFETY: each unit has this cache's main sheaf at `offset`. The word is 0 or a stack.
        let object = unsafe { units().pop_fast(self.offset) };
        if object.is_null() {
            return NonNull::new(self.descriptor.alloc_slow());
        }
        // SAFETY: `object` is not null, as tested above.
        Some(unsafe { NonNull::new_unchecked(object) })
    }

    /// Frees an object. Never fails. Costs as much as [`alloc`](Self::alloc).
    ///
    /// # Safety
    ///
    /// The object came from this cache, and no thread uses it any more. If the cache has a
    /// constructor, the object is in the constructed state, or in the state that the cache's users
    /// agreed on.
    #[doc(alias = "kmem_cache_free")]
    #[inline(always)]
    pub unsafe fn free(&self, object: NonNull<u8>) {
        if self.offset == 0 {
            // SAFETY: the caller promises that the object is this cache's and unused.
            return unsafe { self.descriptor.free_checked(object.as_ptr()) };
        }
        // SAFETY: each unit has this cache's main sheaf at `offset`. The caller gives `object` up.
        if !unsafe { units().push_fast(self.offset, object.as_ptr()) } {
            // SAFETY: the caller promises that the object is this cache's and unused.
            unsafe { self.descriptor.free_slow(object.as_ptr()) };
        }
    }

    /// Allocates an object from the memory of node `node`. If that node has none, allocates from
    /// another node, and [`statistics`](Self::statistics) count this. Bypasses the CPU's sheaves,
    /// and takes the node's lock. Nodes are numbered as in [`Zone`](crate::vmstat::Zone), and
    /// `node` is taken modulo their number.
    #[doc(alias = "kmem_cache_alloc_node")]
    pub fn alloc_node(&self, node: usize) -> Option<NonNull<u8>> {
        let ask = Ask::only(node % nodes::real());
        let mut object = [null_mut()];
        self.descriptor.alloc_from(ask, &mut object);
        NonNull::new(object[0])
    }

    /// Fills `objects` from its start. Returns how many it filled: fewer than asked only if `alloc`
    /// would fail. Takes a sheaf's objects in one critical section, and the rest under the node's
    /// lock.
    #[doc(alias = "kmem_cache_alloc_bulk")]
    pub fn alloc_bulk(&self, objects: &mut [*mut u8]) -> usize {
        if self.offset == 0 {
            return self.descriptor.alloc_from(self.descriptor.ask(), objects);
        }
        if let [one] = objects {
            *one = self.alloc().map_or(null_mut(), NonNull::as_ptr);
            return usize::from(!one.is_null());
        }
        let mut got = 0;
        while got < objects.len() {
            // SAFETY: each unit has this cache's main sheaf at `offset`. The word is 0 or a stack.
            let popped = unsafe { units().pop_batch(self.offset, &mut objects[got..]) };
            got += popped;
            if got == objects.len() {
                break;
            }
            if objects.len() - got >= self.descriptor.capacity() {
                let ask = self.descriptor.ask();
                let taken = self.descriptor.alloc_from(ask, &mut objects[got..]);
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

    /// Frees objects. Each critical section frees as many as the CPU's sheaf has room for.
    ///
    /// # Safety
    ///
    /// The promises of [`free`](Self::free), for each object.
    #[doc(alias = "kmem_cache_free_bulk")]
    pub unsafe fn free_bulk(&self, objects: &[*mut u8]) {
        if self.offset == 0 {
            // SAFETY: the caller promises that each object is this cache's and unused.
            let free = |&object: &*mut u8| unsafe { self.descriptor.free_checked(object) };
            return objects.iter().for_each(free);
        }
        if let [one] = objects {
            // SAFETY: the caller promises that this is an object of this cache, so it is not null,
            // and that no thread uses it.
            return unsafe { self.free(NonNull::new_unchecked(*one)) };
        }
        let mut given = 0;
        while given < objects.len() {
            // SAFETY: each unit has this cache's main sheaf at `offset`. The caller gives the
            // objects up.
            given += unsafe { units().push_batch(self.offset, &objects[given..]) };
            if let Some(&object) = objects.get(given) {
                // SAFETY: the caller promises that each object is this cache's and unused.
                unsafe { self.descriptor.free_slow(object) };
                given += 1;
            }
        }
    }

    /// Gives all free memory of the cache back to the arena, including objects in CPUs' sheaves.
    /// Returns how many slabs went back. Interrupts each CPU that runs a thread of this process.
    /// Waits for the readers of objects [freed deferred](Self::free_deferred), so a reader must not
    /// call this.
    ///
    /// # Errors
    ///
    /// [`FenceError`], if the kernel cannot fence. The CPUs' sheaves then stay; the rest goes back.
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

    /// Destroys the cache and gives its memory back. Waits for the readers of objects [freed
    /// deferred](Self::free_deferred); so does dropping the cache.
    ///
    /// # Errors
    ///
    /// [`Leak`], if objects are in use or the kernel cannot fence. The error holds the working
    /// cache.
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
        // The end of `self`'s scope calls `drop`, which retires the descriptor.
        Ok(())
    }

    /// Returns how many objects are in use, in sheaves, or waiting for readers. Locks each node.
    pub fn in_use(&self) -> usize {
        let nodes = self.descriptor.nodes().iter();
        nodes.map(|node| node.in_use(self.descriptor)).sum()
    }

    /// Checks the cache's records: each slab's count of free objects, the links of the lists, and
    /// that no object in a barn is also free in its slab. For a debugged cache, also checks the
    /// bytes around its objects, and repairs wrong ones. Takes the nodes' locks.
    ///
    /// # Errors
    ///
    /// [`Inconsistency`]: the first fault, its address, and the number of faults.
    #[doc(alias = "validate_slab_cache")]
    pub fn validate(&self) -> Result<(), Inconsistency> {
        self.validate_with(|_| {})
    }

    /// Checks as [`validate`](Self::validate) does, and reports each of the first sixteen faults of
    /// a debugged cache to `f`.
    ///
    /// # Errors
    ///
    /// [`Inconsistency`]: the first fault, its address, and the number of faults.
    pub fn validate_with(
        &self,
        mut f: impl FnMut(&debug::Report<'_>),
    ) -> Result<(), Inconsistency> {
        let mut nodes = self.descriptor.nodes().iter();
        nodes
            .try_for_each(|node| node.validate(self.descriptor))
            .map_err(|(what, address)| Inconsistency {
                what: debug::Kind::Records(what),
                address,
                errors: 1,
            })?;
        match self.faults(false, &mut f) {
            Some(first) => Err(first),
            None => Ok(()),
        }
    }

    /// Reports the first sixteen objects in use of a debugged cache to `f`, with what the cache
    /// recorded of them. Returns how many objects are in use, or 0 if the cache is not debugged.
    pub fn leaks_with(&self, mut f: impl FnMut(&debug::Report<'_>)) -> usize {
        self.faults(true, &mut f).map_or(0, |first| first.errors)
    }

    fn faults(&self, leaks: bool, f: &mut dyn FnMut(&debug::Report<'_>)) -> Option<Inconsistency> {
        let plan = self.descriptor.plan()?;
        let faults = self.descriptor.faults(plan, leaks);
        for fault in faults.iter() {
            f(&self.descriptor.report(plan, fault));
        }
        let first = faults.iter().next()?;
        Some(Inconsistency {
            what: first.kind,
            address: plan.object_at(first.slot),
            errors: faults.count,
        })
    }

    /// Returns the name that the cache was made with, cut to 32 bytes.
    pub fn name(&self) -> &str {
        self.descriptor.name()
    }

    /// Returns how many bytes of an object its user may write to: at least the size of the layout.
    pub fn object_size(&self) -> usize {
        self.descriptor.room()
    }

    /// Returns the distance in bytes from one object to the next.
    pub fn stride(&self) -> usize {
        self.descriptor.size
    }

    /// Returns the checks that this cache makes.
    pub fn debug_flags(&self) -> DebugFlags {
        self.descriptor
            .plan()
            .map_or(DebugFlags::NONE, |plan| plan.flags)
    }
}

impl Drop for KmemCache {
    /// Destroys the cache. Objects that are still in use keep their memory.
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

/// A cache could not be destroyed.
#[derive(Debug)]
pub struct Leak {
    /// How many objects are not free in a slab. May be 0 if the kernel cannot fence.
    pub objects: usize,
    /// The cache, which still works.
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
            n => {
                let reason = format_args!("{n} objects have not been freed");
                write!(f, "cache {name} cannot be destroyed: {reason}")?;
                let mut written = Ok(());
                self.cache.leaks_with(|report| {
                    if written.is_ok() {
                        written = write!(f, "\n{report}");
                    }
                });
                written
            }
        }
    }
}

impl core::error::Error for Leak {}

/// A fault in a cache's records, or in the bytes around its objects. The cause is a stray write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inconsistency {
    /// The first fault.
    pub what: debug::Kind,
    /// The address of the slab or object.
    pub address: *const u8,
    /// How many faults there are.
    pub errors: usize,
}

impl fmt::Display for Inconsistency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {:p}", self.what, self.address)?;
        match self.errors {
            0 | 1 => Ok(()),
            errors => write!(f, ", the first of {errors} faults"),
        }
    }
}

impl core::error::Error for Inconsistency {}

/// Gives all free memory of all caches back to the system, including objects in CPUs' sheaves.
/// Returns how many bytes went back. Interrupts each CPU that runs a thread of this process.
///
/// # Errors
///
/// [`FenceError`], if the kernel cannot fence. The CPUs' sheaves then stay; the rest is given back.
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
mod reclaim;
