//! Operations on a whole cache: giving its memory back, checking it, and destroying it.

use super::kmem_cache::KmemCache;
use crate::slab::checks::debug::{Kind, Report};
use core::fmt;
use pinfold_rseq::FenceError;

impl KmemCache {
    /// Gives all free memory of the cache back to the arena, including objects in CPUs' sheaves.
    /// Returns how many slabs went back. Interrupts each CPU that runs a thread of this process.
    /// Waits for the readers of objects [freed deferred](Self::free_deferred), so a reader must not
    /// call this.
    ///
    /// # Errors
    ///
    /// [`FenceError`], if the CPUs cannot be fenced. They then keep their sheaves. The rest of
    /// the free memory goes back.
    #[doc(alias = "kmem_cache_shrink")]
    pub fn shrink(&self) -> Result<usize, FenceError> {
        let drained = self.descriptor.drain();
        let released = self.release();
        drained.map(|()| released)
    }

    fn release(&self) -> usize {
        // Reports what was written to freed objects, before their slabs go back.
        self.descriptor.tell_faults();
        self.descriptor.shrink()
    }

    /// Destroys the cache and gives its memory back. Waits for the readers of objects [freed
    /// deferred](Self::free_deferred); so does dropping the cache.
    ///
    /// # Errors
    ///
    /// [`Leak`], if objects are in use or the CPUs cannot be fenced ([`FenceError`]). The error
    /// holds the cache, which still works.
    #[doc(alias = "kmem_cache_destroy")]
    pub fn destroy(self) -> Result<(), Leak> {
        let drained = self.descriptor.drain();
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
    ///
    /// ```
    /// use pinfold::slab::KmemCache;
    /// use std::alloc::Layout;
    ///
    /// let cache = KmemCache::new("job", Layout::new::<[u64; 4]>())?;
    /// let job = cache.alloc().expect("memory");
    /// cache.shrink()?; // Empties the sheaves.
    /// assert_eq!(cache.in_use(), 1);
    /// # // SAFETY: the object came from this cache and is not used afterwards.
    /// # unsafe { cache.free(job) };
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn in_use(&self) -> usize {
        let parts = self.descriptor.parts();
        parts.map(|part| part.in_use(self.descriptor)).sum()
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

    /// Checks as [`validate`](Self::validate) does, and calls `f` with a report of each of the
    /// first sixteen faults of a debugged cache.
    ///
    /// # Errors
    ///
    /// [`Inconsistency`]: the first fault, its address, and the number of faults.
    pub fn validate_with(&self, mut f: impl FnMut(&Report<'_>)) -> Result<(), Inconsistency> {
        let mut parts = self.descriptor.parts();
        parts
            .try_for_each(|node| node.validate(self.descriptor))
            .map_err(|(what, address)| Inconsistency {
                what: Kind::Records(what),
                address,
                errors: 1,
            })?;
        match self.faults(false, &mut f) {
            Some(first) => Err(first),
            None => Ok(()),
        }
    }

    /// Calls `f` with a report of each of the first sixteen objects in use of a debugged cache.
    /// Returns how many objects are in use, or 0 if the cache is not debugged.
    pub fn leaks_with(&self, mut f: impl FnMut(&Report<'_>)) -> usize {
        self.faults(true, &mut f).map_or(0, |first| first.errors)
    }

    fn faults(&self, leaks: bool, f: &mut dyn FnMut(&Report<'_>)) -> Option<Inconsistency> {
        let slot_layout = self.descriptor.slot_layout.as_ref()?;
        let faults = self.descriptor.faults(slot_layout, leaks);
        for fault in faults.iter() {
            f(&self.descriptor.report(slot_layout, fault));
        }
        let first = faults.iter().next()?;
        Some(Inconsistency {
            what: first.kind,
            address: slot_layout.object_at(first.slot),
            errors: faults.count,
        })
    }
}

impl Drop for KmemCache {
    /// Destroys the cache. Objects that are still in use keep their memory.
    fn drop(&mut self) {
        let drained = self.descriptor.drain();
        self.release();
        if drained.is_ok() && self.descriptor.is_bare() {
            self.descriptor.retire();
        }
    }
}

/// A cache could not be destroyed.
///
/// ```
/// use pinfold::slab::KmemCache;
/// use std::alloc::Layout;
///
/// let cache = KmemCache::new("job", Layout::new::<[u64; 4]>())?;
/// let job = cache.alloc().expect("memory");
/// let leak = cache.destroy().unwrap_err();
/// assert_eq!(leak.objects, 1);
/// // SAFETY: the object came from this cache and is not used afterwards.
/// unsafe { leak.cache.free(job) };
/// leak.cache.destroy().expect("every object came back");
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Leak {
    /// How many objects are not free in a slab. May be 0 if the CPUs cannot be fenced.
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
                "cache {name} cannot be destroyed: CPUs keep their sheaves, because they cannot be fenced"
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
///
/// ```
/// use pinfold::slab::KmemCache;
/// use std::alloc::Layout;
///
/// let cache = KmemCache::new("job", Layout::new::<[u64; 4]>())?;
/// if let Err(fault) = cache.validate() {
///     eprintln!("cache {}: {} at {:p}", cache.name(), fault.what, fault.address);
///     std::process::abort();
/// }
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inconsistency {
    /// The first fault.
    pub what: Kind,
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
