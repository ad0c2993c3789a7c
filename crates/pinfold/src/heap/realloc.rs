//! `realloc`: keeps a block where it is, resizes a run in place, moves pages, or copies.

use super::blocks::{ALIGN, is_in_use, note_larger, usable_size};
use super::data::{Content, alloc_aligned_as};
use super::{counted, free, mode, sampled, scope};
use crate::arena::{self, COLOURED, GRANULE, HUGE};
use crate::heaps;
use crate::slab;
use crate::slab::kmalloc::{self, CLASSES, MAX_CLASS_SIZE};
use crate::sys::{errno, set_errno};
use core::alloc::Layout;
use core::ptr::{NonNull, null_mut};

/// Blocks below this size are moved by copying, because moved pages take a mapping of their own.
const MIN_MOVED: usize = 2 << 20;

/// Grows or shrinks a block. A block that still uses half of its room stays where it is. Returns
/// null with errno ENOMEM, and leaves the block unchanged, if there is no memory to grow it.
///
/// # Safety
///
/// `block` came from this module, is not null and was not freed.
#[inline]
pub unsafe fn realloc(block: *mut u8, size: usize) -> *mut u8 {
    // SAFETY: the caller passes on what it promises.
    unsafe { realloc_as(block, size, Content::Unknown) }
}

/// Resizes a block as [`realloc`] does. `content` is what the program says about the block's
/// content.
///
/// # Safety
///
/// The same as for [`realloc`].
pub unsafe fn realloc_as(block: *mut u8, size: usize, content: Content) -> *mut u8 {
    if !is_in_use(block) {
        set_errno(libc::ENOMEM);
        return null_mut();
    }
    // SAFETY: the caller owns the block.
    if let Some(block) = unsafe { scope::realloc(block, size, ALIGN) } {
        return block;
    }
    if mode::reports() {
        counted::reallocated();
        // SAFETY: the caller owns `block`, and passes on what it promises.
        return unsafe { sampled::realloc(block, size, || realloc_any(block, size, content)) };
    }
    // SAFETY: the caller passes on what it promises.
    unsafe { realloc_any(block, size, content) }
}

/// # Safety
///
/// The same as for [`realloc`].
unsafe fn realloc_any(block: *mut u8, size: usize, content: Content) -> *mut u8 {
    // SAFETY: the caller owns `block`, which came from this module.
    let room = unsafe { usable_size(block) };
    let class = class_at(block);
    let whole = class.map_or(room, kmalloc::size_of_class);
    let is_data = class.is_some_and(kmalloc::is_data);
    let leaves = is_data && content == Content::Pointers;
    if size <= whole && size >= whole / 2 && !leaves {
        // SAFETY: the caller owns `block`, which has room for `size` bytes.
        return unsafe { keep(block, size) };
    }
    // SAFETY: the caller owns `block`, which came from this module.
    if unsafe { resize_in_place(block, size) } {
        return block;
    }
    // A block that is alone in its granules lies among no other kind. What it shrinks to lies where
    // the program says.
    let data = match class.is_some_and(|class| !kmalloc::is_alone(class)) {
        true => is_data && !leaves,
        false => content == Content::Data,
    };
    // SAFETY: the caller owns `block`, which has `room` bytes.
    unsafe { resize(block, (ALIGN, data), room, size) }
}

/// Grows or shrinks a block that was made for `layout`. The block stays where it is only if a new
/// block of `size` bytes would be as large.
///
/// # Safety
///
/// `block` came from this module for `layout`, and was not freed.
pub unsafe fn realloc_exact(block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
    if !is_in_use(block) {
        return null_mut();
    }
    // SAFETY: the caller owns the block.
    if let Some(block) = unsafe { scope::realloc(block, size, layout.align()) } {
        return block;
    }
    if mode::reports() {
        counted::reallocated();
        // SAFETY: the caller owns `block`, and passes on what it promises.
        return unsafe { sampled::realloc(block, size, || realloc_to(block, layout, size)) };
    }
    // SAFETY: the caller passes on what it promises.
    unsafe { realloc_to(block, layout, size) }
}

