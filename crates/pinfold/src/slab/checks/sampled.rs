//! Caches whose objects are in heap profiles, and all caches in a process with ThreadSanitizer.
//!
//! The handle of such a cache has no offset of a main sheaf, like the handle of a cache that
//! checks. So each call takes a slow path, which asks the profile and tells the sanitizer. The fast
//! paths of other caches have no instruction for this.

use crate::profile::{self, StandIn};
use crate::slab::cache::descriptor::Descriptor;
use crate::{sanitizer, sys};

impl Descriptor {
    /// Returns whether each object's allocation and free has an observer.
    pub(crate) fn is_watched(&self) -> bool {
        self.is_profiled || sanitizer::orders_accesses()
    }

    /// Allocates an object from a cache whose handle has no offset. Returns null when the system
    /// has no memory.
    #[cold]
    #[inline(never)]
    pub(crate) fn alloc_watched(&self) -> *mut u8 {
        profile::keep_frame();
        let object = self.alloc_slow();
        self.sample(&[object]);
        object
    }

    /// Frees an object to a cache whose handle has no offset.
    ///
    /// # Safety
    ///
    /// `object` came from this cache, and no thread uses it any more. A cache that checks reports
    /// any other address.
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn free_watched(&self, object: *mut u8) {
        profile::keep_frame();
        self.forget_samples(&[object]);
        // SAFETY: the caller passes ownership of the object.
        unsafe { self.free_slow(object) };
    }

    /// Counts objects that were just allocated, and samples those that are due. Null stands for no
    /// object.
    pub(crate) fn sample(&self, objects: &[*mut u8]) {
        if sanitizer::orders_accesses() {
            let objects = objects.iter().filter(|object| !object.is_null());
            objects.for_each(|&object| sanitizer::acquire(object));
        }
        if !self.is_profiled || !profile::takes_samples() {
            return;
        }
        let from = profile::here();
        for &object in objects {
            if object.is_null() {
                continue;
            }
            if let Some(mean) = profile::due(self.object) {
                sys::keep_errno(|| {
                    profile::allocated(object, self.object, mean, StandIn::NONE, from)
                });
            }
        }
    }

    /// Tells the profile that objects are free from now on. The caller still owns them.
    pub(crate) fn forget_samples(&self, objects: &[*mut u8]) {
        if sanitizer::orders_accesses() {
            objects
                .iter()
                .for_each(|&object| sanitizer::release(object));
        }
        if self.is_profiled && profile::has_samples() {
            let from = profile::here();
            objects
                .iter()
                .for_each(|&object| _ = profile::freed(object, from));
        }
    }
}
