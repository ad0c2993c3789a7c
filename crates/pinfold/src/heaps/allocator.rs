//! A heap as an allocator of collections.

use super::Heap;
use allocator_api2::alloc::{AllocError, Allocator};
use core::alloc::Layout;
use core::ptr::NonNull;

type Block = Result<NonNull<[u8]>, AllocError>;

impl Heap {
    fn sized(block: Option<NonNull<u8>>, size: usize) -> Block {
        let block = block.ok_or(AllocError)?;
        Ok(NonNull::slice_from_raw_parts(block, size))
    }

    /// Resizes a block of layout `old`.
    ///
    /// # Safety
    ///
    /// The block came from this heap for `old`, and the caller uses only the new address.
    unsafe fn resize(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller owns the block.
        let room = unsafe { self.usable_size(block) };
        let stays = new.size() <= room && new.size() >= room / 2;
        if stays && (block.as_ptr() as usize).is_multiple_of(new.align()) {
            return Self::sized(Some(block), new.size());
        }
        if new.align() <= 16 {
            // SAFETY: the caller owns the block.
            return Self::sized(unsafe { self.realloc(block, new.size()) }, new.size());
        }
        let fresh = self.allocate(new)?;
        let both = old.size().min(new.size());
        // SAFETY: both blocks have the smaller of the two sizes, and two blocks do not overlap. The
        // caller passes ownership of the old one.
        unsafe {
            fresh.cast::<u8>().copy_from_nonoverlapping(block, both);
            self.free(block);
        }
        Ok(fresh)
    }
}

/// Collections borrow the heap: the allocator is `&Heap`. So a heap outlives them. Dropping a heap
/// that never had a scope frees what a forgotten collection held.
///
/// ```
/// use allocator_api2::vec::Vec;
/// use pinfold::heaps::Heap;
///
/// let tenant = Heap::builder("tenant-7").limit(1 << 20).build()?;
/// let mut list = Vec::new_in(&tenant);
/// list.extend(0..1000u64);
/// assert!(list.try_reserve(1 << 20).is_err() && list[999] == 999);
/// # Ok::<(), pinfold::heaps::HeapError>(())
/// ```
// SAFETY: a block stays at its address until it is freed or resized, or the heap is dropped, which
// the borrow outlives. A block has the size and the alignment of its layout.
unsafe impl Allocator for &Heap {
    fn allocate(&self, layout: Layout) -> Block {
        let block = match layout.align() {
            ..=16 => self.alloc(layout.size()),
            align => self.alloc_aligned(layout.size(), align),
        };
        Heap::sized(block, layout.size())
    }

    fn allocate_zeroed(&self, layout: Layout) -> Block {
        Heap::sized(self.alloc_zeroed_at(layout), layout.size())
    }

    unsafe fn deallocate(&self, block: NonNull<u8>, _: Layout) {
        // SAFETY: the caller passes ownership of a block of this heap.
        unsafe { self.free(block) };
    }

    unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller passes on what it promises.
        unsafe { self.resize(block, old, new) }
    }

    unsafe fn grow_zeroed(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller passes on what it promises.
        let grown = unsafe { self.resize(block, old, new) }?;
        // SAFETY: the block has `new.size()` bytes, and only this thread uses it.
        unsafe {
            let rest = grown.cast::<u8>().add(old.size());
            rest.write_bytes(0, new.size() - old.size());
        }
        Ok(grown)
    }

    unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller passes on what it promises.
        let shrunk = unsafe { self.resize(block, old, new) };
        let stays = (block.as_ptr() as usize).is_multiple_of(new.align());
        // A heap at its limit has no smaller block, and the old one has room.
        shrunk.or_else(|error| match stays {
            true => Ok(NonNull::slice_from_raw_parts(block, new.size())),
            false => Err(error),
        })
    }
}
