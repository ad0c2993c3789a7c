//! Gives free memory back to the system: runs that have been dirty for long, and on request all
//! free runs.

use super::arena::{arena_of, purge, purge_all, unmap_clean};
use super::{is_lock_held, kept, returned};
use crate::{nodes, sys};

/// Milliseconds that a free run stays dirty. For comparison: mimalloc 1 s, jemalloc 10 s.
const DIRTY_FOR: u32 = 450;
/// Granules of the shortest clean run that `unmap_free` unmaps. Unmapping a run can split mappings,
/// whose number the system limits.
const UNMAP_LEAST: u32 = 16;

/// Purges the runs of one node that have been dirty for [`DIRTY_FOR`].
pub(super) fn purge_aged(node: usize, now: u32) {
    if let Some(mut arena) = arena_of(node).lock_or_divert(is_lock_held) {
        arena.take_back(node);
        let until = now.wrapping_sub(DIRTY_FOR);
        drop(purge(arena, node, kept::aged, |free| {
            free.take_oldest(Some(until))
        }));
    }
}

/// Purges the runs of all nodes that have been dirty for [`DIRTY_FOR`]. For the shepherd.
pub(crate) fn purge_all_aged() {
    let now = sys::coarse_milliseconds() as u32;
    kept::forget(now);
    (0..nodes::count()).for_each(|node| purge_aged(node, now));
}

/// Gives all free memory of every arena back to the system. Leaves out an arena whose lock it
/// cannot take, because another thread forks. Returns how many bytes went back.
///
/// Costs a system call for each dirty run.
pub fn trim() -> usize {
    let before = returned();
    for node in 0..nodes::count() {
        if let Some(mut arena) = arena_of(node).lock_or_divert(is_lock_held) {
            arena.take_back(node);
            drop(purge_all(arena, node));
        }
    }
    (returned() - before) as usize
}

/// Gives all free memory back as [`trim`] does, and unmaps clean runs, so that no limit on data or
/// addresses counts them. Returns how many bytes were unmapped.
///
/// For a system that has no more memory. Costs a system call for each free run.
pub fn unmap_free() -> usize {
    trim();
    (0..nodes::count())
        .map(|node| unmap_clean(node, UNMAP_LEAST))
        .sum()
}
