//! Gives free memory back when memory is short: near a limit, and before an allocation fails.
//!
//! Free objects lie in sheaves and barns, and empty slabs with their cache. No other size can use
//! them there. So a thread whose allocation was refused memory gives all free objects and empty
//! slabs that it can reach without stopping another CPU to the arena, gives the memory of free runs
//! to the system, and tries once more.
//!
//! The caller holds no lock. A signal handler may have interrupted a frame that holds some: what
//! such a lock protects stays.

use super::{cache, idle, percpu};
use crate::page::{self, budget};

/// Calls `alloc`, and once more after a reclaim if `alloc` failed because it was refused memory. An
/// allocation that failed because a lock could not be had is not tried again.
///
/// The caller holds no lock. Costs two loads if nothing fails.
pub fn or_reclaim<R>(mut alloc: impl FnMut() -> Option<R>) -> Option<R> {
    let before = budget::refusals();
    let first = alloc();
    // Another thread's refusal costs a reclaim that may help that thread.
    if first.is_some() || budget::refusals() == before {
        return first;
    }
    reclaim();
    let _lifted = budget::lift();
    alloc()
}

/// Gives back everything free that this thread can reach without stopping another CPU: the sheaves
/// of the CPU on which it runs, all barns, all empty slabs, the memory of free runs, and below a
/// limit also that of free pages in slabs.
///
/// Takes the lock of each node of each cache, and makes a system call for each free run and for
/// each run of free pages that were used since the last time. The caller holds no lock.
#[cold]
#[inline(never)]
pub(crate) fn reclaim() {
    idle::take_all_here();
    cache::for_each(|cache| {
        let nodes = cache.nodes().iter();
        nodes.for_each(|node| {
            node.give_all(cache);
            // Pages do not count against the limits of `ulimit`.
            if budget::is_limited() {
                // Bit by bit: the node's lock is free in between.
                while node.purge_more(cache, 0) {}
            }
        });
    });
    page::trim();
    budget::reclaimed();
}

/// Makes room for a block of `size` bytes that gets a mapping of its own: gives back what is free
/// if the process would come near a limit. The caller holds no lock. A few loads else. Ticks,
/// because such a block takes no other slow path.
pub fn make_room(size: usize) {
    percpu::tick();
    if budget::near(page::held() as usize, size) && budget::is_possible(size) {
        reclaim();
    }
}

/// Calls `alloc` for a block of `size` bytes with a mapping of its own, which fails only if the
/// system has no memory or a limit forbids; if it fails, gives back everything free, addresses and
/// all, and calls it once more. A block larger than the machine, or than a limit, is not tried
/// again.
///
/// The caller holds no lock.
pub fn or_reclaim_for<R>(size: usize, mut alloc: impl FnMut() -> Option<R>) -> Option<R> {
    let first = alloc();
    if first.is_some() || !budget::is_possible(size) {
        return first;
    }
    reclaim();
    page::unmap_free();
    alloc()
}
