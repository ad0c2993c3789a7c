//! Blocks of any size and alignment: objects of a size class, runs, huge blocks.

use crate::gate::{self, alloc_fast, entry_fast};
use crate::{count, init};
use core::alloc::Layout;
use core::ptr::{NonNull, null_mut};
use pinfold::arena::{self, GRANULE, HUGE, LARGE};
use pinfold::slab;
use pinfold::slab::kmalloc::{self, MAX_CLASS_SIZE, SIZES};

/// Alignment of every block: the largest fundamental alignment of x86-64 and aarch64.
pub(crate) const ALIGN: usize = 16;

/// Runs below this size are moved by copying, because moving pages may cost the process two
/// mappings.
const MIN_MOVED: usize = 2 << 20;

/// Allocates a block of `size` bytes. Returns null with errno ENOMEM if there is no memory.
#[inline(always)]
pub(crate) fn alloc(size: usize) -> *mut u8 {
    let block = alloc_fast(size);
    if block.is_null() {
        return alloc_slow(size);
    }
    block
}

// The slow paths are `extern "C"` and cannot unwind, so the fast paths may end in a jump to them.
#[cold]
#[inline(never)]
extern "C" fn alloc_slow(size: usize) -> *mut u8 {
    init::ready();
    gate::tick_if_needed();
    let block = alloc_any(size, false);
    count::requested(block, size);
    block
}

/// Allocates a block of `size` bytes from its class, the arena or the system. Zeroes the block if
/// `zeroed` is true.
fn alloc_any(size: usize, zeroed: bool) -> *mut u8 {
    if size <= MAX_CLASS_SIZE {
        let class = kmalloc::class_of(size);
        let block = match zeroed {
            true => kmalloc::alloc_zeroed(class, size),
            false => kmalloc::alloc_missed(class, size),
        };
        if !block.is_null() {
            count::allocated_class(class);
            return block;
        }
    } else if let Some(block) = alloc_run(size, zeroed) {
        return block;
    }
    // Also reached for small sizes in a signal handler that interrupted the allocator: a mapping of
    // its own needs no lock.
    alloc_huge(size, ALIGN)
}

/// Allocates a run for `size` bytes. Returns `None` if `size` is [`HUGE`] or more, or if there is
/// no memory.
fn alloc_run(size: usize, zeroed: bool) -> Option<*mut u8> {
    if size >= HUGE {
        return None;
    }
    let granules = size.div_ceil(GRANULE).max(1);
    let node = arena::node_here();
    let run = slab::or_reclaim(|| arena::alloc_run(granules, node, LARGE, false))?;
    Some(run_of(run, size, zeroed))
}

/// Makes a block of `size` bytes from a new run. Zeroes the block if `zeroed` is true.
fn run_of(run: arena::Run, size: usize, zeroed: bool) -> *mut u8 {
    let block = run.start.as_ptr();
    if zeroed && !run.zeroed {
        // SAFETY: the run is new, so this thread owns it, and it has at least `size` bytes.
        unsafe { block.write_bytes(0, size) };
    }
    count::allocated_large(size.div_ceil(GRANULE).max(1) * GRANULE);
    block
}

/// Allocates a block as a mapping of its own, or as a run of the arena if the system refuses the
/// mapping.
fn alloc_huge(size: usize, align: usize) -> *mut u8 {
    slab::make_room(size);
    if let Some(block) = slab::or_reclaim_for(size, || arena::alloc_huge(size, align)) {
        count::allocated_large(arena::huge_size(block.as_ptr()).unwrap_or(size));
        return block.as_ptr();
    }
    if align <= GRANULE && size <= isize::MAX as usize {
        let granules = size.div_ceil(GRANULE).max(1);
        if let Some(run) = arena::alloc_run(granules, arena::node_here(), LARGE, false) {
            // A new mapping reads as zeroes, and callers rely on zeroes. So the run is zeroed too.
            return run_of(run, size, true);
        }
    }
    set_errno(libc::ENOMEM);
    count::failed();
    null_mut()
}

