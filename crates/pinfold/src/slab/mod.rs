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
    /// Where in the units the main sheaf has its word; 0 for caches that check, which have none.
    offset: usize,
    descriptor: &'static Descriptor,
}

impl KmemCache {
    /// Makes a cache. An empty cache holds a descriptor of some hundred bytes and no objects. `name` is kept up to 32
    /// bytes.
    ///
    /// A cache is for a kind of objects, and made once: its descriptor stays when it is destroyed, as somebody may still
    /// [look](caches) at it.
    ///
    /// # Errors
    ///
    /// [`CacheError`]: the layout is too large, there are too many caches, or the system has no memory.
    #[doc(alias = "kmem_cache_create")]
    pub fn new(name: &str, layout: Layout) -> Result<KmemCache, CacheError> {
        Self::builder(name, layout).build()
    }

    /// Makes a cache with settings of its own.
    pub const fn builder(name: &str, layout: Layout) -> Builder<'_> {
        Builder::new(name, layout)
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
        // SAFETY: the caller's promise.
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

    /// An object, uninitialised unless there is a constructor; `None` when the system has no memory, or in a signal handler that
    /// interrupted a slow path of its own thread.
    ///
    /// Costs one critical section on the common path. Else, once in a sheaf, an exchange under the node's lock; and
    /// a system call when the arena has to grow.
    #[doc(alias = "kmem_cache_alloc")]
    #[inline(always)]
    pub fn alloc(&self) -> Option<NonNull<u8>> {
        if self.offset == 0 {
            return NonNull::new(self.descriptor.alloc_checked());
        }
        // SAFETY: the offset is the cache's place in the units.
        let object = unsafe { units().pop_fast(self.offset) };
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
    /// The object came from this cache, and nobody uses it any more. If the cache has a constructor, the object is as that makes it,
    /// or as the cache's users agreed to leave it.
    #[doc(alias = "kmem_cache_free")]
    #[inline(always)]
    pub unsafe fn free(&self, object: NonNull<u8>) {
        if self.offset == 0 {
            // SAFETY: the caller's promise.
            return unsafe { self.descriptor.free_checked(object.as_ptr()) };
        }
        // SAFETY: the offset is the cache's place in the units; the object is given up.
        if !unsafe { units().push_fast(self.offset, object.as_ptr()) } {
            // SAFETY: the caller's promise.
            unsafe { self.descriptor.free_slow(object.as_ptr()) };
        }
    }

    /// An object of node `node`'s memory, or of another with memory, which [`statistics`](Self::statistics) count; past the CPU's sheaves, under the node's lock.
    /// Nodes are numbered as in [`Zone`](crate::vmstat::Zone); after the last node's number, they
    /// begin again at 0.
    #[doc(alias = "kmem_cache_alloc_node")]
    pub fn alloc_node(&self, node: usize) -> Option<NonNull<u8>> {
        let ask = Ask::only(node % nodes::real());
        let mut object = [null_mut()];
        self.descriptor.alloc_from(ask, &mut object);
        NonNull::new(object[0])
    }

    /// Fills `objects` from its start; returns how many, fewer only when the system has no memory. One critical
    /// section for as many as the sheaf holds; what the sheaves do not have comes from the slabs in one go.
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
            // SAFETY: the offset is the cache's place in the units.
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

    /// Takes objects back, many in one critical section.
    ///
    /// # Safety
    ///
    /// As for [`free`](Self::free), for each of them.
    #[doc(alias = "kmem_cache_free_bulk")]
    pub unsafe fn free_bulk(&self, objects: &[*mut u8]) {
        if self.offset == 0 {
            // SAFETY: the caller's promise.
            let free = |&object: &*mut u8| unsafe { self.descriptor.free_checked(object) };
            return objects.iter().for_each(free);
        }
        if let [one] = objects {
            // SAFETY: the caller's promise: an object's address is not null.
            return unsafe { self.free(NonNull::new_unchecked(*one)) };
        }
        let mut given = 0;
        while given < objects.len() {
            // SAFETY: the offset is the cache's place in the units; the objects are given up.
            given += unsafe { units().push_batch(self.offset, &objects[given..]) };
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
    /// in its slab; of a debugged cache every byte around its objects too, and what is wrong there is put right. Takes the nodes' locks.
    ///
    /// # Errors
    ///
    /// How many faults there are, and what and where the first is.
    #[doc(alias = "validate_slab_cache")]
    pub fn validate(&self) -> Result<(), Inconsistency> {
        self.validate_with(|_| {})
    }

    /// As [`validate`](Self::validate), and hands the first sixteen faults of a debugged cache to `f`, in full.
    ///
    /// # Errors
    ///
    /// As there.
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

    /// Hands the first sixteen objects in use to `f`, with who allocated them; of a debugged cache only, others do not know. Returns how
    /// many there are.
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

    /// The name it was made with.
    pub fn name(&self) -> &str {
        self.descriptor.name()
    }

    /// Bytes of an object that its user may write to: at least those of the layout.
    pub fn object_size(&self) -> usize {
        self.descriptor.room()
    }

    /// Bytes from one object to the next.
    pub fn stride(&self) -> usize {
        self.descriptor.size
    }

    /// The checks that this cache makes.
    pub fn debug_flags(&self) -> DebugFlags {
        self.descriptor
            .plan()
            .map_or(DebugFlags::NONE, |plan| plan.flags)
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
            n => {
                write!(
                    f,
                    "cache {name} cannot be destroyed: {n} objects have not been freed"
                )?;
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

/// A cache's records contradict each other, or bytes around its objects are wrong: somebody wrote where they should not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inconsistency {
    /// The first fault.
    pub what: debug::Kind,
    /// The slab or object.
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
mod reclaim;
