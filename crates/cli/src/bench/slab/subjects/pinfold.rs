//! Pinfold's object cache, and its malloc.

use super::Subject;
use pinfold::slab::KmemCache;
use pinfold_malloc::c::{pinfold_free, pinfold_malloc};
use std::ptr::{NonNull, null_mut};

/// `pinfold-cache` and `rseq`: a cache, inlined into the loop as a Rust program has it.
pub struct Inlined(pub KmemCache);

impl Subject for Inlined {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        self.0.alloc().map_or(null_mut(), NonNull::as_ptr)
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        // SAFETY: the caller's promise: an object of this cache, hence not null.
        unsafe { self.0.free(NonNull::new_unchecked(object)) };
    }
}

/// `pinfold-malloc`: the C library's functions, of which the second has to find out the size.
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
        // SAFETY: the caller's promise.
        unsafe { pinfold_free(object.cast()) };
    }
}