/// # Safety
///
/// The same as for [`realloc_exact`].
unsafe fn realloc_to(block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
    let stays = match class_at(block) {
        Some(class) => kmalloc::class_of_aligned(size, layout.align()) == Some(class % CLASSES),
        None => {
            // SAFETY: the caller owns `block`, which came from this module.
            let room = unsafe { usable_size(block) };
            // SAFETY: the caller owns `block`, which came from this module.
            (size <= room && room - size < GRANULE) || unsafe { resize_in_place(block, size) }
        }
    };
    if stays {
        // SAFETY: the caller owns `block`, which has room for `size` bytes.
        return unsafe { keep(block, size) };
    }
    let data = class_at(block).is_some_and(kmalloc::is_data);
    // SAFETY: the caller owns `block`, which has `layout.size()` bytes of content.
    unsafe { resize(block, (layout.align(), data), layout.size(), size) }
}

/// Resizes a run in place for `size` bytes. Returns false if the block is not a run, if `size`
/// bytes need another kind of block, or if no free room lies behind the run.
///
/// # Safety
///
/// `block` came from this module, and was not freed.
// Not inlined, so that its variables take no stack in `realloc_any`, which goes deep.
#[inline(never)]
unsafe fn resize_in_place(block: *mut u8, size: usize) -> bool {
    let Some(run) = arena::run_at(block) else {
        return false;
    };
    // SAFETY: `run_at` found that the block is this run, which the caller owns.
    let before = unsafe { arena::size_in_run(block, run) };
    if (size <= before && size <= MAX_CLASS_SIZE) || size >= HUGE {
        return false;
    }
    let granules = (arena::offset_in_run(block) + size).div_ceil(GRANULE);
    // SAFETY: `run_at` found that the block is this run, which the caller owns.
    let resized = unsafe { arena::resize_run(run, granules) };
    if resized {
        // SAFETY: as above.
        counted::resized_large(before, unsafe { arena::size_in_run(block, run) });
    }
    resized
}

/// Returns the class of a block, or its twin. Returns `None` for a run and for a huge block.
fn class_at(block: *mut u8) -> Option<usize> {
    kmalloc::class_of_any(arena::entry(block as usize))
}

/// Notes that a block is used for `size` bytes now. Returns the block.
///
/// # Safety
///
/// `block` came from this module, was not freed, and has room for `size` bytes.
unsafe fn keep(block: *mut u8, size: usize) -> *mut u8 {
    if let Some(class) = class_at(block) {
        // SAFETY: the caller owns the block, and the page map names its class.
        unsafe { kmalloc::set_requested(block, class, size) };
    }
    block
}

/// Moves the content of a block of `room` bytes to a block of `size` bytes, at a multiple of
/// `align`, and without pointers if `data` is true. If there is no memory for a smaller block,
/// keeps the block.
///
/// # Safety
///
/// `block` came from this module, was not freed, and has `room` bytes of content.
unsafe fn resize(
    block: *mut u8,
    (align, data): (usize, bool),
    room: usize,
    size: usize,
) -> *mut u8 {
    let before = errno();
    // A thread in a scope gets its new blocks from the scope's heap.
    let is_outside = !mode::has_scopes() || heaps::here().is_none();
    let grows = is_outside && size > room && room >= GRANULE && size < HUGE && align <= ALIGN;
    let growing = |fresh| grows.then(|| alloc_growing(size, fresh)).flatten();
    // SAFETY: the caller owns `block`, which has `room` bytes.
    let resident = match grows && unsafe { is_full_run(block, room) } {
        true => growing(false),
        false => None,
    };
    // The kernel may move the pages to any page address, so a block with a larger alignment is
    // copied below instead.
    let may_move = resident.is_none() && align <= ALIGN;
    // SAFETY: the caller owns `block`, which came from this module.
    let moved = may_move.then(|| unsafe { move_pages(block, room, size) });
    let moved = if let Some(moved) = moved.flatten() {
        moved.as_ptr()
    } else {
        let fresh = resident.or_else(|| growing(true));
        let fresh = fresh.unwrap_or_else(|| alloc_aligned_as(size, align, data));
        // SAFETY: `fresh` is null or new. Both blocks have at least the smaller of the two sizes,
        // and the caller passes ownership of `block`.
        unsafe { move_to(fresh, block, room.min(size)) }
    };
    if moved.is_null() && size <= room {
        set_errno(before);
        note_larger();
        // SAFETY: the block has not moved, and has room for `size` bytes.
        return unsafe { keep(block, size) };
    }
    moved
}

