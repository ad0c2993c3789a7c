//! Caches of objects of one layout, by address: the untyped interface, below the typed ones.

use super::builder::Builder;
use super::descriptor::{CacheError, Descriptor};
use crate::arena::NodeRequest;
use crate::cache_units::{DEFERRED, MAIN};
use crate::fork;
use crate::nodes;
use crate::sanitizer;
use crate::slab::checks::debug::DebugFlags;
use crate::slab::cpu::place::Place;
use core::alloc::Layout;
use core::fmt;
use core::ptr::{NonNull, null_mut};
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
    /// Each CPU's main sheaf. `None` for a cache that checks, or whose objects are in heap
    /// profiles.
    main: Option<Place>,
    /// Lives until this value is dropped: another cache may get the descriptor then.
    pub(crate) descriptor: &'static Descriptor,
}

impl KmemCache {
    /// Makes a cache. `name` is cut to 32 bytes. Make one cache for each kind of object, and keep
    /// it. Destroying a cache leaves its descriptor to a later cache.
    ///
    /// # Errors
    ///
    /// [`CacheError`], if the layout is too large, there are too many caches, or the system has no
    /// memory.
    ///
    /// # Examples
    ///
    /// Each object has the layout's alignment, here that of a cache line:
    ///
    /// ```
    /// use pinfold::slab::KmemCache;
    /// use std::alloc::Layout;
    ///
    /// let cache = KmemCache::new("request", Layout::new::<[u8; 40]>().align_to(64)?)?;
    /// assert_eq!(cache.stride() % 64, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(alias = "kmem_cache_create")]
    pub fn new(name: &str, layout: Layout) -> Result<KmemCache, CacheError> {
        Self::builder(name, layout).build()
    }

