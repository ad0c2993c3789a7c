//! Caches as allocators for collections, by the traits of the crate `allocator-api2`.
//!
//! | allocator | serves | by |
//! |---|---|---|
//! | [`Kmalloc`] | up to [`CLASS_MOST`] | a block of a size class |
//! | [`Kmalloc`] | above [`CLASS_MOST`] | a run of granules |
//! | [`Kmalloc`] | from [`HUGE`] on | a mapping |
//! | [`Cache<T>`] | layouts that fit into a `T` | an object |
//!
//! # Which block a layout has
//!
//! A block is freed by its layout, without a look-up. The traits allow a free with any size between
//! the one that was asked for and the one that was given. All these sizes must lead to the same
//! place:
//!
//! * **Size 0:** there is no block, only an address made of the alignment.
//! * **A layout with a class:** [`kmalloc::class_of`] returns the smallest class that fits. That is
//!   the same class for all sizes from the one asked for to the class's own, which is the size
//!   given.
//! * **Other layouts:** a run or a mapping. The page map tells them apart when the block is freed.

use super::Cache;
use super::cache;
use super::kmalloc::{self, CLASS_MOST, SIZES};
use super::reclaim::{or_reclaim, or_reclaim_for};
use crate::fork;
use crate::page::{self, GRANULE, HUGE, LARGE};
use crate::{nodes, sys};
use allocator_api2::alloc::{AllocError, Allocator};
use core::alloc::Layout;
use core::ptr::{NonNull, without_provenance_mut};

/// Every class's size and every block's address is a multiple of this.
const CLASS_ALIGN: usize = 16;

/// The answer of `allocate`: the block, with the size that it has.
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

/// Zeroes a block from `start` to its end.
///
/// # Safety
///
/// The caller owns the block, which has at least `start` bytes.
unsafe fn clear_from(block: NonNull<[u8]>, start: usize) {
    // SAFETY: the caller promises that the block has at least `start` bytes.
    let rest = unsafe { block.cast::<u8>().add(start) };
    // SAFETY: the bytes from `start` to `block.len()` lie in the block, which the caller owns.
    unsafe { rest.write_bytes(0, block.len() - start) };
}

/// An allocator for collections, over the size classes ([`kmalloc`]). Serves any layout, and takes
/// no memory itself.
///
/// Costs one critical section on the common path, to allocate and to free. A layout above 512 KiB
/// costs the arena's lock, and one from 62 MiB on a system call.
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

/// Returns the class whose blocks serve `layout`, if there is one.
#[inline]
fn class_of(layout: Layout) -> Option<usize> {
    if layout.align() > CLASS_ALIGN {
        kmalloc::class_of_aligned(layout.size(), layout.align())
    } else if layout.size() <= CLASS_MOST {
        Some(kmalloc::class_of(layout.size()))
    } else {
        None
    }
}

/// Allocates a block of `class` when the common path could not. The caches may not exist yet.
#[cold]
fn alloc_class_slow(class: usize) -> Option<NonNull<u8>> {
    if !kmalloc::init() {
        return None;
    }
    loop {
        let block = NonNull::new(kmalloc::alloc_class(class));
        // While another thread forks, the caches of malloc's sizes refuse. `malloc` then uses other
        // memory, but a block of a class must come from here, so this waits.
        let me = pinfold_rseq::thread_pointer() as u64;
        if block.is_some() || cache::is_lock_held(me) || !fork::await_end() {
            return block;
        }
    }
}

/// Allocates a block for a layout without a class. Also returns whether the block reads as zeroes.
#[cold]
fn alloc_large(layout: Layout) -> Option<(NonNull<[u8]>, bool)> {
    let small = layout.size() < HUGE;
    let run = || alloc_run(layout);
    let first = if small { run() } else { None };
    first
        .or_else(|| {
            let size = layout.size();
            let block = or_reclaim_for(size, || page::alloc_huge(size, layout.align()))?;
            Some((whole_huge(block), true))
        })
        // The system may have refused a mapping while the arena has free runs.
        .or_else(|| if small { None } else { run() })
}

