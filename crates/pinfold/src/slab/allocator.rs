//! Caches as allocators for collections, by the traits of the crate `allocator-api2`.
//!
//! | allocator | serves | block |
//! |---|---|---|
//! | [`Kmalloc`] | any layout | of the size caches; above [`CLASS_MOST`] a run of granules, from [`HUGE`] on a mapping |
//! | [`Cache<T>`] | layouts that fit into a `T` | an object |
//!
//! # Which block a layout has
//!
//! Blocks are freed by their layout, without a look-up. The traits let a block be freed by any size from the one that was asked for
//! to the one that it was given with, so each of these sizes must lead to the same place:
//!
//! * size 0: no block at all, an address made of the alignment;
//! * a layout with a class: [`kmalloc::class_of`] gives the smallest class that fits, which is the same for all sizes from the one
//!   asked for to the class's own, with which the block was given;
//! * others: a run or a mapping, which the page map tells apart when the block is freed.

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

/// Every class's size is a multiple of this, and so are its blocks' addresses.
const CLASS_ALIGN: usize = 16;

/// What `allocate` answers: the block with the size it has.
type Block = Result<NonNull<[u8]>, AllocError>;

/// The block of a layout of size 0.
fn nowhere(layout: Layout) -> NonNull<[u8]> {
    let address = without_provenance_mut(layout.align());
    // SAFETY: an alignment is not 0.
    sized(unsafe { NonNull::new_unchecked(address) }, 0)
}

fn sized(block: NonNull<u8>, size: usize) -> NonNull<[u8]> {
    NonNull::slice_from_raw_parts(block, size)
}

/// Clears a block from `start` to its end.
///
/// # Safety
///
/// The block is the caller's and at least `start` bytes large.
unsafe fn clear_from(block: NonNull<[u8]>, start: usize) {
    // SAFETY: the caller's promise.
    let rest = unsafe { block.cast::<u8>().add(start) };
    // SAFETY: as above.
    unsafe { rest.write_bytes(0, block.len() - start) };
}

/// An allocator for collections over the size caches ([`kmalloc`]), for any layout. It takes no memory itself.
///
/// Costs one critical section on the common path, to allocate and to free. Layouts above 512 KiB cost the arena's lock, those
/// from 62 MiB on a system call.
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

/// The class whose blocks serve `layout`, if there is one.
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

/// A block of `class`, when the common path has none: the caches may not be there yet.
#[cold]
fn alloc_class_slow(class: usize) -> Option<NonNull<u8>> {
    if !kmalloc::init() {
        return None;
    }
    loop {
        let block = NonNull::new(kmalloc::alloc_class(class));
        // The caches of malloc's sizes give nothing while another thread forks: malloc has other
        // memory then, a block of a class must wait.
        let me = pinfold_rseq::thread_pointer() as u64;
        if block.is_some() || cache::is_lock_held(me) || !fork::await_end() {
            return block;
        }
    }
}

/// A block beyond the classes, and whether it reads as zeroes.
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
        // There may be no addresses for mappings, and some in the arena.
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

/// Bytes in a block from [`alloc_large`].
///
/// # Safety
///
/// The block is the caller's.
unsafe fn large_size(block: NonNull<u8>) -> usize {
    if page::entry(block.as_ptr() as usize) == LARGE {
        // SAFETY: the page map says that a run begins here, and it is the caller's.
        return unsafe { page::run_size(block) };
    }
    whole_huge(block).len()
}

/// A block that is a mapping, with its size.
fn whole_huge(block: NonNull<u8>) -> NonNull<[u8]> {
    let size = page::huge_size(block.as_ptr());
    sized(block, size.unwrap_or_else(|| not_ours(block)))
}

/// Takes back a block from [`alloc_large`].
///
/// # Safety
///
/// The block is the caller's, who gives it up.
#[cold]
unsafe fn free_large(block: NonNull<u8>) {
    if page::entry(block.as_ptr() as usize) == LARGE {
        // SAFETY: the page map says that a run begins here; the caller gives it up.
        unsafe { page::free_run(block) };
        return;
    }
    // SAFETY: the caller gives the block up; an address that is no block is refused.
    if !unsafe { page::free_huge(block.as_ptr()) } {
        not_ours(block);
    }
}

#[cold]
fn not_ours(block: NonNull<u8>) -> ! {
    sys::die(format_args!(
        "Kmalloc was given {block:p}: the address is no block, or is none any more"
    ))
}

