//! Memory for the allocator's own structures: descriptors, units, sheaves.
//!
//! It is zeroed, and never goes back to the system. Small structures share a chunk of 256 KiB.

use crate::lock::Lock;
use crate::sys;
use core::alloc::Layout;
use core::ptr::{NonNull, null_mut};

/// Bytes asked from the system at a time.
const CHUNK: usize = 256 << 10;

struct Chunk {
    next: *mut u8,
    end: *mut u8,
}

// SAFETY: plain addresses of memory that belongs to the holder of the lock.
unsafe impl Send for Chunk {}

static CHUNK_IN_USE: Lock<Chunk> = Lock::new(Chunk {
    next: null_mut(),
    end: null_mut(),
});

/// Returns zeroed memory that stays for good; `None` if the system has none, and in a signal
/// handler that interrupted this function.
///
/// Waits until a fork is over. A thread on its way through malloc calls this only while it holds a
/// lock that a fork takes before: then no fork has this one.
pub(crate) fn alloc(layout: Layout) -> Option<NonNull<u8>> {
    let page = sys::page_size();
    if layout.size() >= CHUNK / 4 || layout.align() > page {
        return sys::map_aligned(layout.size().next_multiple_of(page), layout.align());
    }
    let mut chunk = CHUNK_IN_USE.lock()?;
    let fits = |chunk: &Chunk| {
        let start = (chunk.next as usize).next_multiple_of(layout.align());
        (start + layout.size() <= chunk.end as usize).then_some(start)
    };
    let start = match fits(&chunk) {
        Some(start) if !chunk.next.is_null() => start,
        _ => {
            let fresh = sys::map_memory(CHUNK)?.as_ptr();
            *chunk = Chunk {
                next: fresh,
                end: fresh.wrapping_add(CHUNK),
            };
            fits(&chunk)?
        }
    };
    chunk.next = (start + layout.size()) as *mut u8;
    NonNull::new(start as *mut u8)
}

pub(super) fn is_lock_held(thread: u64) -> bool {
    CHUNK_IN_USE.is_held_by(thread)
}

pub(super) fn lock_for_fork() {
    CHUNK_IN_USE.lock_for_fork();
}

pub(super) fn unlock_after_fork() {
    CHUNK_IN_USE.unlock_after_fork();
}
