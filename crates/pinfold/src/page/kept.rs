//! How much of the memory that the arenas hold is not in use, and how much of it may be.

use super::{GRANULE, budget, huge_total};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// Granules in runs that are in use.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Granules in runs that are one block each.
static LARGE_USED: AtomicUsize = AtomicUsize::new(0);
/// Granules in dirty free runs.
static DIRTY: AtomicUsize = AtomicUsize::new(0);
/// Granules in runs that are in use, whose holder keeps them without using them just now.
static KEPT: AtomicUsize = AtomicUsize::new(0);

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

/// Counts granules that their holder keeps without using them just now, until [`unkeep`].
pub(crate) fn keep(granules: usize) {
    KEPT.fetch_add(granules, Relaxed);
}

/// Takes back what [`keep`] counted.
pub(crate) fn unkeep(granules: usize) {
    KEPT.fetch_sub(granules, Relaxed);
}

/// Bytes in runs whose page map entry is [`LARGE`](super::LARGE): blocks of their own.
pub fn large_in_use() -> usize {
    LARGE_USED.load(Relaxed) * GRANULE
}

/// Bytes in use: in runs, less what holders keep, and in huge blocks.
fn in_use() -> usize {
    let granules = USED.load(Relaxed).saturating_sub(KEPT.load(Relaxed));
    granules * GRANULE + huge_total()
}

/// Granules that are kept beyond what may be.
pub(super) fn excess() -> usize {
    let kept = DIRTY.load(Relaxed) + KEPT.load(Relaxed);
    kept.saturating_sub(budget::kept_most(in_use()) / GRANULE)
}

/// Returns whether more memory is kept than may be. A caller that sees true calls
/// [`relieve`](super::relieve), and gives back what it keeps.
pub(crate) fn too_much_dirty() -> bool {
    excess() > 0
}