/// Makes a block from [`alloc_large`] serve `new` where it is, or by moving its pages; `None`, and the block as it was, when that
/// cannot be or would leave more than half of it unused.
///
/// # Safety
///
/// The block is the caller's; `new` has no class.
unsafe fn resize_large(block: NonNull<u8>, new: Layout) -> Option<NonNull<[u8]>> {
    // SAFETY: the caller's promise.
    let room = unsafe { large_size(block) };
    let aligned = (block.as_ptr() as usize).is_multiple_of(new.align());
    if aligned && new.size() <= room && new.size() >= room / 2 {
        return Some(sized(block, room));
    }
    // Pages keep their content when they move, and no more alignment than their own.
    let movable = new.size() >= HUGE && new.align() <= sys::page_size();
    if !movable || page::entry(block.as_ptr() as usize) == LARGE {
        return None;
    }
    // SAFETY: a huge block of the caller's: the page map does not have it.
    let moved = unsafe { page::resize_huge(block.as_ptr(), new.size()) }?;
    Some(whole_huge(moved))
}

impl Kmalloc {
    /// Makes the block of `old` one of `new`, with as much of its content as both have.
    ///
    /// # Safety
    ///
    /// As for [`Allocator::grow`], whichever layout is larger.
    unsafe fn resize(block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        if old.size() == 0 || new.size() == 0 {
            let fresh = Kmalloc.allocate(new)?;
            // SAFETY: the caller gives the block up.
            unsafe { Kmalloc.deallocate(block, old) };
            return Ok(fresh);
        }
        match (class_of(old), class_of(new)) {
            // The class is aligned enough for both layouts.
            (Some(class), Some(same)) if class == same => return Ok(sized(block, SIZES[class])),
            (None, None) => {
                // SAFETY: the caller's promise: without a class, the block is a large one.
                if let Some(resized) = unsafe { resize_large(block, new) } {
                    return Ok(resized);
                }
            }
            _ => {}
        }
        let fresh = Kmalloc.allocate(new)?;
        let both = old.size().min(new.size());
        // SAFETY: both blocks are that large and the caller's; the new one is none of the old one.
        unsafe { fresh.cast().copy_from_nonoverlapping(block, both) };
        // SAFETY: the caller gives the block up.
        unsafe { Kmalloc.deallocate(block, old) };
        Ok(fresh)
    }
}

// SAFETY: a block stays where it is until it is freed, whatever becomes of the unit struct; blocks are at least as large and
// aligned as their layouts say, and any fitting layout leads back to the same place, see the module.
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
            // SAFETY: the block is new.
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
            // SAFETY: the layout's class is the block's; the caller gives it up.
            Some(class) => unsafe { kmalloc::free_class(block.as_ptr(), class) },
            // SAFETY: without a class, the block is a large one; the caller gives it up.
            None => unsafe { free_large(block) },
        }
    }

    unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller's promise.
        unsafe { Kmalloc::resize(block, old, new) }
    }

    unsafe fn grow_zeroed(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller's promise.
        let grown = unsafe { Kmalloc::resize(block, old, new) }?;
        // SAFETY: the block is the caller's and larger than the old layout.
        unsafe { clear_from(grown, old.size()) };
        Ok(grown)
    }

    unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        // SAFETY: the caller's promise.
        unsafe { Kmalloc::resize(block, old, new) }
    }
}

/// Whether an object of a cache of `T` serves `layout`.
const fn fits<T>(layout: Layout) -> bool {
    layout.size() <= size_of::<T>() && layout.align() <= align_of::<T>()
}

/// A cache as an allocator, for collections of nodes and for buffers of one size: layouts that fit into a `T` get an object,
/// others an error. Growing and shrinking within a `T` leaves the block where it is.
///
/// Collections borrow the cache: `&Cache<T>` is an allocator too.
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
// SAFETY: an object is in use until it is freed, and its memory stays until then, wherever the cache's handle is; it has the
// layout of a `T`, into which every layout served fits.
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
            // SAFETY: the block is an object of this cache; the caller gives it up.
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
        // SAFETY: the caller's promise.
        let grown = unsafe { self.grow(block, old, new) }?;
        // SAFETY: the block is the caller's and larger than the old layout.
        unsafe { clear_from(grown, old.size()) };
        Ok(grown)
    }

    #[inline]
    unsafe fn shrink(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Block {
        if new.size() == 0 {
            // SAFETY: the caller gives the block up.
            unsafe { self.deallocate(block, old) };
            return Ok(nowhere(new));
        }
        fits::<T>(new)
            .then(|| sized(block, size_of::<T>()))
            .ok_or(AllocError)
    }
}
