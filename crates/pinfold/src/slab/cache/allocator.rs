//! Makes caches usable as allocators for collections, through the traits of the crate
//! `allocator-api2`.
//!
//! | allocator | serves | by |
//! |---|---|---|
//! | [`Kmalloc`] | up to [`MAX_CLASS_SIZE`] | a block of a size class |
//! | [`Kmalloc`] | above [`MAX_CLASS_SIZE`] | a run of granules |
//! | [`Kmalloc`] | from [`HUGE`] on | a mapping |
//! | [`Cache<T>`] | layouts that fit into a `T` | an object |
//!
//! # Which block a layout has
//!
//! A free gets a layout with the block, and finds the block's class from the layout, without a
//! look-up. The traits allow a layout of any size between the size that was asked for and the size
//! that was given. All these sizes must lead to the class, the run or the mapping that the block
//! came from:
//!
//! * **Size 0:** there is no block. The address is the layout's alignment.
//! * **A layout with a class:** [`kmalloc::class_of`] returns the smallest class that fits. The
//!   size given is the class's own size. For all sizes between the two, the smallest class that
//!   fits is the same.
//! * **Other layouts:** the block is a run or a mapping. A free reads in the page map which of the
//!   two it is.

use super::kmalloc::{self, SIZES, alloc_of_class, class_of_layout};
use super::reclaim::{or_reclaim, or_reclaim_for};
use crate::arena::{self, GRANULE, HUGE, LARGE};
use crate::slab::{Cache, tick};
use crate::{nodes, sys};
use allocator_api2::alloc::{AllocError, Allocator};
use core::alloc::Layout;
use core::ptr::{NonNull, without_provenance_mut};

/// The result of `allocate`: the block, with the size that the block really has.
type Block = Result<NonNull<[u8]>, AllocError>;

/// Returns the dangling block of a layout of size 0.
fn nowhere(layout: Layout) -> NonNull<[u8]> {
    let address = without_provenance_mut(layout.align());
    // SAFETY: an alignment is not 0, so the address is not null.
    sized(unsafe { NonNull::new_unchecked(address) }, 0)
}

fn sized(block: NonNull<u8>, size: usize) -> NonNull<[u8]> {
    NonNull::slice_from_raw_parts(block, size)
}

/// Zeroes the bytes of a block from `start` to its end.
///
/// # Safety
///
/// The caller owns the block, and the block has at least `start` bytes.
unsafe fn clear_from(block: NonNull<[u8]>, start: usize) {
    // SAFETY: the caller promises that the block has at least `start` bytes.
    let rest = unsafe { block.cast::<u8>().add(start) };
    // SAFETY: the bytes from `start` to `block.len()` lie in the block, which the caller owns.
    unsafe { rest.write_bytes(0, block.len() - start) };
}

/// An allocator for collections, over the size classes of malloc. Serves any layout. The value
/// itself has no size.
///
/// On the common path, an allocation and a free cost one critical section each. A layout above 575
/// KiB costs the arena's lock, unless the CPU keeps a freed block of that size. A layout from 62
/// MiB on costs a system call.
///
/// ```
/// use allocator_api2::vec::Vec;
/// use pinfold::slab::Kmalloc;
///
/// let mut list = Vec::new_in(Kmalloc);
/// list.extend(0..1000);
/// assert_eq!(list[999], 999);
///
/// let mut map = hashbrown::HashMap::new_in(Kmalloc);
/// map.insert("pin", "fold");
/// assert_eq!(map["pin"], "fold");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kmalloc;

/// Allocates a block for a layout without a class: a run or a mapping. Also returns whether the
/// block reads as zeroes. `zeroed` says that the caller wants zeroes, and has to write them if the
/// block does not.
#[cold]
fn alloc_large(layout: Layout, zeroed: bool) -> Option<(NonNull<[u8]>, bool)> {
    // A program that asks only for such layouts reaches no other path that ticks.
    tick();
    let small = layout.size() < HUGE;
    let run = || alloc_run(layout, zeroed);
    let first = if small { run() } else { None };
    first
        .or_else(|| {
            let size = layout.size();
            let block = or_reclaim_for(size, || {
                arena::alloc_huge_for(size, layout.align(), 0, zeroed)
            })?;
            Some((whole_huge(block), true))
        })
        // If the system refused a mapping, the arena may still have a free run.
        .or_else(|| if small { None } else { run() })
}

fn alloc_run(layout: Layout, zeroed: bool) -> Option<(NonNull<[u8]>, bool)> {
    if layout.align() > GRANULE {
        return None;
    }
    let granules = layout.size().div_ceil(GRANULE);
    let node = nodes::current();
    let run = or_reclaim(|| arena::alloc_block_run(granules, node, LARGE, zeroed))?;
    Some((sized(run.start, granules * GRANULE), run.zeroed))
}

