//! Prefilled sheaves: objects that a program allocates in advance, for allocations that must not
//! fail.

use super::bundle::Bundle;
use crate::slab::KmemCache;
use core::fmt;
use core::ptr::NonNull;

/// The system has no memory for the objects that were asked for.
///
/// ```
/// use pinfold::slab::{KmemCache, MemPool, OutOfMemory};
/// use std::alloc::Layout;
///
/// let cache = KmemCache::new("write-out", Layout::new::<[u8; 512]>())?;
/// // A smaller reserve is better than none.
/// let pool = MemPool::new(&cache, 256).or_else(|OutOfMemory| MemPool::new(&cache, 4))?;
/// assert!(pool.wanted() >= 4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory;

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the system has no memory for as many objects; request for fewer, or free some")
    }
}

impl core::error::Error for OutOfMemory {}

/// Objects of a cache that are reserved for one owner: the next [`len`](Self::len) allocations
/// cannot fail, and do not wait.
///
/// For code that must not fail halfway. Before such code begins, it reserves all the objects that
/// it may need. A `Prefilled` may be sent to another thread. When it is dropped, the remaining
/// objects go back to the cache (the kernel's `kmem_cache_return_sheaf`).
///
/// ```
/// use pinfold::slab::KmemCache;
/// use std::alloc::Layout;
///
/// let cache = KmemCache::new("node", Layout::new::<[u64; 4]>())?;
/// let mut nodes = cache.prefill(3).expect("memory");
/// let [left, right] = [(); 2].map(|()| nodes.alloc().expect("prefilled"));
/// assert_eq!(nodes.len(), 1);
/// nodes.refill(8).expect("memory");
/// assert_eq!(nodes.len(), 8);
/// drop(nodes);
/// // SAFETY: both came from this cache and are not used afterwards.
/// unsafe { cache.free_bulk(&[left.as_ptr(), right.as_ptr()]) };
/// cache.destroy().expect("every object came back");
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
pub struct Prefilled<'c> {
    cache: &'c KmemCache,
    objects: Bundle,
}

impl KmemCache {
    /// Reserves `n` objects for allocations that must not fail. `n` may be any number.
    ///
    /// Costs as much as [`alloc_bulk`](Self::alloc_bulk), and a block of 1 KiB for each 125
    /// objects.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`] when the system has no memory for all of them. The cache then keeps all its
    /// objects.
    #[doc(alias = "kmem_cache_prefill_sheaf")]
    pub fn prefill(&self, n: usize) -> Result<Prefilled<'_>, OutOfMemory> {
        let mut prefilled = Prefilled {
            cache: self,
            objects: Bundle::new(),
        };
        prefilled.refill(n)?;
        Ok(prefilled)
    }
}

impl<'c> Prefilled<'c> {
    /// Returns the cache that the objects come from.
    pub fn cache(&self) -> &'c KmemCache {
        self.cache
    }

    /// Takes an object. Returns `None` only if [`len`](Self::len) is 0.
    ///
    /// The object is uninitialised if the cache has no constructor. Costs about ten instructions:
    /// no lock, no system call, no critical section.
    ///
    /// The caller frees the object by [`KmemCache::free`].
    #[doc(alias = "kmem_cache_alloc_from_sheaf")]
    #[inline]
    pub fn alloc(&mut self) -> Option<NonNull<u8>> {
        self.objects.pop()
    }

    /// Returns how many allocations cannot fail.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Returns whether no object is left.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reserves more objects until at least `n` allocations cannot fail.
    ///
    /// Costs as much as [`KmemCache::prefill`] of the missing objects, and nothing if none is
    /// missing.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`] when the system has no memory for all of them. The objects that were
    /// reserved before the call stay reserved, and so do the objects that the call could allocate.
    #[doc(alias = "kmem_cache_refill_sheaf")]
    pub fn refill(&mut self, n: usize) -> Result<(), OutOfMemory> {
        match self.objects.fill(self.cache, n) {
            true => Ok(()),
            false => Err(OutOfMemory),
        }
    }
}

impl Drop for Prefilled<'_> {
    fn drop(&mut self) {
        // SAFETY: the bundle's objects came from this cache, and `alloc` has not given them out.
        unsafe { self.objects.give_back(self.cache) };
    }
}

impl fmt::Debug for Prefilled<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefilled")
            .field("cache", &self.cache.name())
            .field("len", &self.len())
            .finish()
    }
}
