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
        // The alignment that an object of this size can want, at most malloc's.
        let align = 1 << size.trailing_zeros().min(4);
        let layout = Layout::from_size_align(size, align)?;
        KmemCache::new(&format!("bench-{size}"), layout)
            .map(PinfoldCache)
            .with_context(|| format!("no cache for {size} bytes"))
    }

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