/// Returns whether a block of `room` bytes is a run that is not [sparse](arena::is_sparse).
///
/// # Safety
///
/// `block` came from this module, was not freed, and has `room` bytes.
// Not inlined, so that its variables take no stack in `resize`, which goes deep.
#[inline(never)]
unsafe fn is_full_run(block: *mut u8, room: usize) -> bool {
    let offset = arena::offset_in_run(block);
    // SAFETY: the caller owns `block`, which `run_at` found to be this run.
    arena::run_at(block).is_some_and(|run| unsafe { !arena::is_sparse(run, offset + room) })
}

/// Allocates a run, if possible with room behind it, for a block that is likely to grow again.
/// Unless `fresh` is true, at least half of the run is resident. Returns `None` if there is no such
/// run, or if the class of `size` checks its blocks.
// Not inlined, so that its variables take no stack in `resize`, which goes deep.
#[inline(never)]
fn alloc_growing(size: usize, fresh: bool) -> Option<*mut u8> {
    if size <= MAX_CLASS_SIZE && kmalloc::checks(kmalloc::class_of(size)) {
        return None;
    }
    let granules = arena::granules_for(size, COLOURED);
    let run = arena::alloc_growing_run(granules, arena::node_here(), COLOURED, fresh)?;
    // SAFETY: the run is new and in use.
    let block = unsafe { arena::block_of_run(run) }.as_ptr();
    // SAFETY: the block is new, and a run.
    counted::allocated_large(unsafe { usable_size(block) });
    counted::requested_large(size);
    sampled::made_large(block, size);
    Some(block)
}

/// Moves the pages of a block of `room` bytes to a block of `size` bytes. Returns `None`, and
/// changes nothing, if pages cannot move or if copying is cheaper.
///
/// # Safety
///
/// `block` came from this module, and was not freed.
// Not inlined, so that its variables take no stack in `resize`, which goes deep.
#[inline(never)]
unsafe fn move_pages(block: *mut u8, room: usize, size: usize) -> Option<NonNull<u8>> {
    // SAFETY: the caller owns `block`, which came from this module.
    let before = unsafe { usable_size(block) };
    let moved = if let Some(run) = arena::run_at(block) {
        let pays = room >= MIN_MOVED && size > room;
        // SAFETY: `run_at` found that the block is this run, and the caller owns it.
        pays.then(|| unsafe { arena::move_run(run, size) })?
    } else {
        let pays = room.min(size) >= MIN_MOVED && arena::huge_size(block).is_some();
        pays.then(|| {
            slab::make_room(size.saturating_sub(room));
            // SAFETY: `huge_size` found the block, and the caller owns it.
            slab::or_reclaim_for(size, || unsafe { arena::resize_huge(block, size) })
        })?
    }?;
    // SAFETY: `moved` is the caller's block at its new address.
    let after = unsafe { usable_size(moved.as_ptr()) };
    counted::resized_large(before, after);
    if moved.as_ptr() != block {
        sampled::made_large(moved.as_ptr(), size);
    }
    Some(moved)
}

/// Copies `size` bytes from `block` to `fresh`, and frees `block`. Does nothing if `fresh` is null.
///
/// # Safety
///
/// Both blocks have `size` bytes, the caller owns both, and `block` is not used any more.
unsafe fn move_to(fresh: *mut u8, block: *mut u8, size: usize) -> *mut u8 {
    if !fresh.is_null() {
        // SAFETY: the caller promises that both blocks have `size` bytes, and two blocks do not
        // overlap.
        unsafe { fresh.copy_from_nonoverlapping(block, size) };
        // SAFETY: the caller passes ownership of `block`, whose content is copied.
        unsafe { free(block) };
    }
    fresh
}
