//! Memory for the allocator's own structures: descriptors, units, sheaves.
//!
//! This memory is zeroed, and never goes back to the system, so that a thread may read a structure
//! that another thread has just given up. Small structures share a chunk of 256 KiB. The first
//! structures of a process share a static chunk of 16 KiB, so that a small program maps no chunk.

use crate::lock::{Lock, Rank, Word};
use crate::sys;
use core::alloc::Layout;
use core::cell::UnsafeCell;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// Bytes asked from the system at a time.
const CHUNK: usize = 256 << 10;

struct Chunk {
    next: *mut u8,
    end: *mut u8,
}

// SAFETY: no other code refers to the memory between the two pointers. The holder of the lock may
// use it on any thread.
unsafe impl Send for Chunk {}

/// The first chunk.
#[repr(C, align(64))]
struct First(UnsafeCell<[u8; FIRST_SIZE]>);

// SAFETY: only the holder of the lock hands out bytes of the chunk, each to one owner.
unsafe impl Sync for First {}

const FIRST_SIZE: usize = 16 << 10;
static FIRST: First = First(UnsafeCell::new([0; FIRST_SIZE]));

static CHUNK_IN_USE: Lock<Chunk> = Lock::new(
    Rank::Metadata,
    Chunk {
        next: FIRST.0.get().cast(),
        end: FIRST.0.get().cast::<u8>().wrapping_add(FIRST_SIZE),
    },
);

/// Returns zeroed memory that is never unmapped. Returns `None` if the system has no memory, in a
/// signal handler that may not wait for the lock, and while a handler that interrupted a holder of
/// the lock forks.
///
/// Waits while another fork has the lock. A thread in malloc must not wait for a fork. So it calls
/// this function only while it holds a lock that a fork takes earlier. Until that lock is released,
/// no fork can take the lock of the chunk.
pub(crate) fn alloc(layout: Layout) -> Option<NonNull<u8>> {
    let page = sys::page_size();
    if layout.size() >= CHUNK / 4 || layout.align() > page {
        let size = layout.size().next_multiple_of(page);
        return sys::map_aligned(size, layout.align()).inspect(|at| note(at.as_ptr(), size));
    }
    let mut chunk = CHUNK_IN_USE.lock_or_divert_inside()?;
    let fits = |chunk: &Chunk| {
        let start = (chunk.next as usize).next_multiple_of(layout.align());
        (start + layout.size() <= chunk.end as usize).then_some(start)
    };
    let start = match fits(&chunk) {
        Some(start) => start,
        None => {
            let fresh = sys::map_memory(CHUNK)?.as_ptr();
            note(fresh, CHUNK);
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

/// The bytes mapped for the allocator's own structures, without the CPUs' units of counters.
static MAPPED: AtomicU64 = AtomicU64::new(0);

/// A mapping of this module's.
struct Mapping {
    start: AtomicUsize,
    size: AtomicUsize,
}

/// The mappings, and how many there are. There may be more than the table has room for.
static MAPPINGS: [Mapping; 1024] = [const {
    Mapping {
        start: AtomicUsize::new(0),
        size: AtomicUsize::new(0),
    }
}; 1024];
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Counts a new mapping, and enters it into the table.
fn note(start: *mut u8, size: usize) {
    mapped(size);
    // Relaxed: a reader may miss what other threads have just mapped.
    if let Some(mapping) = MAPPINGS.get(COUNT.fetch_add(1, Relaxed)) {
        mapping.start.store(start as usize, Relaxed);
        mapping.size.store(size, Relaxed);
    }
}

/// Returns whether `address` lies in memory for the allocator's own structures. Returns `None` if
/// that is not known, because there are too many mappings. Reads the whole table.
pub fn is_metadata(address: usize) -> Option<bool> {
    let mappings = MAPPINGS.get(..COUNT.load(Relaxed))?;
    let first = FIRST.0.get() as usize;
    let is_inside = |start: usize, size| address.wrapping_sub(start) < size;
    let is_mapped =
        |mapping: &Mapping| is_inside(mapping.start.load(Relaxed), mapping.size.load(Relaxed));
    Some(is_inside(first, FIRST_SIZE) || mappings.iter().any(is_mapped))
}

/// Counts `bytes` that were mapped for the allocator's own structures.
pub(super) fn mapped(bytes: usize) {
    MAPPED.fetch_add(bytes as u64, Relaxed);
}

/// Returns how many bytes are mapped for the allocator's own structures, without the CPUs' units of
/// counters. Counts a CPU's unit of sheaves whole, although only its used pages take memory. One
/// load.
pub(super) fn total() -> u64 {
    MAPPED.load(Relaxed)
}

/// Returns the lock's word, for a fork.
pub(super) fn lock_word() -> &'static Word {
    CHUNK_IN_USE.word()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::register_fork;
    use crate::lock::{hold, while_held};
    use crate::topology::cgroup;
    use core::time::Duration;

    #[test]
    fn who_holds_a_later_lock_does_not_wait_for_the_chunk() {
        register_fork();
        let is_refused = while_held(lock_word(), Duration::from_secs(20), || {
            let _later = hold(cgroup::lock_word());
            alloc(Layout::new::<u64>()).is_none()
        });
        assert_eq!(is_refused, Some(true));
    }
}