/// Allocates a zeroed block of `size` bytes. Returns null with errno ENOMEM if there is no memory.
#[inline]
pub(crate) fn alloc_zeroed(size: usize) -> *mut u8 {
    let block = alloc_fast(size);
    if block.is_null() {
        return alloc_zeroed_slow(size);
    }
    // SAFETY: `alloc_fast` has just handed out the block, which has at least `size` bytes.
    unsafe { block.write_bytes(0, size) };
    block
}

#[cold]
#[inline(never)]
extern "C" fn alloc_zeroed_slow(size: usize) -> *mut u8 {
    init::ready();
    let block = alloc_any(size, true);
    count::requested(block, size);
    block
}

/// Allocates a block at a multiple of `align`, a power of two. Returns null with errno ENOMEM if
/// there is no memory.
#[inline]
pub(crate) fn alloc_aligned(size: usize, align: usize) -> *mut u8 {
    if align <= ALIGN {
        return alloc(size);
    }
    alloc_aligned_slow(size, align, false)
}

/// Allocates a zeroed block like [`alloc_aligned`]. Does not write to a large block whose memory
/// comes zeroed from the system.
#[inline]
pub(crate) fn alloc_aligned_zeroed(size: usize, align: usize) -> *mut u8 {
    if align <= ALIGN {
        return alloc_zeroed(size);
    }
    alloc_aligned_slow(size, align, true)
}

#[inline(never)]
fn alloc_aligned_slow(size: usize, align: usize, zeroed: bool) -> *mut u8 {
    init::ready();
    let block = alloc_aligned_any(size, align, zeroed);
    count::requested(block, size);
    block
}

fn alloc_aligned_any(size: usize, align: usize, zeroed: bool) -> *mut u8 {
    if let Some(class) = kmalloc::class_of_aligned(size, align) {
        let block = match zeroed {
            true => kmalloc::alloc_zeroed(class, size),
            false => kmalloc::alloc_class(class),
        };
        if !block.is_null() {
            count::allocated_class(class);
            return block;
        }
    } else if align <= GRANULE {
        if let Some(block) = alloc_run(size, zeroed) {
            return block;
        }
    } else if let Some(run) = arena::alloc_aligned_run(size, align, arena::node_here()) {
        return run_of(run, size, zeroed);
    }
    alloc_huge(size, align)
}

/// Frees `block`. Does nothing if `block` is null. Ends the process if the page map has no block
/// there.
///
/// # Safety
///
/// `block` is null or came from this module, and is not used any more.
#[inline(always)]
pub(crate) unsafe fn free(block: *mut u8) {
    let entry = entry_fast(block);
    if kmalloc::class_of_entry(entry).is_some() {
        // SAFETY: `entry_fast` found the entry of a class, so the fast paths are open. The caller
        // passes ownership of the block, which is of this class.
        unsafe { kmalloc::free_fast(block, entry) };
    } else {
        // SAFETY: the caller passes ownership of `block`, which is null or came from this module.
        unsafe { free_slow(block) };
    }
}

/// # Safety
///
/// `block` is null or came from this module, and is not used any more.
#[cold]
#[inline(never)]
unsafe extern "C" fn free_slow(block: *mut u8) {
    let Some(start) = NonNull::new(block) else {
        return;
    };
    let entry = arena::entry(block as usize);
    if let Some(class) = kmalloc::class_of_entry(entry) {
        count::freed_class(class);
        // SAFETY: the page map says that the block is of this class, and the caller passes
        // ownership of the block.
        unsafe { kmalloc::free_class(block, class) };
    } else if entry == LARGE && (block as usize).is_multiple_of(GRANULE) {
        // SAFETY: only the first granule of a run that is one block has the entry `LARGE`, so a run
        // begins at the block.
        let size = unsafe { arena::run_size(start) };
        count::freed_large(size);
        // SAFETY: the run is one block, and the caller passes ownership of it.
        unsafe { arena::free_run(start) };
    } else {
        let size = count::active().then(|| arena::huge_size(block)).flatten();
        // SAFETY: the caller passes ownership of the block, and `free_huge` refuses other
        // addresses.
        if !unsafe { arena::free_huge(block) } {
            not_ours("free", block);
        }
        count::freed_large(size.unwrap_or(0));
    }
}

