//! Scopes: malloc allocates from a heap of the program's, in one thread, for a while.
//!
//! The thread's tag says which heap. The fast path of malloc reads no tag, so the first scope
//! closes it for good (`mode::open_scopes`). The slow path then calls `alloc`.

use super::plain::{self, Ask};
use super::{counted, gate, mode, start};
use crate::heaps::{Heap, Refusal, State, free_any, here, tag, untag, usable_size};
use crate::sys::set_errno;
use core::ptr::{NonNull, null_mut};

/// Runs `f` in a scope of `heap`. `pinfold_malloc::scope` describes it. Returns `None` and does not
/// run `f` on a processor architecture without scopes, and if there is no memory to start the
/// allocator. Costs a few stores.
pub fn scope<R>(heap: &Heap, f: impl FnOnce() -> R) -> Option<R> {
    /// Ends the scope, also when `f` unwinds.
    struct End(u32);
    impl Drop for End {
        fn drop(&mut self) {
            untag(self.0);
        }
    }
    // SAFETY: `End` ends the scope while `heap` is borrowed.
    let _end = End(unsafe { enter(heap) }?);
    Some(f())
}

/// Begins a scope, for a caller that ends it by [`leave`]. Returns what to pass to `leave`. Returns
/// `None` where [`scope`] does.
///
/// # Safety
///
/// The thread ends the scope before the heap is destroyed.
pub unsafe fn enter(heap: &Heap) -> Option<u32> {
    start::ready();
    if !mode::is_started() {
        return None;
    }
    mode::open_scopes();
    tag(heap)
}

/// Ends a scope that [`enter`] began, or all scopes of the thread if `before` is 0.
pub fn leave(before: u32) {
    untag(before);
}

/// Allocates for a thread whose slow path was called after the first scope. Returns null with errno
/// ENOMEM if there is no memory, or the heap of the thread's scope may not hold more.
#[cold]
#[inline(never)]
pub(super) extern "C" fn alloc(size: usize) -> *mut u8 {
    gate::serve_if_called();
    if let Some(heap) = here() {
        let block = heap.alloc_fast(size);
        return match block.is_null() {
            true => alloc_from(heap, Ask::of(size)),
            false => block,
        };
    }
    let block = match mode::is_sampling() {
        true => gate::alloc_counted(size),
        false => gate::alloc_behind(size),
    };
    match block.is_null() {
        true => super::entry::alloc_unusual(size),
        false => block,
    }
}

/// Runs `f` outside of any scope of the calling thread.
pub fn outside<R>(f: impl FnOnce() -> R) -> R {
    let tag = pinfold_rseq::tag().unwrap_or(0);
    untag(0);
    let result = f();
    untag(tag);
    result
}

/// Allocates from the heap of the thread's scope. Returns `None` outside of a scope.
#[inline]
pub(super) fn alloc_ask(ask: Ask) -> Option<*mut u8> {
    mode::has_scopes().then_some(())?;
    here().map(|heap| alloc_from(heap, ask))
}

fn alloc_from(heap: &'static State, ask: Ask) -> *mut u8 {
    gate::serve_if_closed();
    match heap.alloc(ask.size, ask.align, ask.zeroed) {
        Ok(block) => block.as_ptr(),
        // Malloc still has ways, for example in a signal handler that interrupted the heap.
        Err(Refusal::Other) => plain::alloc(ask),
        Err(Refusal::Limit) => {
            set_errno(libc::ENOMEM);
            counted::failed();
            null_mut()
        }
    }
}

/// Resizes `block` in its heap. Returns null with errno ENOMEM, and leaves the block unchanged, if
/// the heap serves no larger block. Returns `None` if the block belongs to no heap.
///
/// # Safety
///
/// The caller owns `block`, which came from this module or from a heap. If the result is another
/// address, the caller uses only that one.
// Not inlined, so that its variables take no stack in `realloc::realloc`, which goes deep.
#[inline(never)]
pub(super) unsafe fn realloc(block: *mut u8, size: usize, align: usize) -> Option<*mut u8> {
    // SAFETY: the caller owns the block.
    let heap = unsafe { crate::heaps::state_of(block) }?;
    let block = NonNull::new(block)?;
    // SAFETY: the caller owns the block, which is this heap's.
    let resized = unsafe { heap.realloc(block, size, align) };
    Some(match resized {
        Ok(block) => block.as_ptr(),
        // SAFETY: the caller owns the block.
        Err(Refusal::Other) => unsafe { move_out(block, size, align) },
        Err(Refusal::Limit) => {
            set_errno(libc::ENOMEM);
            counted::failed();
            null_mut()
        }
    })
}

/// Moves a heap's block to a block of malloc, because the heap can serve no block now: another
/// thread forks, or this is a signal handler. Returns null with errno ENOMEM, and leaves the block
/// unchanged, if malloc can serve none either.
///
/// # Safety
///
/// The caller owns `block`, which is a heap's. If the result is not null, the caller uses only the
/// new address.
#[cold]
unsafe fn move_out(block: NonNull<u8>, size: usize, align: usize) -> *mut u8 {
    let fresh = plain::alloc(Ask {
        align: align.max(super::ALIGN),
        ..Ask::of(size)
    });
    if !fresh.is_null() {
        // SAFETY: the caller owns the block. Both blocks have the smaller of the two sizes, and two
        // blocks do not overlap.
        unsafe {
            let room = usable_size(block.as_ptr()).unwrap_or(0);
            fresh.copy_from_nonoverlapping(block.as_ptr(), room.min(size));
            free_any(block.as_ptr());
        }
    }
    fresh
}