    /// Returns a builder for a cache with settings of its own.
    ///
    /// Settings can be a constant that several caches share:
    ///
    /// ```
    /// use pinfold::slab::{Builder, KmemCache};
    /// use std::alloc::Layout;
    ///
    /// const SESSIONS: Builder<'_> =
    ///     KmemCache::builder("session", Layout::new::<[u64; 64]>()).sheaf_capacity(16);
    /// let (clients, servers) = (SESSIONS.build()?, SESSIONS.build()?);
    /// assert_eq!(clients.stride(), servers.stride());
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    pub const fn builder(name: &str, layout: Layout) -> Builder<'_> {
        Builder::new(name, layout)
    }

    pub(crate) fn of(descriptor: &'static Descriptor) -> KmemCache {
        let is_slow = descriptor.checks() || descriptor.is_watched();
        let main = (!is_slow).then(|| descriptor.place(MAIN));
        KmemCache { main, descriptor }
    }

    /// Allocates an object, uninitialised unless the cache has a constructor. Returns `None` if the
    /// system has no memory. May return `None` in a signal handler that interrupted a slow path.
    ///
    /// Costs one critical section. If both sheaves are empty, costs a lock and perhaps a system
    /// call.
    #[doc(alias = "kmem_cache_alloc")]
    #[inline(always)]
    pub fn alloc(&self) -> Option<NonNull<u8>> {
        let Some(main) = self.main else {
            return NonNull::new(self.descriptor.alloc_watched());
        };
        let object = main.pop_fast();
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
        let Some(main) = self.main else {
            // SAFETY: the caller promises that the object is this cache's and unused.
            return unsafe { self.descriptor.free_watched(object.as_ptr()) };
        };
        // SAFETY: the caller passes ownership of `object`.
        if !unsafe { main.push_fast(object.as_ptr()) } {
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
        let request = NodeRequest::only(node % nodes::real());
        let mut object = [null_mut()];
        self.descriptor.alloc_from(request, &mut object);
        self.descriptor.sample(&object);
        NonNull::new(object[0])
    }

    /// Fills `objects` from its start. Returns how many objects it allocated. Leaves a part of
    /// `objects` unfilled only if `alloc` would fail. Takes a sheaf's objects in one critical
    /// section, and the rest under the node's lock.
    #[doc(alias = "kmem_cache_alloc_bulk")]
    pub fn alloc_bulk(&self, objects: &mut [*mut u8]) -> usize {
        let Some(main) = self.main else {
            let request = self.descriptor.request();
            let got = self.descriptor.alloc_from(request, objects);
            self.descriptor.sample(&objects[..got]);
            return got;
        };
        if let [one] = objects {
            *one = self.alloc().map_or(null_mut(), NonNull::as_ptr);
            return usize::from(!one.is_null());
        }
        let mut got = 0;
        while got < objects.len() {
            got += main.pop_batch(&mut objects[got..]);
            if got == objects.len() {
                break;
            }
            if objects.len() - got >= self.descriptor.capacity() {
                let request = self.descriptor.request();
                let taken = self.descriptor.alloc_from(request, &mut objects[got..]);
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
    /// The same as for [`free`](Self::free), for each object.
    #[doc(alias = "kmem_cache_free_bulk")]
    pub unsafe fn free_bulk(&self, objects: &[*mut u8]) {
        let Some(main) = self.main else {
            // SAFETY: the caller promises that each object is this cache's and unused.
            let free = |&object: &*mut u8| unsafe { self.descriptor.free_watched(object) };
            return objects.iter().for_each(free);
        };
        if let [one] = objects {
            // SAFETY: the caller promises that this is an object of this cache, so it is not null,
            // and that no thread uses it.
            return unsafe { self.free(NonNull::new_unchecked(*one)) };
        }
        let mut given = 0;
        while given < objects.len() {
            // SAFETY: the caller passes ownership of the objects.
            given += unsafe { main.push_batch(&objects[given..]) };
            if let Some(&object) = objects.get(given) {
                // SAFETY: the caller promises that each object is this cache's and unused.
                unsafe { self.descriptor.free_slow(object) };
                given += 1;
            }
        }
    }

    /// Allocates an object from the CPU's main sheaf. Returns `None` if the CPU has no main sheaf,
    /// or if it is empty. Always returns `None` on the atomic backend. The caller then calls
    /// [`alloc`](Self::alloc). Costs one critical section.
    #[inline(always)]
    pub fn alloc_fast(&self) -> Option<NonNull<u8>> {
        NonNull::new(self.main?.pop_fast())
    }

    /// Frees an object to the CPU's main sheaf. Returns false and does nothing if the CPU has no
    /// main sheaf, if it is full, and always on the atomic backend. The caller then calls
    /// [`free`](Self::free). Costs one critical section.
    ///
    /// # Safety
    ///
    /// The object came from this cache, and no thread uses it any more. If the cache has a
    /// constructor, the object is in the constructed state, or in the state that the cache's users
    /// agreed on.
    #[inline(always)]
    pub unsafe fn free_fast(&self, object: NonNull<u8>) -> bool {
        // SAFETY: the caller passes ownership of `object`.
        self.main
            .is_some_and(|main| unsafe { main.push_fast(object.as_ptr()) })
    }

    /// Allocates an object from the memory of node `node` only. Returns `None` if that node has no
    /// free memory or does not exist. Nodes are numbered as in [`Zone`](crate::vmstat::Zone).
    ///
    /// Bypasses the CPU's sheaves, and takes the node's lock.
    ///
    /// ```
    /// use pinfold::slab::KmemCache;
    /// use std::alloc::Layout;
    ///
    /// let cache = KmemCache::new("near", Layout::new::<[u64; 8]>())?;
    /// let object = cache.alloc_node_exact(0).expect("memory on the first node");
    /// assert!(cache.alloc_node_exact(1000).is_none());
    /// // SAFETY: the object came from this cache and is not used afterwards.
    /// unsafe { cache.free(object) };
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[doc(alias = "__GFP_THISNODE")]
    pub fn alloc_node_exact(&self, node: usize) -> Option<NonNull<u8>> {
        if node >= nodes::real() {
            return None;
        }
        fork::retry(|| self.alloc_as(NodeRequest::only(node)))
    }

    /// Allocates an object from the slabs of the node that `request` names, and of no other node.
    pub(crate) fn alloc_as(&self, request: NodeRequest) -> Option<NonNull<u8>> {
        let mut object = [null_mut()];
        self.descriptor.alloc_only_from(request, &mut object);
        self.descriptor.sample(&object);
        NonNull::new(object[0])
    }

    /// Frees an object once every [reader](crate::slab::grace::enter) that is inside now has left.
    ///
    /// Before the call, the caller takes the object out of sight, so that a reader that enters from
    /// now on cannot find it.
    ///
    /// Costs as much as [`free`](Self::free), and a fence for every few hundred objects. Usually
    /// does not wait, so that readers and signal handlers may call this function. There is one
    /// exception. If the system has no memory for a sheaf, the call checks a hundred
    /// times, for about 20 ms in all, whether the readers have left. If they stay, the object is
    /// lost, and [`statistics`](Self::statistics) counts the loss.
    ///
    /// A debugged or hardened cache checks the object when it becomes free. That may happen in
    /// another thread, and a report then names that thread.
    ///
    /// Later deferred frees, slow paths and the shepherd free the waiting objects.
    ///
    /// # Safety
    ///
    /// The object came from this cache, and the caller frees it only once. Only readers that
    /// entered before the call still use it.
    #[doc(alias = "kfree_rcu")]
    #[inline]
    pub unsafe fn free_deferred(&self, object: NonNull<u8>) {
        // Another thread may free the object later. ThreadSanitizer does not see how it gets there.
        if sanitizer::orders_accesses() {
            sanitizer::release(object.as_ptr());
        }
        // SAFETY: the caller passes ownership of the object.
        if !unsafe { self.descriptor.place(DEFERRED).push(object.as_ptr()) } {
            // SAFETY: the caller promises that the object is of this cache and out of sight, and
            // gives it up.
            unsafe { self.descriptor.defer_slow(object.as_ptr()) };
        }
    }

    /// Waits until every object that was deferred to this cache before the call is free.
    ///
    /// Does nothing if no object was ever deferred to this cache. Otherwise waits until the readers
    /// that are inside now have left. Interrupts each CPU that runs a thread of this process a few
    /// times. While readers stay, interrupts these CPUs up to about a thousand times a second. A
    /// reader must not call this, because it would wait for itself. A signal handler must not call
    /// this either.
    ///
    /// # Errors
    ///
    /// [`FenceError`] when the kernel cannot fence. The objects then keep waiting.
    #[doc(alias = "kvfree_rcu_barrier")]
    pub fn flush_deferred(&self) -> Result<(), FenceError> {
        if !self.descriptor.deferred.is_used() {
            return Ok(());
        }
        self.descriptor.drain()
    }

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
        self.descriptor.sheaves.set(objects);
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
        self.descriptor.geometry.size
    }

    /// Returns the checks that this cache makes.
    pub fn debug_flags(&self) -> DebugFlags {
        self.descriptor.debug_flags()
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
