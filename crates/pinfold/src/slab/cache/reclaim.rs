//! Gives free memory back to the system when memory is short: near a limit, and before an
//! allocation fails.
//!
//! Free objects lie in sheaves, barns and empty slabs, where no other size can use them. So a
//! process could run out of memory while it has free memory of another size. To prevent that, a
//! thread whose allocation was refused memory takes these steps:
//!
//! 1. It gives the memory of free objects and empty slabs back to the arena. It leaves out what it
//!    could reach only by stopping another CPU.
//! 2. It gives the memory of the arena's free runs back to the system.
//! 3. It tries the allocation once more.
//!
//! The caller holds no lock. But if the caller is a signal handler, the interrupted frame may hold
//! locks. The memory that these locks protect stays where it is.

use super::registry;
use crate::arena::{self, budget};
use crate::slab::cpu::deferred;
use crate::slab::cpu::idle;
use crate::slab::cpu::sheaf_units;
use crate::topology::facts;
use pinfold_rseq::FenceError;

/// Calls `alloc`. If `alloc` fails because it was refused memory, gives free memory back and calls
/// `alloc` once more. If `alloc` fails because it could not take a lock, returns `None` at once.
///
/// The caller holds no lock. Costs one load if nothing fails.
pub fn or_reclaim<R>(mut alloc: impl FnMut() -> Option<R>) -> Option<R> {
    let before = budget::refusals();
    let first = alloc();
    // The system may have refused memory to another thread at the same time, not to this one. Then
    // the reclaim is not needed here, but may help that thread.
    if first.is_some() || budget::refusals() == before {
        return first;
    }
    reclaim();
    let _lifted = budget::lift();
    alloc()
}

/// Gives back all free memory that this thread can reach without stopping another CPU:
///
/// * the sheaves of the CPU on which it runs, all barns and all empty slabs;
/// * if there is a limit, pages of free objects in slabs;
/// * the memory of free runs.
///
/// Takes the lock of each node of each cache. Makes a system call for each free run, and for each
/// range of free pages, if it was used since the last time. The caller holds no lock.
#[cold]
#[inline(never)]
pub(crate) fn reclaim() {
    // Without a limit, a refusal depends on how many addresses are mapped, and purging leaves pages
    // mapped.
    give_back(budget::is_limited());
}

/// Gives back all free memory that this thread can reach without stopping another CPU, and pages of
/// free objects in slabs even without a limit. Returns how many bytes went back, including those
/// that other threads gave back during the call.
///
/// Makes only system calls that malloc makes. The caller holds no lock.
#[cold]
pub fn trim_here() -> usize {
    let before = arena::returned();
    give_back(true);
    arena::returned().saturating_sub(before) as usize
}

/// Does what [`shrink_all`] does. Returns `None`, and gives nothing back, if some CPUs are
/// isolated: another process must not interrupt them. Also returns `None` if the kernel cannot
/// fence.
#[cold]
pub fn trim_everywhere() -> Option<usize> {
    (!facts::any_quiet()).then(shrink_all)?.ok()
}

fn give_back(with_pages: bool) {
    idle::take_all_here();
    registry::for_each(|cache| {
        cache.give_all();
        if with_pages {
            cache.parts().for_each(|part| {
                // Each call does a small step, so that other threads get the part's lock in
                // between.
                // The first pass begins where the last tick has ended.
                for _pass in 0..2 {
                    while part.purge_more(cache) {}
                }
            });
        }
    });
    arena::trim();
    budget::reclaimed();
}

/// Makes room for a block of `size` bytes with a mapping of its own. If the block would bring the
/// process near a limit, gives all free memory back. Otherwise costs a few loads. The caller holds
/// no lock.
///
/// Also calls `tick`, because the allocation of such a block takes no other slow path.
pub fn make_room(size: usize) {
    sheaf_units::tick();
    if budget::near(arena::held() as usize, size) && budget::is_possible(size) {
        reclaim();
    }
}

/// Calls `alloc` for a block of `size` bytes with a mapping of its own. If `alloc` fails, gives
/// back all free memory, unmaps the free addresses, and calls `alloc` once more. Returns `None` at
/// once if the block is larger than the machine's memory, or than a hard limit.
///
/// The caller holds no lock. `alloc` fails only if the system has no memory or a limit forbids the
/// block.
pub fn or_reclaim_for<R>(size: usize, mut alloc: impl FnMut() -> Option<R>) -> Option<R> {
    let first = alloc();
    if first.is_some() || !budget::is_possible(size) {
        return first;
    }
    reclaim();
    arena::unmap_free();
    alloc()
}

/// Gives all free memory of all caches back to the system, including objects in CPUs' sheaves, and
/// whole pages of free objects in slabs that are in use. Returns how many bytes went back,
/// including those that other threads gave back during the call. Interrupts each CPU that runs a
/// thread of this process.
///
/// # Errors
///
/// [`FenceError`], if the kernel cannot fence. The CPUs' sheaves then stay; the rest is given back.
pub fn shrink_all() -> Result<usize, FenceError> {
    let before = arena::returned();
    let drained = sheaf_units::drain(|_| true);
    deferred::progress();
    registry::for_each(|cache| {
        cache.shrink();
        cache.parts().for_each(|part| {
            // Each call does a small step, so that other threads get the part's lock in between.
            while part.purge_more(cache) {}
        });
    });
    arena::trim();
    drained.map(|()| arena::returned().saturating_sub(before) as usize)
}
