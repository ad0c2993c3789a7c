//! Arrays of free objects, in the form of Pinfold's own sheaves: the address of the next free slot
//! is all that a CPU or a depot holds of one.
//!
//! ```text
//!  slot 0 … 126-k    127-k    128-k … 127
//! ┌───────────────┬────────┬──────────────────┐
//! │    unused     │  null  │  k objects' room │
//! └───────────────┴────────┴──────────────────┘
//! ```
//!
//! k is the capacity. A sheaf is full if its address is a multiple of the block's size, and empty
//! if the slot below its address is null.

use pinfold::slab::KmemCache;
use pinfold_rseq::STACK_ALIGN;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

/// The most objects of a sheaf: all slots but one.
pub const MOST: usize = STACK_ALIGN / 8 - 1;

/// A sheaf that belongs to whatever holds this value.
pub struct Sheaf {
    /// The address of the next free slot.
    top: *mut *mut u8,
}

// SAFETY: a sheaf owns its block and the free objects in it, and none of them belongs to a thread.
unsafe impl Send for Sheaf {}

/// Owns the memory of sheaves.
pub struct Blocks {
    start: *mut *mut u8,
    count: usize,
}

// SAFETY: only `drop` uses the address.
unsafe impl Send for Blocks {}
// SAFETY: a shared reference gives no access to the memory.
unsafe impl Sync for Blocks {}

impl Blocks {
    fn layout(count: usize) -> Layout {
        let layout = Layout::from_size_align(count * STACK_ALIGN, STACK_ALIGN);
        layout.expect("a few blocks for each CPU have a size")
    }

    /// Makes `count` empty sheaves of `capacity` objects, which is at most [`MOST`]. They must not
    /// be used once the blocks are dropped.
    pub fn new(count: usize, capacity: usize) -> (Blocks, Vec<Sheaf>) {
        assert!(count > 0 && capacity <= MOST);
        // SAFETY: the layout has a size, because `count` is not 0.
        let start: *mut *mut u8 = unsafe { alloc_zeroed(Blocks::layout(count)) }.cast();
        if start.is_null() {
            handle_alloc_error(Blocks::layout(count));
        }
        let slots = STACK_ALIGN / 8;
        // The slots are null.
        let bottom = |block: usize| start.wrapping_add((block + 1) * slots - capacity);
        let sheaves = (0..count).map(|block| Sheaf { top: bottom(block) });
        (Blocks { start, count }, sheaves.collect())
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory with this layout.
        unsafe { dealloc(self.start.cast(), Blocks::layout(self.count)) };
    }
}

impl Sheaf {
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        (self.top as usize).is_multiple_of(STACK_ALIGN)
    }

    pub fn is_empty(&self) -> bool {
        // SAFETY: the slot below the top is an object's or the null below the bottom, and this
        // value owns the block.
        unsafe { (*self.top.sub(1)).is_null() }
    }

    /// Takes the object on top. Returns null if the array is empty.
    #[inline(always)]
    pub fn pop(&mut self) -> *mut u8 {
        // SAFETY: the slot below the top is an object's or the null below the bottom, and this
        // value owns the block.
        let object = unsafe { *self.top.sub(1) };
        if !object.is_null() {
            self.top = self.top.wrapping_sub(1);
        }
        object
    }

    /// Puts an object. Returns false and does nothing if the sheaf is full.
    #[inline(always)]
    pub fn push(&mut self, object: *mut u8) -> bool {
        let has_room = !self.is_full();
        if has_room {
            // SAFETY: the sheaf is not full, so the slot at the top is in the block, which this
            // value owns.
            unsafe { *self.top = object };
            self.top = self.top.wrapping_add(1);
        }
        has_room
    }

    /// Fills an empty sheaf from the cache except for one slot, or a part of it if the system has
    /// no memory. A request for as many objects as the cache's own sheaves hold would leave these
    /// alone, and take objects from slabs, which are less likely to be in the CPU's caches.
    pub fn fill(&mut self, cache: &KmemCache) {
        debug_assert!(self.is_empty());
        let room = (STACK_ALIGN - self.top as usize % STACK_ALIGN) / 8;
        let wanted = (room - 1).max(1);
        // SAFETY: the slots from the top to the end of the block are initialised, and this value
        // owns the block.
        let slots = unsafe { std::slice::from_raw_parts_mut(self.top, wanted) };
        self.top = self.top.wrapping_add(cache.alloc_bulk(slots));
    }

    /// Frees all objects to the cache.
    ///
    /// # Safety
    ///
    /// The objects are `cache`'s.
    pub unsafe fn flush(&mut self, cache: &KmemCache) {
        let top = self.top;
        while !self.pop().is_null() {}
        let count = (top as usize - self.top as usize) / 8;
        // SAFETY: `pop` took the objects between the two addresses, and the slots keep their
        // addresses. The caller promises that they are `cache`'s. They are in no sheaf any more.
        unsafe { cache.free_bulk(std::slice::from_raw_parts(self.top, count)) };
    }
}
