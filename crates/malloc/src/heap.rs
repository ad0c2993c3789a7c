//! Blocks of any size and alignment: classes, runs, huge blocks.
//!
//! The fast paths read four words that lie beside the units ([`kmalloc::beside`]). Before the first
//! allocation, while calls are counted, and on the atomic backend the words are 0, so that every call
//! takes the slow path by the comparison that it makes anyway.

use crate::{count, init};
use core::alloc::Layout;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU16, AtomicUsize};
use pinfold::page::{self, GRANULE, GRANULE_SHIFT, HUGE, LARGE};
use pinfold::slab;
use pinfold::slab::kmalloc::{self, CLASS_MOST, SIZES, SMALL_MOST};

/// What every block is aligned to: the largest fundamental alignment of the ABIs served.
pub(crate) const ALIGN: usize = 16;

/// Shorter runs are moved by copying: moving pages may cost the process two mappings.
const MOVED_LEAST: usize = 2 << 20;

/// One more than the largest size that has a class; 0 while the fast paths are closed.
const LIMIT: usize = 0;
/// Where the window of the page layer begins, and how many granules of it have entries
/// ([`page::watch_count`]); the count is 0 while the fast paths are closed.
const WINDOW: usize = 1;
const COUNT: usize = 2;

/// The word `at` of those that the fast paths read.
#[inline(always)]
fn word(at: usize) -> &'static AtomicUsize {
    &kmalloc::beside()[at]
}

/// Opens the fast paths, once everything behind them works, if the backend has restartable sequences.
pub(crate) fn open_fast_paths() {
    if !kmalloc::has_fast_paths() {
        return;
    }
    // The page layer writes the count first. A reader that sees it without the window finds the
    // block beyond the count, and takes the slow path.
    if let Some(window) = page::watch_count(word(COUNT)) {
        word(WINDOW).store(window, Relaxed);
        // Release pairs with the acquire in `alloc_fast`: a thread that sees the limit sees the
        // offsets that the critical sections use.
        word(LIMIT).store(SMALL_MOST + 1, Release);
    }
}

/// The page map's entry for `block`; 0, which is no class's, while the fast paths are closed.
#[inline(always)]
fn entry_fast(block: *mut u8) -> u16 {
    // Acquire pairs with the release in the page layer, which comes after the offsets that the
    // critical sections use were written.
    let count = word(COUNT).load(Acquire);
    let window = word(WINDOW).load(Relaxed);
    let granule = (block as usize).wrapping_sub(window) >> GRANULE_SHIFT;
    if granule >= count {
        return 0;
    }
    // SAFETY: granules below the count have entries.
    unsafe { &*((window + 2 * granule) as *const AtomicU16) }.load(Relaxed)
}

/// A block of `size` bytes from the CPU's sheaf; null when the sheaf is empty, the size has no
/// class, or the fast paths are closed.
#[inline(always)]
pub(crate) fn alloc_fast(size: usize) -> *mut u8 {
    // Acquire pairs with the release in `open_fast_paths`.
    if size < word(LIMIT).load(Acquire) {
        // SAFETY: the fast paths are open, so `has_fast_paths` has returned true.
        return unsafe { kmalloc::alloc_fast(size) };
    }
    null_mut()
}

/// A block of `size` bytes; null, with errno ENOMEM, when there is no memory.
#[inline(always)]
pub(crate) fn alloc(size: usize) -> *mut u8 {
    let block = alloc_fast(size);
    if block.is_null() {
        return alloc_slow(size);
    }
    block
}

// The slow paths are `extern "C"`, which cannot unwind, so that the fast paths may end in a jump to them.
#[cold]
#[inline(never)]
extern "C" fn alloc_slow(size: usize) -> *mut u8 {
    init::ready();
    let block = alloc_any(size, false);
    count::requested(block, size);
    block
}

/// A block from wherever its size belongs; with `zeroed` it reads as zeroes.
fn alloc_any(size: usize, zeroed: bool) -> *mut u8 {
    if size <= CLASS_MOST {
        let class = kmalloc::class_of(size);
        let block = match zeroed {
            true => kmalloc::alloc_zeroed(class, size),
            false => kmalloc::alloc(size),
        };
        if !block.is_null() {
            count::allocated_class(class);
            return block;
        }
    } else if let Some(block) = alloc_run(size, zeroed) {
        return block;
    }
    // Huge sizes; others in a signal handler that interrupted the allocator, which has no locks to wait for here.
    alloc_huge(size, ALIGN)
}

