//! Giving free memory back to the system: what has been free for long, and all of it on request.

use super::arena::{Place, arena_at, places, purge};
use super::{is_lock_held, returned};
use crate::sys;

/// How long a free run stays dirty, in milliseconds. Peers: mimalloc 1 s, jemalloc 10 s.
const DIRTY_FOR: u32 = 450;

/// Purges what has been dirty for long in one arena.
pub(super) fn purge_aged(place: Place, now: u32) {
    if let Some(mut arena) = arena_at(place).lock_or_divert(is_lock_held) {
        arena.take_back(place);
        let until = now.wrapping_sub(DIRTY_FOR);
        drop(purge(arena, place, |free| free.take_oldest(Some(until))));
    }
}

/// Purges what has been dirty for long in all arenas; for the shepherd.
pub(crate) fn purge_all_aged() {
    let now = sys::coarse_milliseconds() as u32;
    places().for_each(|place| purge_aged(place, now));
}

/// Gives all free memory of every arena back to the system that can be reached without waiting for a
/// fork. A system call per free run.
pub(crate) fn purge_all() {
    for place in places() {
        if let Some(mut arena) = arena_at(place).lock_or_divert(is_lock_held) {
            arena.take_back(place);
            drop(purge(arena, place, |free| free.take_oldest(None)));
        }
    }
}

/// Gives all free memory of every arena back to the system; returns how many bytes. A system call per free run.
pub fn trim() -> usize {
    let before = returned();
    for place in places() {
        if let Some(arena) = arena_at(place).lock() {
            drop(purge(arena, place, |free| free.take_oldest(None)));
        }
    }
    (returned() - before) as usize
}
