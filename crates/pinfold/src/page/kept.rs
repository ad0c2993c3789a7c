//! How much of the arenas' memory is in use, and how much of it is dirty.
//!
//! Dirty memory is what the process keeps beyond its use. [`excess`] compares it with what
//! [`budget`](super::budget) allows. Runs of slabs count as in use, whatever is free in them.

use super::{GRANULE, budget, huge_total};
use crate::nodes::{self, MAX_NODES};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// A node's figures, in granules. The holder of the arena's lock writes them; any thread reads
/// them.
#[repr(align(64))]
struct Figures {
    /// In runs that are in use.
    used: AtomicUsize,
    /// In dirty free runs.
    dirty: AtomicUsize,
}

static FIGURES: [Figures; MAX_NODES] = [const {
    Figures {
        used: AtomicUsize::new(0),
        dirty: AtomicUsize::new(0),
    }
}; MAX_NODES];

/// Granules in runs that are one block each.
static LARGE_USED: AtomicUsize = AtomicUsize::new(0);

/// Adds to a figure of which the caller is the only writer.
fn add(figure: &AtomicUsize, granules: usize) {
    figure.store(figure.load(Relaxed).wrapping_add(granules), Relaxed);
}

fn sub(figure: &AtomicUsize, granules: usize) {
    add(figure, granules.wrapping_neg());
}

/// The holder of the arena's lock has handed out granules of `node`.
pub(super) fn use_more(node: usize, granules: usize) {
    add(&FIGURES[node].used, granules);
}

/// The holder of the arena's lock has taken back granules of `node`.
pub(super) fn use_less(node: usize, granules: usize) {
    sub(&FIGURES[node].used, granules);
}

/// The holder of the arena's lock has put granules of `node` into dirty free runs.
pub(super) fn more_dirty(node: usize, granules: usize) {
    add(&FIGURES[node].dirty, granules);
}

/// The holder of the arena's lock has taken granules of `node` out of dirty free runs.
pub(super) fn less_dirty(node: usize, granules: usize) {
    sub(&FIGURES[node].dirty, granules);
}

/// Granules of `node` in dirty free runs.
pub(super) fn dirty(node: usize) -> usize {
    FIGURES[node].dirty.load(Relaxed)
}

pub(super) fn large_more(granules: usize) {
    LARGE_USED.fetch_add(granules, Relaxed);
}

pub(super) fn large_less(granules: usize) {
    LARGE_USED.fetch_sub(granules, Relaxed);
}

/// Bytes in runs whose page map entry is [`LARGE`](super::LARGE): blocks of their own.
pub fn large_in_use() -> usize {
    LARGE_USED.load(Relaxed) * GRANULE
}

/// Dirty granules beyond what may be kept. Some loads for each node.
pub(super) fn excess() -> usize {
    let sum = |figure: fn(&Figures) -> &AtomicUsize| -> usize {
        let nodes = FIGURES.iter().take(nodes::count());
        nodes.map(|node| figure(node).load(Relaxed)).sum()
    };
    let in_use = sum(|node| &node.used) * GRANULE + huge_total();
    sum(|node| &node.dirty).saturating_sub(budget::kept_most(in_use) / GRANULE)
}