/// A run for `size` bytes below [`HUGE`].
fn alloc_run(size: usize, zeroed: bool) -> Option<*mut u8> {
    if size >= HUGE {
        return None;
    }
    let granules = size.div_ceil(GRANULE).max(1);
    let node = page::node_here();
    let run = slab::or_reclaim(|| page::alloc_run(granules, node, LARGE, false))?;
    Some(run_of(run, size, zeroed))
}

/// A block of `size` bytes that is a run just allocated; with `zeroed` it reads as zeroes.
fn run_of(run: page::Run, size: usize, zeroed: bool) -> *mut u8 {
    let block = run.start.as_ptr();
    if zeroed && !run.zeroed {
        // SAFETY: the run is ours and at least that large.
        unsafe { block.write_bytes(0, size) };
    }
    count::allocated_large(size.div_ceil(GRANULE).max(1) * GRANULE);
    block
}

/// A mapping of its own, or for want of addresses a run of the arena.
fn alloc_huge(size: usize, align: usize) -> *mut u8 {
    slab::make_room(size);
    if let Some(block) = slab::or_reclaim_for(size, || page::alloc_huge(size, align)) {
        count::allocated_large(page::huge_size(block.as_ptr()).unwrap_or(size));
        return block.as_ptr();
    }
    if align <= GRANULE && size <= isize::MAX as usize {
        let granules = size.div_ceil(GRANULE).max(1);
        if let Some(run) = page::alloc_run(granules, page::node_here(), LARGE, false) {
            // Callers expect zeroes of huge blocks.
            return run_of(run, size, true);
        }
    }
    set_errno(libc::ENOMEM);
    count::failed();
    null_mut()
}

/// As [`alloc`], reading as zeroes.
#[inline]
pub(crate) fn alloc_zeroed(size: usize) -> *mut u8 {
    let block = alloc_fast(size);
    if block.is_null() {
        return alloc_zeroed_slow(size);
    }
    // SAFETY: the block is ours and at least that large.
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

/// A block at a multiple of `align`, a power of two.
#[inline]
pub(crate) fn alloc_aligned(size: usize, align: usize) -> *mut u8 {
    if align <= ALIGN {
        return alloc(size);
    }
    alloc_aligned_slow(size, align, false)
}

/// As [`alloc_aligned`], reading as zeroes. Memory fresh from the system is not written to.
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
    } else if let Some(run) = page::alloc_aligned_run(size, align, page::node_here()) {
        return run_of(run, size, zeroed);
    }
    alloc_huge(size, align)
}

/// Takes a block back; null is none.
///
/// # Safety
///
/// The block came from this module and nobody uses it any more. An address that did not ends the process.
#[inline(always)]
pub(crate) unsafe fn free(block: *mut u8) {
    let entry = entry_fast(block);
    if kmalloc::class_of_entry(entry).is_some() {
        // SAFETY: the page map says the class; the caller gives the block up; the fast paths are open.
        unsafe { kmalloc::free_fast(block, entry) };
    } else {
        // SAFETY: the caller's promise.
        unsafe { free_slow(block) };
    }
}

/// # Safety
///
/// As for [`free`].
#[cold]
#[inline(never)]
unsafe extern "C" fn free_slow(block: *mut u8) {
    let Some(start) = NonNull::new(block) else {
        return;
    };
    let entry = page::entry(block as usize);
    if let Some(class) = kmalloc::class_of_entry(entry) {
        count::freed_class(class);
        // SAFETY: the page map says the class; the caller gives the block up.
        unsafe { kmalloc::free_class(block, class) };
    } else if entry == LARGE && (block as usize).is_multiple_of(GRANULE) {
        // SAFETY: the entry stands at the first granule of a run that is one block.
        let size = unsafe { page::run_size(start) };
        count::freed_large(size);
        // SAFETY: the caller gives the block up.
        unsafe { page::free_run(start) };
    } else {
        let size = count::active().then(|| page::huge_size(block)).flatten();
        // SAFETY: the caller gives the block up; an address that is no block is refused.
        if !unsafe { page::free_huge(block) } {
            not_ours("free", block);
        }
        count::freed_large(size.unwrap_or(0));
    }
}

