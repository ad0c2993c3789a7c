//! The fast paths of malloc and free, and when they are open.
//!
//! The module [`mode`] has the words that open and close them.
//!
//! A process that may trace this one stores 0 to `limit` and `counted` of [`mode::Paths`] when it
//! has a request (`segment`). The calls of malloc then take their slow paths, which serve the
//! request at a *tick* (`slab::tick`) and open the path again ([`serve_if_closed`]).

use super::mode::{self, paths};
use crate::arena::{self, GRANULE, GRANULE_SHIFT};
use crate::segment;
use crate::shepherd;
use crate::slab;
use crate::slab::kmalloc::{self, MAX_SMALL_SIZE};
use core::ptr::null_mut;
use core::sync::atomic::AtomicU16;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Opens the fast paths if `kmalloc` has any. Returns false if there is no memory for the page map.
pub(super) fn open() -> bool {
    if !kmalloc::has_fast_paths() {
        return true;
    }
    // An arena writes the count before this thread writes the window. A free that sees the
    // count without the window finds its block beyond the count, and takes the slow path.
    let opened = arena::watch_count(paths().count).map(|window| {
        // Release pairs with the acquires in `alloc_behind` and `mode::count_bytes`.
        paths().window.store(window, Release);
        mode::open_malloc();
        show();
    });
    opened.is_some()
}

/// Writes the addresses of two words into the segment. Through them, a process that may trace this
/// one can close malloc's fast paths when it has a request.
fn show() {
    if let Some(segment) = segment::current() {
        let words = [paths().limit, paths().counted];
        for (gate, word) in segment.gates.iter().zip(words) {
            let at = core::ptr::from_ref(word) as u64;
            // Release pairs with the acquire of a process that reads the segment.
            gate.store(at, Release);
        }
    }
}

/// After another process has closed the path that is in use, ticks, and opens the path again.
/// Called by each slow path of malloc.
#[inline]
pub(super) fn serve_if_closed() {
    let is_closed = match mode::is_sampling() {
        true => mode::is_counted_closed(),
        // Malloc's fast path is always closed after the first scope.
        false if mode::has_scopes() => return serve_if_called(),
        false => mode::is_malloc_closed(),
    };
    if is_closed {
        serve();
    }
}

/// Ticks if another process has a request. For a program with scopes, in which malloc's fast path
/// is always closed.
#[inline]
pub(super) fn serve_if_called() {
    if shepherd::is_called() {
        serve();
    }
}

#[cold]
fn serve() {
    // If no tick is due, the path stays closed, and the next call tries again.
    if !slab::tick() {
        return;
    }
    if mode::is_malloc_closed() {
        mode::open_malloc();
    }
    if mode::is_sampling() && mode::is_counted_closed() {
        mode::open_counted_again();
    }
}

/// Returns the page map's entry for `block`. While the fast paths are closed, returns 0, the entry
/// of an address without a block.
#[inline(always)]
pub(super) fn entry_fast(block: *mut u8) -> u16 {
    // Acquire pairs with the arenas' release store of the count. A thread that sees the count
    // also sees the entries, and the offsets that its critical section uses.
    let count = paths().count.load(Acquire);
    let window = paths().window.load(Relaxed);
    let granule = (block as usize).wrapping_sub(window) >> GRANULE_SHIFT;
    if granule >= count {
        return 0;
    }
    // SAFETY: `granule` is below the count, so its entry is mapped.
    unsafe { &*((window + 2 * granule) as *const AtomicU16) }.load(Relaxed)
}

/// Allocates a block of `size` bytes from the CPU's sheaf. Returns null if the sheaf is empty, if
/// `size` is above 32 KiB, or while the fast path is closed.
#[inline(always)]
pub fn alloc_fast(size: usize) -> *mut u8 {
    // Acquire pairs with the release in `mode::open_malloc`: a thread that sees the limit also sees
    // the offsets that its critical section uses.
    if size < paths().limit.load(Acquire) {
        // SAFETY: the limit was not 0, so `has_fast_paths` has returned true in `open`.
        return unsafe { kmalloc::alloc_fast(size) };
    }
    null_mut()
}

/// Allocates a block at a multiple of `align`, a power of two, as [`alloc_fast`] does. Also returns
/// null if `align` is 64 KiB or more.
#[inline(always)]
pub(super) fn alloc_fast_aligned(size: usize, align: usize) -> *mut u8 {
    // Acquire pairs with the release in `mode::open_malloc`, as in `alloc_fast`.
    if size < paths().limit.load(Acquire) && align < GRANULE {
        // SAFETY: the limit was not 0, so `has_fast_paths` has returned true in `open`. The limit
        // is at most one above `MAX_SMALL_SIZE`. `align` is below 64 KiB.
        return unsafe { kmalloc::alloc_fast_aligned(size, align) };
    }
    null_mut()
}

/// Allocates a block without pointers, as [`alloc_fast`] does.
#[inline(always)]
pub(super) fn alloc_fast_data(size: usize) -> *mut u8 {
    // Acquire pairs with the release in `mode::open_malloc`, as in `alloc_fast`.
    if size < paths().limit.load(Acquire) {
        // SAFETY: the limit was not 0, so `has_fast_paths` has returned true in `open`.
        return unsafe { kmalloc::alloc_fast_data(size) };
    }
    null_mut()
}

/// Allocates like [`alloc_fast`], for a slow path that was called because the fast path is closed.
/// Also returns null where there are no fast paths.
#[inline(always)]
pub(super) fn alloc_behind(size: usize) -> *mut u8 {
    // Acquire pairs with the release in `open`: a thread that sees the window also sees the offsets
    // that its critical section uses.
    if size <= MAX_SMALL_SIZE && paths().window.load(Acquire) != 0 {
        // SAFETY: the window was not 0, so `has_fast_paths` has returned true in `open`.
        return unsafe { kmalloc::alloc_fast(size) };
    }
    null_mut()
}

/// Allocates a block of `size` bytes, and counts its bytes for the heap profile.
///
/// Returns null if the CPU's sheaf is empty, if a sample is due, if `size` is 0 or above 32 KiB,
/// while no samples are taken, and where there are no fast paths.
#[inline(always)]
pub(super) fn alloc_counted(size: usize) -> *mut u8 {
    // Acquire pairs with the release in `mode::count_bytes`.
    if size.wrapping_sub(1) < paths().counted.load(Acquire) {
        // SAFETY: the word was not 0, so `has_fast_paths` has returned true in `open`.
        return unsafe { kmalloc::alloc_counted(size) };
    }
    null_mut()
}
