//! How much of the arenas' memory is in use, and how much of it is dirty.
//!
//! Dirty memory is memory that the process keeps beyond its use. [`excess`] compares its amount
//! with the amount that [`budget`] allows. A slab's run counts as in use, even if objects in the
//! slab are free.
//!
//! # How long free memory stays
//!
//! A program that frees much memory at once may need it again soon. Giving the memory back would
//! then cost a page fault for each page, over and over. So the memory stays for a while:
//!
//! 1. [`excess`] lets the process hold nine eighths of the most memory that it used at once in this
//!    period and the last, plus an eighth of its present use, because free memory in pieces does
//!    not fit every request.
//! 2. Runs that no allocation takes for [`dirty_time`](super::dirty_time) go back at a tick.
//! 3. [`begin_period`] forgets the use of the period before the last.
//!
//! # Who writes the words
//!
//! | word | who |
//! |---|---|
//! | a node's [`Figures`] | the holder of the arena's lock, with a load and a store |
//! | all others | any thread |
//!
//! Any thread reads them. The words guard no other memory, so all orderings are relaxed.

use super::{GRANULE, budget, huge_total, parked};
use crate::nodes::{self, MAX_NODES};
use crate::segment;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU32, AtomicUsize};

/// The length of a period, in milliseconds.
const PERIOD: u32 = 450;

/// A node's figures, in granules.
#[repr(align(64))]
struct Figures {
    /// Granules in runs that are in use, or parked (`parked`).
    used: AtomicUsize,
    /// Granules in dirty free runs.
    dirty: AtomicUsize,
}

static FIGURES: [Figures; MAX_NODES] = [const {
    Figures {
        used: AtomicUsize::new(0),
        dirty: AtomicUsize::new(0),
    }
}; MAX_NODES];

#[derive(Clone, Copy)]
enum Figure {
    Used,
    Dirty,
}

/// Granules in use by large blocks, and parked. A large block is a run of its own.
static LARGE_USED: AtomicUsize = AtomicUsize::new(0);

/// Granules in use by slabs of small objects.
static SMALL_USED: AtomicUsize = AtomicUsize::new(0);

/// The largest number of granules that were in use at once in this period.
static MOST_NOW: AtomicUsize = AtomicUsize::new(0);
/// The largest number of granules that were in use at once in the last period.
static MOST_BEFORE: AtomicUsize = AtomicUsize::new(0);

/// Adds to a figure of a node, and shows its value in bytes in the statistics segment. The caller
/// holds the arena's lock, so it is the only writer.
fn add(figure: Figure, node: usize, granules: usize) {
    let (word, shown) = match figure {
        Figure::Used => (
            &FIGURES[node].used,
            segment::memory(node).map(|row| &row.used),
        ),
        Figure::Dirty => (
            &FIGURES[node].dirty,
            segment::memory(node).map(|row| &row.dirty),
        ),
    };
    let sum = word.load(Relaxed).wrapping_add(granules);
    // A sum below 0 would have wrapped.
    debug_assert!(sum.cast_signed() >= 0);
    word.store(sum, Relaxed);
    if let Some(shown) = shown {
        shown.store((sum * GRANULE) as u64, Relaxed);
    }
}

fn sub(figure: Figure, node: usize, granules: usize) {
    add(figure, node, granules.wrapping_neg());
}

/// Counts `granules` of `node` as in use. All but the `clean` ones no longer count as dirty. The
/// caller holds the arena's lock.
pub(super) fn hand_out(node: usize, granules: usize, clean: usize) {
    use_more(node, granules);
    let used = used();
    if used > MOST_NOW.load(Relaxed) {
        MOST_NOW.store(used, Relaxed);
    }
    if clean < granules {
        less_dirty(node, granules - clean);
    }
}

/// Adds `granules` to the number in use on `node`. The caller holds the arena's lock.
pub(super) fn use_more(node: usize, granules: usize) {
    add(Figure::Used, node, granules);
}

/// Subtracts `granules` from the number in use on `node`. The caller holds the arena's lock.
pub(super) fn use_less(node: usize, granules: usize) {
    sub(Figure::Used, node, granules);
}

