//! The common path alone, without the slow path behind it. For a caller whose own fast path must
//! contain no call, only a jump to its slow path.

use super::KmemCache;
use super::percpu::units;
use core::ptr::NonNull;

impl KmemCache {
    /// Allocates an object from the CPU's main sheaf. Returns `None` if there is no main sheaf, or
    /// an empty one, and always on the atomic backend. The caller then calls
    /// [`alloc`](Self::alloc). Costs one critical section.
    #[inline(always)]
    pub fn alloc_fast(&self) -> Option<NonNull<u8>> {
        if self.offset == 0 {
            return None;
        }
        // SAFETY: each unit has this cache's main sheaf at `offset`. The word is 0 or a stack.
        NonNull::new(unsafe { units().pop_fast(self.offset) })
    }

    /// Frees an object to the CPU's main sheaf. Returns false and does nothing if there is no main
    /// sheaf, or a full one, and always on the atomic backend. The caller then calls
    /// [`free`](Self::free). Costs one critical section.
    ///
    /// # Safety
    ///
    /// The object came from this cache, and no thread uses it any more. If the cache has a
    /// constructor, the object is in the constructed state, or in the state that the cache's users
    /// agreed on.
    #[inline(always)]
    pub unsafe fn free_fast(&self, object: NonNull<u8>) -> bool {
        // SAFETY: each unit has this cache's main sheaf at `offset`. The caller gives `object` up.
        self.offset != 0 && unsafe { units().push_fast(self.offset, object.as_ptr()) }
    }
}