/// Bytes that may be used of a block; 0 for null.
///
/// # Safety
///
/// The block came from this module.
pub(crate) unsafe fn usable_size(block: *mut u8) -> usize {
    let Some(start) = NonNull::new(block) else {
        return 0;
    };
    let entry = page::entry(block as usize);
    if let Some(class) = kmalloc::class_of_entry(entry) {
        // Behind what was asked for a debugged block has its red zone.
        // SAFETY: the caller's promise; the page map says the class.
        return unsafe { kmalloc::requested(block, class) }.unwrap_or(SIZES[class]);
    }
    if entry == LARGE && (block as usize).is_multiple_of(GRANULE) {
        // SAFETY: the entry stands at the first granule of a run that is one block.
        return unsafe { page::run_size(start) };
    }
    page::huge_size(block).unwrap_or_else(|| not_ours("size of", block))
}

/// Grows or shrinks a block; null, with errno ENOMEM and the block as it was, when there is no
/// memory to grow it. A block that keeps at least half of its room stays where it is.
///
/// # Safety
///
/// The block came from this module; it is not null.
pub(crate) unsafe fn realloc(block: *mut u8, size: usize) -> *mut u8 {
    count::reallocated();
    // SAFETY: the caller's promise.
    let room = unsafe { usable_size(block) };
    let whole = class_at(block).map_or(room, |class| SIZES[class]);
    if size <= whole && size >= whole / 2 {
        // SAFETY: the caller's promise.
        return unsafe { keep(block, size) };
    }
    // SAFETY: the caller's promise.
    if unsafe { resize_in_place(block, size) } {
        return block;
    }
    // SAFETY: the caller's promise.
    unsafe { resize(block, ALIGN, room, size) }
}

/// Grows or shrinks a block made for `layout`. The block stays where it is only if `size` bytes
/// would get one as large.
///
/// # Safety
///
/// The block came from this module with `layout`.
pub(crate) unsafe fn realloc_exact(block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
    count::reallocated();
    let stays = match class_at(block) {
        Some(class) => kmalloc::class_of_aligned(size, layout.align()) == Some(class),
        None => {
            // SAFETY: the caller's promise.
            let room = unsafe { usable_size(block) };
            // SAFETY: as above.
            (size <= room && room - size < GRANULE) || unsafe { resize_in_place(block, size) }
        }
    };
    if stays {
        // SAFETY: the caller's promise.
        return unsafe { keep(block, size) };
    }
    // SAFETY: the caller's promise.
    unsafe { resize(block, layout.align(), layout.size(), size) }
}

/// Makes a block that is a run as long as `size` bytes need, where it is; false if it is no run, if
/// it would become a block of another kind, and if there is no room behind it.
///
/// # Safety
///
/// The block came from this module.
unsafe fn resize_in_place(block: *mut u8, size: usize) -> bool {
    let Some(start) = NonNull::new(block).filter(|_| is_run(block)) else {
        return false;
    };
    // SAFETY: the page map says that the block is a run.
    let shrinks = size <= unsafe { page::run_size(start) };
    if (shrinks && size <= CLASS_MOST) || size >= HUGE {
        return false;
    }
    let granules = size.div_ceil(GRANULE);
    // SAFETY: the page map says that the block is a run; the caller's promise.
    let (before, resized) = unsafe { (page::run_size(start), page::resize_run(start, granules)) };
    if resized {
        count::resized_large(before, granules * GRANULE);
    }
    resized
}

/// Whether a block is a run.
fn is_run(block: *mut u8) -> bool {
    page::entry(block as usize) == LARGE && (block as usize).is_multiple_of(GRANULE)
}

/// The class of a block, unless it is a run or huge.
fn class_at(block: *mut u8) -> Option<usize> {
    kmalloc::class_of_entry(page::entry(block as usize))
}