/// Returns how many bytes a block from [`alloc_large`] has.
///
/// # Safety
///
/// The caller owns the block.
unsafe fn large_size(block: NonNull<u8>) -> usize {
    if arena::entry(block.as_ptr() as usize) == LARGE {
        // SAFETY: the page map says that a run begins at the block. The caller promises that it
        // owns the block.
        return unsafe { arena::run_size(block) };
    }
    whole_huge(block).len()
}

/// Returns a block that is a mapping, with its size. Ends the process if the block is not a
/// mapping.
fn whole_huge(block: NonNull<u8>) -> NonNull<[u8]> {
    let size = arena::huge_size(block.as_ptr());
    sized(block, size.unwrap_or_else(|| not_ours(block)))
}

/// Frees a block from [`alloc_large`].
///
/// # Safety
///
/// The caller owns the block and gives it up.
#[cold]
unsafe fn free_large(block: NonNull<u8>) {
    if arena::entry(block.as_ptr() as usize) == LARGE {
        // SAFETY: the page map says that a run begins at the block. The caller passes ownership of
        // the block.
        unsafe { arena::free_block_run(block) };
        return;
    }
    // SAFETY: the caller passes ownership of the block. `free_huge` refuses an address at which no
    // huge block begins.
    if !unsafe { arena::free_huge(block.as_ptr()) } {
        not_ours(block);
    }
}

#[cold]
fn not_ours(block: NonNull<u8>) -> ! {
    sys::die(format_args!(
        "Kmalloc was given {block:p}: the address is not a block, or the block was freed before"
    ))
}

/// Makes a block from [`alloc_large`] serve `new`: keeps the block where it is, or moves its pages.
/// Keeps the block only if at least half of it stays in use. If neither way works, returns `None`
/// and leaves the block as it was.
///
/// # Safety
///
/// The caller owns the block, and `new` has no class.
unsafe fn resize_large(block: NonNull<u8>, new: Layout) -> Option<NonNull<[u8]>> {
    // SAFETY: the caller promises that it owns the block. The block came from `alloc_large`.
    let room = unsafe { large_size(block) };
    let aligned = (block.as_ptr() as usize).is_multiple_of(new.align());
    if aligned && new.size() <= room && new.size() >= room / 2 {
        return Some(sized(block, room));
    }
    // A move of pages keeps the content. The new address is aligned to a page only.
    let movable = new.size() >= HUGE && new.align() <= sys::page_size();
    if !movable || arena::entry(block.as_ptr() as usize) == LARGE {
        return None;
    }
    // SAFETY: the caller owns the block. The page map has no run there, so the block is a huge
    // block.
    let moved = unsafe { arena::resize_huge(block.as_ptr(), new.size()) }?;
    Some(whole_huge(moved))
}

impl Kmalloc {
    /// Replaces a block of layout `old` by a block of layout `new`. Keeps as much of the content as
    /// fits into both.
    ///
    /// # Safety
    ///
    /// The block came from this allocator, `old` fits the block, and the caller passes ownership of
    /// the block. If this returns an error, the caller keeps the block.
    unsafe fn resize(block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        if old.size() == 0 || new.size() == 0 {
            let fresh = Kmalloc.allocate(new)?;
            // SAFETY: the caller passes ownership of the block, and promises that the block is of
            // layout `old`.
            unsafe { Kmalloc.deallocate(block, old) };
            return Ok(fresh);
        }
        match (class_of_layout(old), class_of_layout(new)) {
            // `new` has the same class as `old`, so the block's size and alignment serve both
            // layouts.
            (Some(class), Some(same)) if class == same => return Ok(sized(block, SIZES[class])),
            (None, None) => {
                // SAFETY: the caller owns the block. `old` has no class, so the block came from
                // `alloc_large`. `new` has no class either.
                if let Some(resized) = unsafe { resize_large(block, new) } {
                    return Ok(resized);
                }
            }
            _ => {}
        }
        let fresh = Kmalloc.allocate(new)?;
        let both = old.size().min(new.size());
        // SAFETY: both blocks have at least `both` bytes, and the fresh one does not overlap the
        // old one, which is still allocated.
        unsafe { fresh.cast().copy_from_nonoverlapping(block, both) };
        // SAFETY: the caller passes ownership of the block, and promises that the block is of
        // layout `old`.
        unsafe { Kmalloc.deallocate(block, old) };
        Ok(fresh)
    }
}