/// Adds `granules` to the number in dirty free runs of `node`. The caller holds the arena's lock.
pub(super) fn more_dirty(node: usize, granules: usize) {
    add(Figure::Dirty, node, granules);
}

/// Subtracts `granules` from the number in dirty free runs of `node`. The caller holds the arena's
/// lock.
pub(super) fn less_dirty(node: usize, granules: usize) {
    sub(Figure::Dirty, node, granules);
}

/// Returns how many granules of `node` are in dirty free runs.
pub(super) fn dirty(node: usize) -> usize {
    FIGURES[node].dirty.load(Relaxed)
}

pub(super) fn large_more(granules: usize) {
    LARGE_USED.fetch_add(granules, Relaxed);
}

pub(super) fn large_less(granules: usize) {
    LARGE_USED.fetch_sub(granules, Relaxed);
}

pub(super) fn small_more(granules: usize) {
    SMALL_USED.fetch_add(granules, Relaxed);
}

pub(super) fn small_less(granules: usize) {
    SMALL_USED.fetch_sub(granules, Relaxed);
}

/// Returns how many bytes are in use by slabs of small objects. One load.
pub(super) fn small_in_use() -> usize {
    SMALL_USED.load(Relaxed) * GRANULE
}

/// Returns how many bytes are in use by large blocks: runs of one block, whose page map entry is
/// [`LARGE`](super::LARGE). Four loads for each of at most 64 CPUs.
pub fn large_in_use() -> usize {
    let used = LARGE_USED.load(Relaxed);
    // Threads may change both figures between the loads.
    used.saturating_sub(parked::granules()) * GRANULE
}

/// Returns how many dirty granules there are beyond the number that may be kept, with those that
/// CPUs have parked. Called for each run that goes to the arena. Costs some loads for each node,
/// and four for each of at most 64 CPUs.
pub(super) fn excess() -> usize {
    let parked = parked::granules();
    (dirty_of_all() + parked).saturating_sub(most(parked))
}

/// Returns whether a CPU that has parked `others` may park another run of `granules`. Looks at
/// other CPUs only for a limit that the program or its user has set: otherwise, [`excess`] finds it
/// if they all have parked too much. Costs some loads for each node.
pub(super) fn may_park(others: usize, granules: usize) -> bool {
    let all = budget::dirty_limit().map(|_| parked::granules());
    let parked = all.unwrap_or(others) + granules;
    dirty_of_all() + parked <= most(parked)
}

/// Returns how many granules may be dirty. `parked` of those that count as in use are parked.
fn most(parked: usize) -> usize {
    let used = used();
    let lately = used
        .max(MOST_NOW.load(Relaxed))
        .max(MOST_BEFORE.load(Relaxed));
    let used = used.saturating_sub(parked);
    budget::kept_most(used * GRANULE, lately * GRANULE) / GRANULE
}

/// Returns how many granules are in dirty free runs of all nodes.
fn dirty_of_all() -> usize {
    figures().map(|node| node.dirty.load(Relaxed)).sum()
}

fn figures() -> impl Iterator<Item = &'static Figures> {
    FIGURES.iter().take(nodes::count())
}

/// Returns how many granules are in use, including huge blocks.
fn used() -> usize {
    let used: usize = figures().map(|node| node.used.load(Relaxed)).sum();
    used + huge_total() / GRANULE
}

/// Begins another period if the present one is over. `now` is in milliseconds.
pub(super) fn begin_period(now: u32) {
    static BEGUN: AtomicU32 = AtomicU32::new(0);
    let begun = BEGUN.load(Relaxed);
    // Another thread may have noted a time a little after `now`, so a difference just below 2³²
    // does not end the period.
    let is_over = (PERIOD..u32::MAX - PERIOD).contains(&now.wrapping_sub(begun));
    if is_over && BEGUN.compare_exchange(begun, now, Relaxed, Relaxed).is_ok() {
        MOST_BEFORE.store(MOST_NOW.swap(used(), Relaxed), Relaxed);
    }
}