/// Returns how many bytes of `block` the program may use. Returns 0 if `block` is null.
///
/// # Safety
///
/// `block` is null, or came from this module and was not freed.
pub(crate) unsafe fn usable_size(block: *mut u8) -> usize {
    let Some(start) = NonNull::new(block) else {
        return 0;
    };
    let entry = arena::entry(block as usize);
    if let Some(class) = kmalloc::class_of_entry(entry) {
        // In a debugged block the red zone follows the bytes that the program asked for.
        // SAFETY: the caller owns the block, and the page map names its class.
        return unsafe { kmalloc::requested(block, class) }.unwrap_or(SIZES[class]);
    }
    if entry == LARGE && (block as usize).is_multiple_of(GRANULE) {
        // SAFETY: only the first granule of a run that is one block has the entry `LARGE`, so a run
        // begins at the block.
        return unsafe { arena::run_size(start) };
    }
    arena::huge_size(block).unwrap_or_else(|| not_ours("size of", block))
}

/// Grows or shrinks a block. A block that still uses half of its room stays where it is. Returns
/// null with errno ENOMEM, and leaves the block unchanged, if there is no memory to grow it.
///
/// # Safety
///
/// `block` came from this module, is not null and was not freed.
pub(crate) unsafe fn realloc(block: *mut u8, size: usize) -> *mut u8 {
    count::reallocated();
    // SAFETY: the caller owns `block`, which came from this module.
    let room = unsafe { usable_size(block) };
    let whole = class_at(block).map_or(room, |class| SIZES[class]);
    if size <= whole && size >= whole / 2 {
        // SAFETY: the caller owns `block`, which has room for `size` bytes.
        return unsafe { keep(block, size) };
    }
    // SAFETY: the caller owns `block`, which came from this module.
    if unsafe { resize_in_place(block, size) } {
        return block;
    }
    // SAFETY: the caller owns `block`, which has `room` bytes.
    unsafe { resize(block, ALIGN, room, size) }
}