fn alloc_run(layout: Layout) -> Option<(NonNull<[u8]>, bool)> {
    if layout.align() > GRANULE {
        return None;
    }
    let granules = layout.size().div_ceil(GRANULE);
    let node = nodes::current();
    let run = or_reclaim(|| page::alloc_run(granules, node, LARGE, false))?;
    Some((sized(run.start, granules * GRANULE), run.zeroed))
}

/// Returns how many bytes a block from [`alloc_large`] has.
///
/// # Safety
///
/// The caller owns the block.
unsafe fn large_size(block: NonNull<u8>) -> usize {
    if page::entry(block.as_ptr() as usize) == LARGE {
        // SAFETY: the page map says that a run begins at the block, and the caller owns the block.
        return unsafe { page::run_size(block) };
    }
    whole_huge(block).len()
}

/// Returns a block that is a mapping, with its size. Ends the process if it is not one.
fn whole_huge(block: NonNull<u8>) -> NonNull<[u8]> {
    let size = page::huge_size(block.as_ptr());
    sized(block, size.unwrap_or_else(|| not_ours(block)))
}

/// Frees a block from [`alloc_large`].
///
/// # Safety
///
/// The caller owns the block and gives it up.
#[cold]
unsafe fn free_large(block: NonNull<u8>) {
    if page::entry(block.as_ptr() as usize) == LARGE {
        // SAFETY: the page map says that a run begins at the block, and the caller gives the block
        // up.
        unsafe { page::free_run(block) };
        return;
    }
    // SAFETY: the caller gives the block up. `free_huge` refuses an address at which no huge block
    // begins.
    if !unsafe { page::free_huge(block.as_ptr()) } {
        not_ours(block);
    }
}

#[cold]
fn not_ours(block: NonNull<u8>) -> ! {
    sys::die(format_args!(
        "Kmalloc was given {block:p}: the address is not a block, or the block was freed before"
    ))
}

/// Makes a block from [`alloc_large`] serve `new`, where it is or by moving its pages. Returns
/// `None` and leaves the block as it was if that is impossible, or would leave more than half of
/// the block unused.
///
/// # Safety
///
/// The caller owns the block, and `new` has no class.
unsafe fn resize_large(block: NonNull<u8>, new: Layout) -> Option<NonNull<[u8]>> {
    // SAFETY: the caller owns the block, which came from `alloc_large`.
    let room = unsafe { large_size(block) };
    let aligned = (block.as_ptr() as usize).is_multiple_of(new.align());
    if aligned && new.size() <= room && new.size() >= room / 2 {
        return Some(sized(block, room));
    }
    // A move keeps the content of pages, but only the alignment of a page.
    let movable = new.size() >= HUGE && new.align() <= sys::page_size();
    if !movable || page::entry(block.as_ptr() as usize) == LARGE {
        return None;
    }
    // SAFETY: the caller owns the block, and the page map does not have it, so it is a huge block.
    let moved = unsafe { page::resize_huge(block.as_ptr(), new.size()) }?;
    Some(whole_huge(moved))
}

