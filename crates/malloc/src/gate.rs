//! The fast paths of malloc and free, and when they are open.
//!
//! The fast paths read words beside the CPUs' memory ([`kmalloc::beside`]). They compare the
//! size or the address with these words in any case. While a word is 0, the comparison sends every
//! call to the slow path: the fast path is *closed*.
//!
//! | word | is 0 |
//! |---|---|
//! | [`LIMIT`] | while the next two are 0, while much idle memory waits for a tick, while samples are taken, and after another process has stored 0 |
//! | [`WINDOW`], [`COUNT`] | before the first allocation, while calls are counted, without rseq |
//! | [`COUNTED`] | while no samples are taken, while the two words above are 0, and after another process has stored 0 |
//!
//! Idle memory goes back to the system at a *tick* (`slab::tick`). In a program with one thread,
//! the slow paths tick. If all calls of such a program are fast, no call would tick. So the arenas
//! close the fast path of malloc while they keep much idle memory ([`arena::needs_ticks`]).
//! The calls of malloc then tick ([`tick_if_needed`]), until little is kept.
//!
//! A process that may trace this one stores 0 to [`LIMIT`] and [`COUNTED`] when it has a request
//! (`pinfold::segment`). The calls of malloc then tick, serve the request, and open the path again.

use crate::profiled;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicU16, AtomicUsize, fence};
use pinfold::arena::{self, GRANULE_SHIFT};
use pinfold::segment;
use pinfold::slab;
use pinfold::slab::kmalloc::{self, MAX_SMALL_SIZE};

/// Word 0: one more than the largest size of the fast path of malloc.
const LIMIT: usize = 0;
/// Words 1 and 2: the address of the arenas' window, and how many of its granules have entries
/// ([`arena::watch_count`]).
const WINDOW: usize = 1;
const COUNT: usize = 2;
/// Word 3: the largest size of the path that counts bytes for a heap profile.
const COUNTED: usize = 3;

/// Returns word number `at` of the four words that the fast paths read.
#[inline(always)]
fn word(at: usize) -> &'static AtomicUsize {
    &kmalloc::beside()[at]
}

/// Opens the fast paths if `kmalloc` has any. Returns false if there is no memory for the page map.
pub(crate) fn open() -> bool {
    if !kmalloc::has_fast_paths() {
        return true;
    }
    // An arena writes the count before this thread writes the window. A free that sees the
    // count without the window finds its block beyond the count, and takes the slow path.
    let opened = arena::watch_count(word(COUNT)).map(|window| {
        // Release pairs with the acquire in `alloc_behind`.
        word(WINDOW).store(window, Release);
        open_malloc();
        arena::close_while_ticks_are_needed(word(LIMIT));
        show();
    });
    opened.is_some()
}

/// Shows the addresses of two words in the segment, so that a process that may trace this one can
/// close the paths of malloc when it has a request.
fn show() {
    if let Some(segment) = segment::current() {
        for (gate, at) in segment.gates.iter().zip([LIMIT, COUNTED]) {
            let at = core::ptr::from_ref(word(at)) as u64;
            // Release pairs with the acquire of a process that reads the segment.
            gate.store(at, Release);
        }
    }
}

fn open_malloc() {
    // Release pairs with the acquire in `alloc_fast`: a thread that sees the limit also sees the
    // offsets that its critical section uses.
    word(LIMIT).store(MAX_SMALL_SIZE + 1, SeqCst);
    // A thread that starts samples stores its flag first, and then 0 here. Either this thread reads
    // the flag, or the other's 0 is stored last. Both ways the gate ends up closed.
    fence(SeqCst);
    if profiled::is_on() {
        word(LIMIT).store(0, Relaxed);
    }
}

/// Closes the fast path of malloc. The caller has set the flag that keeps it closed.
pub(crate) fn close_malloc() {
    fence(SeqCst);
    word(LIMIT).store(0, Relaxed);
}

