//! Some objects, in an array that needs no allocator: what uses it also works in signal handlers.

use pinfold::slab::KmemCache;
use std::ptr::null_mut;

/// Up to [`MOST`](Self::MOST) free objects of a cache.
pub struct Batch {
    objects: [*mut u8; Batch::MOST],
    len: usize,
}

impl Batch {
    /// More than twice what one of the caches' own arrays holds at most.
    pub const MOST: usize = 256;

    pub fn new() -> Batch {
        Batch {
            objects: [null_mut(); Batch::MOST],
            len: 0,
        }
    }

    /// `count` new objects; fewer when the system has no memory.
    pub fn take(cache: &KmemCache, count: usize) -> Batch {
        let mut batch = Batch::new();
        batch.len = cache.alloc_bulk(&mut batch.objects[..count]);
        batch
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn as_slice(&self) -> &[*mut u8] {
        &self.objects[..self.len]
    }

    #[inline(always)]
    pub fn pop(&mut self) -> *mut u8 {
        match self.len.checked_sub(1) {
            Some(len) => {
                self.len = len;
                self.objects[len]
            }
            None => null_mut(),
        }
    }

    /// There must be room.
    #[inline(always)]
    pub fn push(&mut self, object: *mut u8) {
        self.objects[self.len] = object;
        self.len += 1;
    }

    /// Gives the objects back.
    ///
    /// # Safety
    ///
    /// They are `cache`'s, and nobody else has them.
    pub unsafe fn give_back(&mut self, cache: &KmemCache) {
        // SAFETY: the caller's promise.
        unsafe { cache.free_bulk(self.as_slice()) };
        self.len = 0;
    }
}
