//! Gives free memory back to the system: runs that have been free for long, and all of it on
//! request.

use super::arena::{arena_of, purge, purge_all, unmap_clean};
use super::{is_lock_held, kept, returned};
use crate::{nodes, sys};

/// How long a free run stays dirty, in milliseconds. Peers: mimalloc 1 s, jemalloc 10 s.
const DIRTY_FOR: u32 = 450;
/// Clean runs shorter than this stay mapped: each that is unmapped may cost two mappings.
const UNMAP_LEAST: u32 = 16;

/// Purges what has been dirty for long on one node.
pub(super) fn purge_aged(node: usize, now: u32) {
    if let Some(mut arena) = arena_of(node).lock_or_divert(is_lock_held) {
        arena.take_back(node);
        let until = now.wrapping_sub(DIRTY_FOR);
        drop(purge(arena, node, |free| {
            let run = free.take_oldest(Some(until));
            run.inspect(|run| kept::aged(run.1 as usize))
        }));
    }
}

/// Purges what has been dirty for long on all nodes; for the shepherd.
pub(crate) fn purge_all_aged() {
    let now = sys::coarse_milliseconds() as u32;
    kept::forget(now);
    (0..nodes::count()).for_each(|node| purge_aged(node, now));
}

/// Gives all free memory of every arena back to the system, but of those that another thread has
/// locked for a fork; returns how many bytes. A system call per free run.
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

/// Gives all free memory back as [`trim`] does, and unmaps what it can, so that it counts for no
/// limit on data or addresses; returns how many bytes were unmapped.
///
/// For when the system has no more memory.
pub fn unmap_free() -> usize {
    trim();
    (0..nodes::count())
        .map(|node| unmap_clean(node, UNMAP_LEAST))
        .sum()
}
