//! How much of the arenas' memory is in use, and how much of it is dirty.
//!
//! Dirty memory is memory that the process keeps beyond its use. [`excess`] compares its amount
//! with the amount that [`budget`] allows. A slab's run counts as in use, even if objects in the
//! slab are free.
//!
//! # Memory that was needed again
//!
//! Most programs that free much memory at once do not need it soon. A program that does would pay a
//! page fault for each page, over and over. So the arenas learn:
//!
//! 1. [`purged`] notes memory that went back to the system only because it was in excess.
//! 2. [`took_clean`] notices that an arena hands out clean memory soon after that. Up to the amount
//!    that went back, this memory was *missed*.
//! 3. [`excess`] allows as much more dirty memory as was missed. But the process never holds much
//!    more than it used a short while ago ([`SLACK`]).
//! 4. [`aged`] subtracts memory that goes back because it was dirty for long: it was not missed
//!    after all.
//! 5. [`forget`] halves the missed memory each period, but not below what was dirty lately. The
//!    rest is in use and is not freed again, so nothing has to be kept for it.
//!
//! # Who writes the words
//!
//! | word | who |
//! |---|---|
//! | a node's [`Figures`] | the holder of the arena's lock, with a load and a store |
//! | all others | any thread |
//!
//! Any thread reads them. The words guard no other memory, so all orderings are relaxed.

use super::{GRANULE, budget, huge_total};
use crate::nodes::{self, MAX_NODES};
use crate::{segment, shepherd};
use core::ptr::null_mut;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize};

/// For missed memory, the process may hold 1/`SLACK` more than it used a short while ago. Free
/// memory in pieces does not fit every request.
const SLACK: usize = 8;
/// While at most this many granules (16 MiB) are missed, the program's own calls of the allocator
/// need not tick, that is, need not give old memory back.
const NOT_MUCH: usize = (16 << 20) / GRANULE;
/// The length of a period, in milliseconds.
const FORGET: u32 = 450;

/// A node's figures, in granules.
#[repr(align(64))]
struct Figures {
    /// Granules in runs that are in use.
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

/// A figure of a node.
#[derive(Clone, Copy)]
enum Figure {
    Used,
    Dirty,
}

/// Granules in use by large blocks. A large block is a run of its own.
static LARGE_USED: AtomicUsize = AtomicUsize::new(0);

/// Granules in use by slabs of small objects.
static SMALL_USED: AtomicUsize = AtomicUsize::new(0);

/// Granules that went back to the system a short while ago because they were in excess.
static PURGED: AtomicUsize = AtomicUsize::new(0);
/// Granules that were needed again after they had been purged.
static MISSED: AtomicUsize = AtomicUsize::new(0);
/// The largest number of granules that were in use at once, in this period and the last.
static USED_LATELY: Lately = Lately::new();
/// The largest number of granules that were dirty at once, in this period and the last.
static DIRTY_LATELY: Lately = Lately::new();

/// The highest value of a figure within the last two periods.
struct Lately {
    this_period: AtomicUsize,
    last_period: AtomicUsize,
}

impl Lately {
    const fn new() -> Lately {
        Lately {
            this_period: AtomicUsize::new(0),
            last_period: AtomicUsize::new(0),
        }
    }

    fn note(&self, value: usize) {
        if value > self.this_period.load(Relaxed) {
            self.this_period.store(value, Relaxed);
        }
    }

    fn most(&self) -> usize {
        let last = self.last_period.load(Relaxed);
        last.max(self.this_period.load(Relaxed))
    }

    fn begin_period(&self, value: usize) {
        let most = self.this_period.swap(value, Relaxed);
        self.last_period.store(most, Relaxed);
    }
}

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
    word.store(sum, Relaxed);
    if let Some(shown) = shown {
        shown.store((sum * GRANULE) as u64, Relaxed);
    }
}

fn sub(figure: Figure, node: usize, granules: usize) {
    add(figure, node, granules.wrapping_neg());
}

