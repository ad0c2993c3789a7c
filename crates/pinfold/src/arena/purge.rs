//! Gives free memory back to the system: runs that exceed what may stay dirty, runs that have been
//! dirty for long, and on request all free runs.

use super::free_runs::FreeRuns;
use super::runs::{Arena, arena_of, set_aside};
use super::{
    GRANULE, State, address_of, budget, gave_back, huge, kept, numa, pageblocks, returned,
};
use crate::lock::Guard;
use crate::{nodes, spared, sys};
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

/// Milliseconds that a free run stays dirty. For comparison: mimalloc 1 s, jemalloc 10 s.
static DIRTY_FOR: AtomicU32 = AtomicU32::new(450);
/// The most milliseconds that a program can choose, so that a difference of two wrapping times is
/// never ambiguous.
const MOST_DIRTY_FOR: u32 = 86_400_000;
/// Granules of the shortest run that is unmapped, by `unmap_free` or because a purge failed.
/// Unmapping a run can split mappings, whose number the system limits.
const MIN_UNMAP: u32 = 16;

/// The most granules that a call purges in passing, if it does not free more itself: 256 KiB. The
/// kernel takes some tens of microseconds for them. A later call goes on.
pub(super) const PIECE: u32 = (256 << 10) / GRANULE as u32;
/// Purges in passing begin with runs of at least this many granules, if there are any: 4 MiB.
const LONG: u32 = (4 << 20) / GRANULE as u32;

/// Purges dirty runs beyond the number that may be kept, for a call that has freed `granules`, or
/// taken as many of fresh memory: at most twice as many and a [`PIECE`]. So the calls together
/// purge faster than there is more to purge, and none takes long. If the program or its user has
/// set a limit on dirty memory, purges until it is kept.
///
/// While a thread has isolated its CPU, does so only for a limit that the program or its user has
/// set.
pub(super) fn relieve(granules: u32) {
    if spared::any() && budget::dirty_limit().is_none() {
        return;
    }
    let mut left = match budget::dirty_limit() {
        Some(_) => u32::MAX,
        None => granules.saturating_mul(2).saturating_add(PIECE),
    };
    for node in 0..nodes::count() {
        left = left.min(kept::excess().try_into().unwrap_or(u32::MAX));
        if left == 0 {
            return;
        }
        if let Some(mut arena) = arena_of(node).lock_or_divert() {
            arena.take_parked(node, |_| true);
            drop(purge(arena, node, |free| {
                let head = (left > 0).then(|| free.long_or_oldest(LONG))??;
                let run = free.take_end(head, left);
                left = left.saturating_sub(run.1);
                Some(run)
            }));
        }
    }
}

/// Purges each run that `next` takes out of the free runs. Releases the lock while it purges.
/// Returns the lock, or `None` if the lock cannot be taken again, because another thread forks.
pub(super) fn purge(
    mut arena: Guard<'static, Arena>,
    node: usize,
    mut next: impl FnMut(&mut FreeRuns) -> Option<(u32, u32)>,
) -> Option<Guard<'static, Arena>> {
    while let Some((head, granules)) = next(&mut arena.free) {
        // The run counts as in use until it is purged. So does a run that is set aside.
        kept::less_dirty(node, granules as usize);
        kept::use_more(node, granules as usize);
        drop(arena);
        let size = granules as usize * GRANULE;
        pageblocks::refuse(head, granules);
        // SAFETY: the run is mapped. `next` took it out of the bins, so only this thread uses it.
        let clean = unsafe { sys::purge(address_of(head), size) };
        let Some(again) = arena_of(node).lock_or_divert() else {
            set_aside(address_of(head));
            return None;
        };
        arena = again;
        let state = if clean {
            State::Clean
        // Before Linux 5.18, locked memory goes back only if it is unmapped.
        // SAFETY: the run is mapped, and only this thread uses it. The lock is held.
        } else if granules >= MIN_UNMAP && unsafe { sys::try_unmap(address_of(head), size) } {
            arena.unmapped(node, granules);
            State::Absent
        } else {
            arena.take_in(node, head, granules);
            break;
        };
        kept::use_less(node, granules as usize);
        gave_back(node, size);
        numa::gave_back(node, size);
        arena.free.free(head, granules, state, 0);
    }
    Some(arena)
}

