//! How much of the memory that the arenas hold is in use, and how much is kept beyond that.

use super::{GRANULE, budget, huge_total};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// Granules in runs that are in use.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Granules in runs that are one block each.
static LARGE_USED: AtomicUsize = AtomicUsize::new(0);
/// Granules in dirty free runs.
static DIRTY: AtomicUsize = AtomicUsize::new(0);
pub(super) fn use_more(granules: usize) {
    USED.fetch_add(granules, Relaxed);
}

pub(super) fn use_less(granules: usize) {
    USED.fetch_sub(granules, Relaxed);
}

pub(super) fn large_more(granules: usize) {
    LARGE_USED.fetch_add(granules, Relaxed);
}

pub(super) fn large_less(granules: usize) {
    LARGE_USED.fetch_sub(granules, Relaxed);
}

pub(super) fn more_dirty(granules: usize) {
    DIRTY.fetch_add(granules, Relaxed);
}

pub(super) fn less_dirty(granules: usize) {
    DIRTY.fetch_sub(granules, Relaxed);
}

/// Bytes in runs whose page map entry is [`LARGE`](super::LARGE): blocks of their own.
pub fn large_in_use() -> usize {
    LARGE_USED.load(Relaxed) * GRANULE
}

/// Dirty granules beyond what may be kept.
pub(super) fn excess() -> usize {
    let in_use = USED.load(Relaxed) * GRANULE + huge_total();
    DIRTY
        .load(Relaxed)
        .saturating_sub(budget::kept_most(in_use) / GRANULE)
}
