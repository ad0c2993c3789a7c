//! Gives free memory back when memory is short: near a limit, and before an allocation fails.
//!
//! Free objects lie in sheaves, barns and empty slabs, where no other size can use them. So a
//! process can run out of memory while it has free memory of another size. To prevent that, a
//! thread whose allocation was refused memory:
//!
//! 1. gives all free objects and empty slabs that it can reach without stopping another CPU to the
//!    arena;
//! 2. gives the memory of free runs to the system;
//! 3. tries the allocation once more.
//!
//! The caller holds no lock. A signal handler may have interrupted a frame that holds locks: what
//! those locks protect stays.

use super::{cache, idle, percpu};
use crate::page::{self, budget};

/// Calls `alloc`. If `alloc` fails because it was refused memory, gives back what is free and calls
/// `alloc` once more. An allocation that failed because a lock could not be taken is not tried
/// again.
///
/// The caller holds no lock. Costs two loads if nothing fails.
pub fn or_reclaim<R>(mut alloc: impl FnMut() -> Option<R>) -> Option<R> {
    let before = budget::refusals();
    let first = alloc();
    // The refusal may be another thread's. Then the reclaim may help that thread.
    if first.is_some() || budget::refusals() == before {
        return first;
    }
    reclaim();
    let _lifted = budget::lift();
    alloc()
}

/// Gives back everything free that this thread can reach without stopping another CPU:
///
/// * the sheaves of the CPU on which it runs, all barns and all empty slabs;
/// * if there is a limit, pages of free objects in slabs;
/// * the memory of free runs.
///
/// Takes the lock of each node of each cache. Makes a system call for each free run, and for each
/// range of free pages that were used since the last time. The caller holds no lock.
#[cold]
#[inline(never)]
pub(crate) fn reclaim() {
    idle::take_all_here();
    cache::for_each(|cache| {
        let nodes = cache.nodes().iter();
        nodes.for_each(|node| {
            node.give_all(cache);
            // Only under a limit. A refusal for another reason does not depend on pages, but on
            // mapped addresses.
            if budget::is_limited() {
                // In small steps, so that other threads get the node's lock in between.
                while node.purge_more(cache, 0) {}
            }
        });
    });
    page::trim();
    budget::reclaimed();
}

/// Gives back what is free if a block of `size` bytes with a mapping of its own would bring the
/// process near a limit. The caller holds no lock. Otherwise costs a few loads.
///
/// Also ticks, because such a block takes no other slow path.
pub fn make_room(size: usize) {
    percpu::tick();
    if budget::near(page::held() as usize, size) && budget::is_possible(size) {
        reclaim();
    }
}

/// Calls `alloc` for a block of `size` bytes with a mapping of its own. If `alloc` fails, gives
/// back everything free, addresses too, and calls `alloc` once more. A block larger than the
/// machine's memory, or than a hard limit, is not tried again.
///
/// The caller holds no lock. Such an `alloc` fails only if the system has no memory or a limit
/// forbids the block.
pub fn or_reclaim_for<R>(size: usize, mut alloc: impl FnMut() -> Option<R>) -> Option<R> {
    let first = alloc();
    if first.is_some() || !budget::is_possible(size) {
        return first;
    }
    reclaim();
    page::unmap_free();
    alloc()
}