impl Kmalloc {
    /// Replaces the block of `old` by one of `new`, and keeps as much of the content as fits into
    /// both.
    ///
    /// # Safety
    ///
    /// The block was allocated here, `old` fits it, and the caller gives it up. If this fails, the
    /// caller keeps the block.
    unsafe fn resize(block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        if old.size() == 0 || new.size() == 0 {
            let fresh = Kmalloc.allocate(new)?;
            // SAFETY: the caller gives the block up, which is of layout `old`.
            unsafe { Kmalloc.deallocate(block, old) };
            return Ok(fresh);
        }
        match (class_of(old), class_of(new)) {
            // The block was allocated with the class's alignment, which is enough for both layouts.
            (Some(class), Some(same)) if class == same => return Ok(sized(block, SIZES[class])),
            (None, None) => {
                // SAFETY: the caller owns the block. `old` has no class, so the block came from
                // `alloc_large`; `new` has none either.
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
        // SAFETY: the caller gives the block up, which is of layout `old`.
        unsafe { Kmalloc.deallocate(block, old) };
        Ok(fresh)
    }
}

// SAFETY: a block stays at its address until it is freed, because `Kmalloc` itself holds no memory.
// A block is at least as large and as aligned as its layout. Each layout that fits a block leads
// back to the place it came from, see the module's description.
unsafe impl Allocator for Kmalloc {
    #[inline]
    fn allocate(&self, layout: Layout) -> Block {
        if layout.size() == 0 {
            return Ok(nowhere(layout));
        }
        let Some(class) = class_of(layout) else {
            return alloc_large(layout)
                .map(|(block, _)| block)
                .ok_or(AllocError);
        };
        NonNull::new(kmalloc::alloc_class(class))
            .or_else(|| alloc_class_slow(class))
            .map(|block| sized(block, SIZES[class]))
            .ok_or(AllocError)
    }

    fn allocate_zeroed(&self, layout: Layout) -> Block {
        let (block, zeroed) = if layout.size() == 0 || class_of(layout).is_some() {
            (self.allocate(layout)?, false)
        } else {
            alloc_large(layout).ok_or(AllocError)?
        };
        if !zeroed {
            // SAFETY: the block was just allocated.
            unsafe { clear_from(block, 0) };
        }
        Ok(block)
    }

    #[inline]
    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 {
            return;
        }
        match class_of(layout) {
            // SAFETY: a layout that fits the block has the block's class, and the caller gives the
            // block up.
            Some(class) => unsafe { kmalloc::free_class(block.as_ptr(), class) },
            // SAFETY: a block whose layout has no class came from `alloc_large`, and the caller
            // gives it up.
            None => unsafe { free_large(block) },
        }
    }

    unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller promises that the block is of layout `old`, and gives it up if this
        // succeeds.
        unsafe { Kmalloc::resize(block, old, new) }
    }

    unsafe fn grow_zeroed(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller promises that the block is of layout `old`, and gives it up if this
        // succeeds.
        let grown = unsafe { Kmalloc::resize(block, old, new) }?;
        // SAFETY: `resize` returned the block to this thread, with at least the bytes of `new`,
        // which are at least those of `old`.
        unsafe { clear_from(grown, old.size()) };
        Ok(grown)
    }

    unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller promises that the block is of layout `old`, and gives it up if this
        // succeeds.
        unsafe { Kmalloc::resize(block, old, new) }
    }
}

/// Returns whether an object of a cache of `T` serves `layout`.
const fn fits<T>(layout: Layout) -> bool {
    layout.size() <= size_of::<T>() && layout.align() <= align_of::<T>()
}

/// A cache as an allocator, for collections of nodes and for buffers of one size.
///
/// A layout that fits into a `T` gets an object, and any other layout an error. Growing and
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
// SAFETY: an object stays at its address until it is freed, even if the cache's handle is moved or
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
            // SAFETY: the block is an object of this cache, because its layout is not empty, and
            // the caller gives it up.
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
        // SAFETY: the caller promises that the block is of layout `old`, and gives it up if this
        // succeeds.
        let grown = unsafe { self.grow(block, old, new) }?;
        // SAFETY: `grow` returned the block to this thread, with at least the bytes of `new`, which
        // are at least those of `old`.
        unsafe { clear_from(grown, old.size()) };
        Ok(grown)
    }

    #[inline]
    unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        if new.size() == 0 {
            // SAFETY: the caller gives the block up, which is of layout `old`.
            unsafe { self.deallocate(block, old) };
            return Ok(nowhere(new));
        }
        fits::<T>(new)
            .then(|| sized(block, size_of::<T>()))
            .ok_or(AllocError)
    }
}
