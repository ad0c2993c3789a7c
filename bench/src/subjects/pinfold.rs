//! Pinfold's object cache, inlined into the loop, as a Rust program uses it.

use super::Subject;
use anyhow::{Context, Result};
use core::alloc::Layout;
use core::ptr::{NonNull, null_mut};
use pinfold::slab::KmemCache;

/// A cache for objects of one size.
pub struct PinfoldCache(KmemCache);

impl Subject for PinfoldCache {
    fn new(size: usize) -> Result<Self> {
        // The strictest alignment that an object of this size can require, but at most malloc's.
        let align = 1 << size.trailing_zeros().min(4);
        let layout = Layout::from_size_align(size, align)?;
        KmemCache::new(&format!("bench-{size}"), layout)
            .map(PinfoldCache)
            .with_context(|| format!("making an object cache for {size} bytes"))
    }

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