/// Grows or shrinks a block that was made for `layout`. The block stays where it is only if a new
/// block of `size` bytes would be as large.
///
/// # Safety
///
/// `block` came from this module for `layout`, and was not freed.
pub(crate) unsafe fn realloc_exact(block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
    count::reallocated();
    let stays = match class_at(block) {
        Some(class) => kmalloc::class_of_aligned(size, layout.align()) == Some(class),
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
    // SAFETY: the caller owns `block`, which has `layout.size()` bytes of content.
    unsafe { resize(block, layout.align(), layout.size(), size) }
}

/// Resizes a run in place for `size` bytes. Returns false if the block is not a run, if `size`
/// bytes need another kind of block, or if no free room lies behind the run.
///
/// # Safety
///
/// `block` came from this module, and was not freed.
unsafe fn resize_in_place(block: *mut u8, size: usize) -> bool {
    let Some(start) = NonNull::new(block).filter(|_| is_run(block)) else {
        return false;
    };
    // SAFETY: `is_run` found that the block is a run.
    let shrinks = size <= unsafe { arena::run_size(start) };
    if (shrinks && size <= MAX_CLASS_SIZE) || size >= HUGE {
        return false;
    }
    let granules = size.div_ceil(GRANULE);
    // SAFETY: `is_run` found that the block is a run, and the caller owns it.
    let (before, resized) = unsafe { (arena::run_size(start), arena::resize_run(start, granules)) };
    if resized {
        count::resized_large(before, granules * GRANULE);
    }
    resized
}

/// Returns whether a block is a run.
fn is_run(block: *mut u8) -> bool {
    arena::entry(block as usize) == LARGE && (block as usize).is_multiple_of(GRANULE)
}

/// Returns the class of a block. Returns `None` for a run and for a huge block.
fn class_at(block: *mut u8) -> Option<usize> {
    kmalloc::class_of_entry(arena::entry(block as usize))
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

/// Moves the content of a block of `room` bytes to a block of `size` bytes. If there is no memory
/// for a smaller block, keeps the block.
///
/// # Safety
///
/// `block` came from this module, was not freed, and has `room` bytes of content.
unsafe fn resize(block: *mut u8, align: usize, room: usize, size: usize) -> *mut u8 {
    // SAFETY: errno is the calling thread's own.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the caller owns `block`. The kernel may move the pages to any page address, so a
    // block with a larger alignment is copied below instead.
    let moved = (align <= ALIGN).then(|| unsafe { move_pages(block, room, size) });
    let moved = if let Some(moved) = moved.flatten() {
        moved.as_ptr()
    } else {
        let grows = size > room && room >= GRANULE && size < HUGE && align <= ALIGN;
        let fresh = if grows { alloc_growing(size) } else { None };
        let fresh = fresh.unwrap_or_else(|| alloc_aligned(size, align));
        // SAFETY: `fresh` is null or new. Both blocks have at least the smaller of the two sizes,
        // and the caller passes ownership of `block`.
        unsafe { move_to(fresh, block, room.min(size)) }
    };
    if moved.is_null() && size <= room {
        set_errno(errno);
        // SAFETY: the block has not moved, and has room for `size` bytes.
        return unsafe { keep(block, size) };
    }
    moved
}

/// Allocates a run with room behind it, for a block that is likely to grow again. Returns `None` if
/// there is no such run, or if the class of `size` checks its blocks.
fn alloc_growing(size: usize) -> Option<*mut u8> {
    if size <= MAX_CLASS_SIZE && kmalloc::checks(kmalloc::class_of(size)) {
        return None;
    }
    let block = arena::alloc_growing_run(size, arena::node_here())?.as_ptr();
    count::allocated_large(size.div_ceil(GRANULE) * GRANULE);
    count::requested(block, size);
    Some(block)
}

/// Moves the pages of a block of `room` bytes to a block of `size` bytes. Returns `None`, and
/// changes nothing, if pages cannot move or if copying is cheaper.
///
/// # Safety
///
/// `block` came from this module, and was not freed.
unsafe fn move_pages(block: *mut u8, room: usize, size: usize) -> Option<NonNull<u8>> {
    let start = NonNull::new(block)?;
    // SAFETY: the caller owns `block`, which came from this module.
    let before = unsafe { usable_size(block) };
    let moved = if is_run(block) {
        let pays = room >= MIN_MOVED && size > room;
        // SAFETY: `is_run` found that the block is a run, and the caller owns it.
        pays.then(|| unsafe { arena::move_run(start, size) })?
    } else {
        let pays = room >= HUGE && size >= HUGE && arena::huge_size(block).is_some();
        pays.then(|| {
            slab::make_room(size.saturating_sub(room));
            // SAFETY: `huge_size` found the block, and the caller owns it.
            slab::or_reclaim_for(size, || unsafe { arena::resize_huge(block, size) })
        })?
    }?;
    // SAFETY: `moved` is the caller's block at its new address.
    count::resized_large(before, unsafe { usable_size(moved.as_ptr()) });
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

/// Runs `f` and restores errno afterwards.
pub(crate) fn keep_errno<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: errno is the calling thread's own.
    let errno = unsafe { *libc::__errno_location() };
    let result = f();
    set_errno(errno);
    result
}

pub(crate) fn set_errno(errno: libc::c_int) {
    // SAFETY: errno is the calling thread's own.
    unsafe { *libc::__errno_location() = errno };
}

/// Ends the process, because no block begins at the address.
#[cold]
fn not_ours(what: &str, block: *mut u8) -> ! {
    let entry = arena::entry(block as usize);
    match kmalloc::name_of_entry(entry) {
        _ if entry == LARGE => pinfold::abort(format_args!(
            "{what} {block:p}: the address lies inside a block"
        )),
        Some(name) => pinfold::abort(format_args!(
            "{what} {block:p}: the address belongs to cache {name}, not to malloc"
        )),
        None => pinfold::abort(format_args!(
            "{what} {block:p}: the address is not a block of malloc's, or the block was freed before"
        )),
    }
}