// SAFETY: a block stays at its address until it is freed, even if the `Kmalloc` value is moved or
// dropped, because that value holds no memory. A block is at least as large and as aligned as its
// layout. Each layout that fits a block leads to the class, run or mapping that the block came
// from: see the module's documentation.
unsafe impl Allocator for Kmalloc {
    #[inline]
    fn allocate(&self, layout: Layout) -> Block {
        if layout.size() == 0 {
            return Ok(nowhere(layout));
        }
        let Some(class) = class_of_layout(layout) else {
            return alloc_large(layout, false)
                .map(|(block, _)| block)
                .ok_or(AllocError);
        };
        alloc_of_class(class)
            .map(|block| sized(block, SIZES[class]))
            .ok_or(AllocError)
    }

    fn allocate_zeroed(&self, layout: Layout) -> Block {
        let (block, zeroed) = if layout.size() == 0 || class_of_layout(layout).is_some() {
            (self.allocate(layout)?, false)
        } else {
            alloc_large(layout, true).ok_or(AllocError)?
        };
        if !zeroed {
            // SAFETY: the block was just allocated to this thread.
            unsafe { clear_from(block, 0) };
        }
        Ok(block)
    }

    #[inline]
    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 {
            return;
        }
        match class_of_layout(layout) {
            // SAFETY: a layout that fits the block has the block's class. The caller passes
            // ownership of the block.
            Some(class) => unsafe { kmalloc::free_class(block.as_ptr(), class) },
            // SAFETY: a block whose layout has no class came from `alloc_large`. The caller passes
            // ownership of the block.
            None => unsafe { free_large(block) },
        }
    }

    unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller promises that the block is of layout `old`, and passes ownership of
        // the block if this call succeeds.
        unsafe { Kmalloc::resize(block, old, new) }
    }

    unsafe fn grow_zeroed(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller promises that the block is of layout `old`, and passes ownership of
        // the block if this call succeeds.
        let grown = unsafe { Kmalloc::resize(block, old, new) }?;
        // SAFETY: `resize` returned the block to this thread. The block has at least as many bytes
        // as `new`, and `new` has at least as many as `old`.
        unsafe { clear_from(grown, old.size()) };
        Ok(grown)
    }

    unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller promises that the block is of layout `old`, and passes ownership of
        // the block if this call succeeds.
        unsafe { Kmalloc::resize(block, old, new) }
    }
}

/// Returns whether an object with the layout of `T` can serve `layout`.
const fn fits<T>(layout: Layout) -> bool {
    layout.size() <= size_of::<T>() && layout.align() <= align_of::<T>()
}

/// A cache is an allocator, for collections that consist of nodes and for buffers of one size.
///
/// A layout that fits into a `T` gets an object. Any other layout gets an error. Growing and
/// shrinking within a `T` leaves the block where it is.
///
/// Collections usually borrow the cache: `&Cache<T>` is an allocator too.
///
/// ```
/// use allocator_api2::vec::Vec;
/// use pinfold::slab::Cache;
///
/// let buffers = Cache::<[u64; 512]>::new("buffers")?;
/// let mut buffer = Vec::with_capacity_in(512, &buffers);
/// buffer.extend(0..512u64);
/// assert!(buffer.try_reserve(1).is_err());
/// drop(buffer);
/// buffers.destroy().expect("every buffer came back");
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
// SAFETY: an object stays at its address until it is freed, even if the `Cache` value is moved or
// dropped, because a cache with objects in use keeps its memory. An object has the layout of a `T`,
// and every layout that is served fits into a `T`.
unsafe impl<T> Allocator for Cache<T> {
    #[inline]
    fn allocate(&self, layout: Layout) -> Block {
        if layout.size() == 0 {
            return Ok(nowhere(layout));
        }
        let object = fits::<T>(layout).then(|| self.raw().alloc()).flatten();
        object
            .map(|object| sized(object, size_of::<T>()))
            .ok_or(AllocError)
    }

    #[inline]
    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        if layout.size() != 0 {
            // SAFETY: the layout is not of size 0, so the block is an object of this cache. The
            // caller passes ownership of the block.
            unsafe { self.raw().free(block) };
        }
    }

    #[inline]
    unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        if old.size() == 0 {
            return self.allocate(new);
        }
        fits::<T>(new)
            .then(|| sized(block, size_of::<T>()))
            .ok_or(AllocError)
    }

    unsafe fn grow_zeroed(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller promises that the block is of layout `old`, and passes ownership of
        // the block if this call succeeds.
        let grown = unsafe { self.grow(block, old, new) }?;
        // SAFETY: `grow` returned the block to this thread. The block has at least as many bytes as
        // `new`, and `new` has at least as many as `old`.
        unsafe { clear_from(grown, old.size()) };
        Ok(grown)
    }

    #[inline]
    unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        if new.size() == 0 {
            // SAFETY: the caller passes ownership of the block, and promises that the block is of
            // layout `old`.
            unsafe { self.deallocate(block, old) };
            return Ok(nowhere(new));
        }
        fits::<T>(new)
            .then(|| sized(block, size_of::<T>()))
            .ok_or(AllocError)
    }
}