/// Opens or closes the path of malloc that counts bytes for a heap profile.
pub(crate) fn count_bytes(on: bool) {
    // Acquire pairs with the release in `open`, and the release with the acquire in
    // `alloc_counted`: a thread that sees this word also sees the offsets that its critical section
    // uses.
    let is_open = on && word(WINDOW).load(Acquire) != 0;
    let limit = if is_open { MAX_SMALL_SIZE } else { 0 };
    // Pairs with the fence in `open_counted_again`: the caller has cleared the flag before.
    fence(SeqCst);
    word(COUNTED).store(limit, Release);
}

/// Opens the path of malloc that counts bytes, after another process has closed it.
fn open_counted_again() {
    count_bytes(true);
    // A thread that ends samples clears the flag first, and then stores 0. Either this thread sees
    // that the flag is clear, or the other's 0 is stored last.
    fence(SeqCst);
    if !profiled::is_on() {
        word(COUNTED).store(0, Relaxed);
    }
}

/// Opens the fast path of malloc after the profile has ended, unless another reason keeps it
/// closed.
pub(crate) fn open_malloc_again() {
    if is_closed(LIMIT) && !arena::needs_ticks() {
        open_malloc();
    }
}

/// While much idle memory waits for a tick, or after another process has closed the path that is
/// in use, ticks if a tick is due. Opens the path again once little memory waits. Called by each
/// slow path of malloc. Returns whether the path was closed for ticks.
#[inline]
pub(crate) fn tick_if_needed() -> bool {
    let is_closed = match profiled::is_on() {
        true => is_closed(COUNTED),
        false => is_closed(LIMIT),
    };
    let closed = is_closed || arena::needs_ticks();
    if closed {
        tick();
    }
    closed
}

/// Returns whether the path of malloc whose word is number `at` is closed. If two threads change
/// whether ticks are needed at the same time, it may be closed although they are not needed.
fn is_closed(at: usize) -> bool {
    word(at).load(Relaxed) == 0 && word(WINDOW).load(Relaxed) != 0
}

#[cold]
fn tick() {
    if !slab::tick() {
        return;
    }
    if !arena::update_needs_ticks() && is_closed(LIMIT) {
        open_malloc();
    }
    if profiled::is_on() && is_closed(COUNTED) {
        open_counted_again();
    }
}

/// Returns the page map's entry for `block`. While the fast paths are closed, returns 0, the entry
/// of an address without a block.
#[inline(always)]
pub(crate) fn entry_fast(block: *mut u8) -> u16 {
    // Acquire pairs with the arenas' release store of the count. A thread that sees the count
    // also sees the entries, and the offsets that its critical section uses.
    let count = word(COUNT).load(Acquire);
    let window = word(WINDOW).load(Relaxed);
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
pub(crate) fn alloc_fast(size: usize) -> *mut u8 {
    // Acquire pairs with the release in `open_malloc`: a thread that sees the limit also sees the
    // offsets that its critical section uses.
    if size < word(LIMIT).load(Acquire) {
        // SAFETY: the limit was not 0, so `has_fast_paths` has returned true in `open`.
        return unsafe { kmalloc::alloc_fast(size) };
    }
    null_mut()
}

/// Allocates like [`alloc_fast`], for a caller behind the closed fast path. Returns null where
/// there are no fast paths.
#[inline(always)]
pub(crate) fn alloc_behind(size: usize) -> *mut u8 {
    // Acquire pairs with the release in `open`: a thread that sees the window also sees the offsets
    // that its critical section uses.
    if size <= MAX_SMALL_SIZE && word(WINDOW).load(Acquire) != 0 {
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
pub(crate) fn alloc_counted(size: usize) -> *mut u8 {
    // Acquire pairs with the release in `count_bytes`.
    if size.wrapping_sub(1) < word(COUNTED).load(Acquire) {
        // SAFETY: the word was not 0, so `has_fast_paths` has returned true in `open`.
        return unsafe { kmalloc::alloc_counted(size) };
    }
    null_mut()
}