/// Adds `granules`, which the caller hands out, to the number in use on `node`. Subtracts those
/// that are not among the `clean` ones from the number of dirty granules. The caller holds the
/// arena's lock.
pub(super) fn hand_out(node: usize, granules: usize, clean: usize) {
    use_more(node, granules);
    USED_LATELY.note(used());
    if clean > 0 {
        took_clean(clean);
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
/// [`LARGE`](super::LARGE). One load.
pub fn large_in_use() -> usize {
    LARGE_USED.load(Relaxed) * GRANULE
}

/// Returns how many dirty granules there are beyond the number that may be kept. Called after each
/// `free_run`. Costs some loads for each node.
pub(super) fn excess() -> usize {
    let (used, dirty) = (used(), dirty_of_all());
    DIRTY_LATELY.note(dirty);
    let missed = MISSED.load(Relaxed).min(most_held().saturating_sub(used));
    if missed > NOT_MUCH {
        update_needs_ticks();
    }
    beyond(dirty, used, missed)
}

/// Returns how many of `dirty` granules are beyond the number that may be kept if `used` granules
/// are in use and `missed` granules were missed.
fn beyond(dirty: usize, used: usize, missed: usize) -> usize {
    dirty.saturating_sub(budget::kept_most(used * GRANULE, missed * GRANULE) / GRANULE)
}

/// Whether the program's own calls of the allocator must tick.
static NEEDS_TICKS: AtomicBool = AtomicBool::new(false);
/// The word that `close_while_ticks_are_needed` registered, or null before that call.
static GATE: AtomicPtr<AtomicUsize> = AtomicPtr::new(null_mut());

/// Registers `gate`, which is set to 0 each time [`needs_ticks`] becomes true.
///
/// For a caller whose fast paths never tick, that is, never give old memory back. If such a caller
/// checks the gate, it can take its slow path while the gate is 0, and tick there.
pub fn close_while_ticks_are_needed(gate: &'static AtomicUsize) {
    GATE.store(core::ptr::from_ref(gate).cast_mut(), Relaxed);
}

/// Returns whether the program's own calls of the allocator must tick: much missed memory is kept
/// while no shepherd thread runs, so that no other code gives it back in time. One load.
pub fn needs_ticks() -> bool {
    NEEDS_TICKS.load(Relaxed)
}

/// Finds out what [`needs_ticks`] returns from now on, and returns it. Costs some loads for each
/// node.
pub fn update_needs_ticks() -> bool {
    let needed = !shepherd::has_thread() && beyond(dirty_of_all(), used(), NOT_MUCH) > 0;
    if needed != needs_ticks() {
        NEEDS_TICKS.store(needed, Relaxed);
    }
    // SAFETY: the word is null, or came from the `&'static` that `close_while_ticks_are_needed`
    // was given.
    if let Some(gate) = unsafe { GATE.load(Relaxed).as_ref() }.filter(|_| needed) {
        gate.store(0, Relaxed);
    }
    needed
}

/// Returns how many granules the process may hold, at most, because of missed memory.
fn most_held() -> usize {
    let lately = USED_LATELY.most();
    lately + lately / SLACK
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

/// Notes that dirty granules went back to the system because they were in excess.
pub(super) fn purged(granules: usize) {
    PURGED.fetch_add(granules, Relaxed);
}

/// Notes that a caller gets clean granules.
fn took_clean(granules: usize) {
    let purged = PURGED.load(Relaxed);
    let missed = granules.min(purged);
    // If another thread changed the word, this call is not counted.
    let exchange = |missed| PURGED.compare_exchange(purged, purged - missed, Relaxed, Relaxed);
    if missed > 0 && exchange(missed).is_ok() {
        // The sum is bounded: a small block that is purged and missed again and again would
        // otherwise add up to a large amount. A concurrent change of another thread may be lost.
        // The figures are estimates.
        let sum = MISSED.load(Relaxed) + missed;
        MISSED.store(sum.min(most_held()), Relaxed);
    }
}

/// Notes that granules went back to the system because they were dirty for long.
pub(super) fn aged(granules: usize) {
    let missed = MISSED.load(Relaxed);
    // As in `took_clean`, a concurrent change may be lost.
    MISSED.store(missed.saturating_sub(granules), Relaxed);
}

/// Begins another period, at most once in [`FORGET`] milliseconds, and lets the figures decay.
/// `now` is in milliseconds.
pub(super) fn forget(now: u32) {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let last = LAST.load(Relaxed);
    // Another thread may have noted a time a little after `now`.
    let is_due = (FORGET..u32::MAX - FORGET).contains(&now.wrapping_sub(last));
    if !is_due || LAST.compare_exchange(last, now, Relaxed, Relaxed).is_err() {
        return;
    }
    PURGED.store(PURGED.load(Relaxed) / 2, Relaxed);
    USED_LATELY.begin_period(used());
    DIRTY_LATELY.begin_period(dirty_of_all());
    // Missed memory that is kept either serves again, or `aged` subtracts it. The rest is in use
    // and was not freed again, so it decays here.
    let missed = MISSED.load(Relaxed);
    let least = DIRTY_LATELY.most().max(missed / 2);
    MISSED.store(missed.min(least), Relaxed);
}
