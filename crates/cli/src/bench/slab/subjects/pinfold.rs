//! Pinfold's object cache and Pinfold's malloc.

use super::Subject;
use pinfold::slab::KmemCache;
use pinfold_malloc::c::{pinfold_free, pinfold_malloc};
use std::ptr::{NonNull, null_mut};

/// `pinfold-cache` and `rseq`: a cache, inlined into the loop as in a Rust program.
pub struct Inlined(pub KmemCache);

impl Subject for Inlined {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        self.0.alloc().map_or(null_mut(), NonNull::as_ptr)
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        // SAFETY: the caller promises that the object came from this cache and is unused. An object
        // of a cache is never null.
        unsafe { self.0.free(NonNull::new_unchecked(object)) };
    }
}

/// `pinfold-malloc`: the functions of the C library. The free has to look the size up.
pub struct Malloc {
    pub size: usize,
}

impl Subject for Malloc {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        pinfold_malloc(self.size).cast()
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        // SAFETY: the caller promises that `object` came from `pinfold_malloc` and is unused.
        unsafe { pinfold_free(object.cast()) };
    }
}