/// A block, now used for `size` bytes, which it has room for.
///
/// # Safety
///
/// The block came from this module.
unsafe fn keep(block: *mut u8, size: usize) -> *mut u8 {
    if let Some(class) = class_at(block) {
        // SAFETY: the caller's promise; the page map says the class.
        unsafe { kmalloc::set_requested(block, class, size) };
    }
    block
}

/// Moves a block of `room` bytes to one of `size` bytes at a multiple of `align`. A block that
/// cannot be moved to a smaller one stays.
///
/// # Safety
///
/// The block came from this module, and has `room` bytes of content.
unsafe fn resize(block: *mut u8, align: usize, room: usize, size: usize) -> *mut u8 {
    // SAFETY: errno is the calling thread's own.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the caller's promise. The kernel moves pages to any page.
    let moved = (align <= ALIGN).then(|| unsafe { move_pages(block, room, size) });
    let moved = if let Some(moved) = moved.flatten() {
        moved.as_ptr()
    } else {
        let grows = size > room && room >= GRANULE && size < HUGE && align <= ALIGN;
        let fresh = if grows { alloc_growing(size) } else { None };
        let fresh = fresh.unwrap_or_else(|| alloc_aligned(size, align));
        // SAFETY: the caller's promise; the new block is ours.
        unsafe { move_to(fresh, block, room.min(size)) }
    };
    if moved.is_null() && size <= room {
        set_errno(errno);
        // SAFETY: the caller's promise.
        return unsafe { keep(block, size) };
    }
    moved
}

/// A block for `size` bytes that are likely to become more: a run with room behind it. Not in a
/// cache that checks its blocks.
fn alloc_growing(size: usize) -> Option<*mut u8> {
    if size <= CLASS_MOST && kmalloc::checks(kmalloc::class_of(size)) {
        return None;
    }
    let block = page::alloc_growing_run(size, page::node_here())?.as_ptr();
    count::allocated_large(size.div_ceil(GRANULE) * GRANULE);
    count::requested(block, size);
    Some(block)
}

/// Moves a block of `room` bytes to one of `size` bytes by moving its pages; `None`, and nothing
/// done, if that cannot be, or copying is cheaper.
///
/// # Safety
///
/// The block came from this module.
unsafe fn move_pages(block: *mut u8, room: usize, size: usize) -> Option<NonNull<u8>> {
    let start = NonNull::new(block)?;
    // SAFETY: the caller's promise.
    let before = unsafe { usable_size(block) };
    let moved = if is_run(block) {
        let pays = room >= MOVED_LEAST && size > room;
        // SAFETY: the page map says that the block is a run; the caller's promise.
        pays.then(|| unsafe { page::move_run(start, size) })?
    } else {
        let pays = room >= HUGE && size >= HUGE && page::huge_size(block).is_some();
        pays.then(|| {
            slab::make_room(size.saturating_sub(room));
            // SAFETY: a huge block of the caller's.
            slab::or_reclaim_for(size, || unsafe { page::resize_huge(block, size) })
        })?
    }?;
    // SAFETY: the block is the caller's.
    count::resized_large(before, unsafe { usable_size(moved.as_ptr()) });
    Some(moved)
}

/// Copies `size` bytes to `fresh` and frees `block`; does nothing if `fresh` is null.
///
/// # Safety
///
/// Both blocks are that large; `block` is the caller's.
unsafe fn move_to(fresh: *mut u8, block: *mut u8, size: usize) -> *mut u8 {
    if !fresh.is_null() {
        // SAFETY: the caller's promise; two blocks do not overlap.
        unsafe { fresh.copy_from_nonoverlapping(block, size) };
        // SAFETY: the caller gives it up.
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

/// Ends the process: the address was never a block, or is none any more.
#[cold]
fn not_ours(what: &str, block: *mut u8) -> ! {
    let entry = page::entry(block as usize);
    match kmalloc::name_of_entry(entry) {
        _ if entry == LARGE => pinfold::abort(format_args!(
            "{what} {block:p}: the address lies inside a block"
        )),
        Some(name) => pinfold::abort(format_args!(
            "{what} {block:p}: the address belongs to cache {name}, not to malloc"
        )),
        None => pinfold::abort(format_args!(
            "{what} {block:p}: the address is no block of malloc's, or was freed before"
        )),
    }
}
