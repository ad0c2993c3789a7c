//! A few objects in an array. The array needs no allocator, so that code with a `Batch` also works
//! in signal handlers.

use pinfold::slab::KmemCache;
use std::ptr::null_mut;

/// Up to [`MOST`](Self::MOST) free objects of one cache.
pub struct Batch {
    objects: [*mut u8; Batch::MOST],
    len: usize,
}

impl Batch {
    /// More than twice the most that one of the caches' own arrays holds.
    pub const MOST: usize = 256;

    pub fn new() -> Batch {
        Batch {
            objects: [null_mut(); Batch::MOST],
            len: 0,
        }
    }

    /// Allocates `count` objects, or fewer if the system has no memory.
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

    /// Adds an object. Panics if the batch is full.
    #[inline(always)]
    pub fn push(&mut self, object: *mut u8) {
        self.objects[self.len] = object;
        self.len += 1;
    }

    /// Frees all objects to `cache`.
    ///
    /// # Safety
    ///
    /// The objects are `cache`'s, and no other code uses or frees them.
    pub unsafe fn give_back(&mut self, cache: &KmemCache) {
        // SAFETY: the caller promises that these are `cache`'s objects and that this call is their
        // only free. `len` becomes 0, so the batch does not free them again.
        unsafe { cache.free_bulk(self.as_slice()) };
        self.len = 0;
    }
}
