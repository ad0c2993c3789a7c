//! The common path alone, for callers whose own fast path shall contain no call but the jump to their slow one.

use super::KmemCache;
use super::percpu::units;
use core::ptr::NonNull;

impl KmemCache {
    /// As [`alloc`](Self::alloc), but `None` also when the common path cannot serve it: for a caller that goes on with `alloc`
    /// then.
    #[inline(always)]
    pub fn alloc_fast(&self) -> Option<NonNull<u8>> {
        if self.offset == 0 {
            return None;
        }
        // SAFETY: the offset is the cache's place in the units.
        NonNull::new(unsafe { units().pop_fast(self.offset) })
    }

    /// As [`free`](Self::free), but false, and nothing done, when the common path cannot serve it: for a caller that goes on with
    /// `free` then.
    ///
    /// # Safety
    ///
    /// As there.
    #[inline(always)]
    pub unsafe fn free_fast(&self, object: NonNull<u8>) -> bool {
        // SAFETY: the offset is the cache's place in the units; the object is given up.
        self.offset != 0 && unsafe { units().push_fast(self.offset, object.as_ptr()) }
    }
}