/// Purges as many granules as are dirty at the call. Returns what [`purge`] returns.
pub(super) fn purge_all(
    arena: Guard<'static, Arena>,
    node: usize,
) -> Option<Guard<'static, Arena>> {
    let mut left = kept::dirty(node);
    purge(arena, node, |free| {
        let head = (left > 0).then(|| free.oldest(None))??;
        let run = free.take_end(head, u32::MAX);
        left = left.saturating_sub(run.1 as usize);
        Some(run)
    })
}

/// Unmaps clean runs of at least `least` granules, so that they no longer count towards the limits
/// on data and addresses. Returns how many bytes it unmapped. The arena keeps the addresses.
fn unmap_clean(node: usize, least: u32) -> usize {
    let mut unmapped = 0;
    let Some(mut arena) = arena_of(node).lock_or_divert() else {
        return 0;
    };
    while let Some((head, granules)) = arena.free.take_clean(least) {
        let size = granules as usize * GRANULE;
        // SAFETY: the run is mapped, and `take_clean` took it out of the bins. The lock is held.
        let state = if unsafe { sys::try_unmap(address_of(head), size) } {
            unmapped += size;
            arena.unmapped(node, granules);
            State::Absent
        } else {
            State::Clean
        };
        arena.free.free(head, granules, state, 0);
        if state == State::Clean {
            break;
        }
    }
    unmapped
}

/// Purges at most about `most` granules of the runs that have been dirty for [`dirty_time`], unless
/// a thread has isolated its CPU: then they stay. Releases the lock.
pub(super) fn purge_aged(arena: Guard<'static, Arena>, node: usize, now: u32, most: u32) {
    let until = now.wrapping_sub(DIRTY_FOR.load(Relaxed));
    if spared::any() || arena.free.oldest(Some(until)).is_none() {
        return;
    }
    let mut left = most;
    drop(purge(arena, node, |free| {
        let head = (left > 0).then(|| free.oldest(Some(until)))??;
        let run = free.take_end(head, left);
        left = left.saturating_sub(run.1);
        Some(run)
    }));
}

/// Purges the runs of all nodes that have been dirty for [`dirty_time`]. For the shepherd.
pub(crate) fn purge_all_aged() {
    if !spared::any() || budget::dirty_limit().is_some() {
        huge::unmap_waiting();
    }
    let now = sys::coarse_milliseconds() as u32;
    kept::begin_period(now);
    for node in 0..nodes::count() {
        if let Some(mut arena) = arena_of(node).lock_or_divert() {
            arena.take_back(node);
            if !spared::any() {
                arena.take_parked(node, |_| true);
            }
            purge_aged(arena, node, now, u32::MAX);
        }
    }
}

/// Sets how long free memory stays with the process before it goes back to the system: 0.45 s by
/// default, and at most a day. Free memory beyond the share that may be kept goes back at once in
/// any case.
///
/// A tick gives old memory back, so it may stay for another half second. Costs one store.
///
/// ```
/// use core::time::Duration;
/// use pinfold::memory;
///
/// memory::set_dirty_time(Duration::from_secs(10));
/// assert_eq!(memory::dirty_time(), Duration::from_secs(10));
/// ```
pub fn set_dirty_time(time: Duration) {
    let most = u128::from(MOST_DIRTY_FOR);
    DIRTY_FOR.store(time.as_millis().min(most) as u32, Relaxed);
}

/// Returns whether free memory does not stay with the process at all.
pub(super) fn gives_back_at_once() -> bool {
    DIRTY_FOR.load(Relaxed) == 0
}

/// Returns how long free memory stays with the process before it goes back. Costs one load.
pub fn dirty_time() -> Duration {
    Duration::from_millis(u64::from(DIRTY_FOR.load(Relaxed)))
}

/// Gives all free memory of every arena back to the system, and the freed huge blocks that wait.
/// Leaves out an arena whose lock it cannot take, because another thread forks. Returns how many
/// bytes went back.
///
/// Costs a system call for each dirty run.
pub fn trim() -> usize {
    let before = returned();
    huge::unmap_waiting();
    for node in 0..nodes::count() {
        if let Some(mut arena) = arena_of(node).lock_or_divert() {
            arena.take_back(node);
            arena.take_parked(node, |_| true);
            drop(purge_all(arena, node));
        }
    }
    (returned() - before) as usize
}

/// Gives all free memory back as [`trim`] does, and unmaps clean runs, so that they no longer count
/// towards the limits on data and addresses. Returns how many bytes were unmapped.
///
/// For the moment when the system refuses more memory. Costs a system call for each free run.
pub fn unmap_free() -> usize {
    trim();
    (0..nodes::count())
        .map(|node| unmap_clean(node, MIN_UNMAP))
        .sum()
}
