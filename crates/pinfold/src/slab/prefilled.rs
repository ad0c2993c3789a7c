//! Prefilled sheaves: a number of objects that is certain.

use super::KmemCache;
use super::bundle::Bundle;
use core::fmt;
use core::ptr::NonNull;

/// The system has no memory for the objects that were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory;

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the system has no memory for as many objects; ask for fewer, or free some")
    }
}

impl core::error::Error for OutOfMemory {}

/// Objects of a cache, set apart for one owner: the next [`len`](Self::len) allocations cannot fail, and wait for nothing.
///
/// For a section that must not fail halfway: what it will need at most is fetched before it begins. It may be sent to another
/// thread. What is left goes back to the cache when it is dropped (the kernel's `kmem_cache_return_sheaf`).
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
    /// Sets `n` objects apart, any number, for allocations that must not fail.
    ///
    /// Costs as [`alloc_bulk`](Self::alloc_bulk) does, and a block of 1 KiB for each 125 objects.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`]; nothing is kept then.
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
    /// The cache that they came from.
    pub fn cache(&self) -> &'c KmemCache {
        self.cache
    }

    /// An object, uninitialised unless the cache has a constructor; `None` only when [`len`](Self::len) is 0. Some ten instructions:
    /// no lock, no system call, no critical section.
    ///
    /// Give it back by [`KmemCache::free`].
    #[doc(alias = "kmem_cache_alloc_from_sheaf")]
    #[inline]
    pub fn alloc(&mut self) -> Option<NonNull<u8>> {
        self.objects.pop()
    }

    /// How many allocations are certain.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fetches what is missing for `n` certain allocations. Costs as [`KmemCache::prefill`] for as many as are missing; nothing when
    /// there are `n` already.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`]; there are as many objects then as before, or more.
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
        // SAFETY: they came from this cache, and nobody else has had them.
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
