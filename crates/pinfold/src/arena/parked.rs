//! Freed large blocks that a CPU keeps for its next allocation of the same size.
//!
//! A program that allocates and frees a large block again and again would take the arena's lock
//! twice each time, and threads on several CPUs would meet there. So a CPU *parks* the runs of a
//! few freed blocks, outside the arena. A parked run is found by its exact length only. It has no
//! entry in the page map, so a later free of the same block is recognised.
//!
//! Parked memory serves nobody else, so it is bounded, and goes back to the arena:
//!
//! 1. when an allocation finds no dirty run that fits (`runs`), or a block grows and the parked run
//!    lies behind it (`resize`);
//! 2. when the arena looks for runs that have been dirty for long, when more is dirty than may be
//!    kept, and when free memory is trimmed (`purge`);
//! 3. when the CPU parks another run and has no room left.
//!
//! The arena's figures count a parked run as in use, because only the holder of the arena's lock
//! changes them. The functions that compare dirty memory with its bound, or report it, count parked
//! runs as dirty.
//!
//! # Who may write what
//!
//! A place holds 0, or a run's address and length in one word. The thread that replaces the word by
//! 0, in one atomic step, owns the run. Any thread may do so, for any CPU: in a signal handler,
//! during a fork, and on a CPU that it has just left. A run that another thread owns during a fork
//! is lost to the child.

use super::{GRANULE, address_of, budget, index_of, kept, purge};
use crate::nodes;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

/// The number of rows. CPUs with higher numbers share a row with others.
const ROWS: usize = 64;
/// The most runs in a row.
const PLACES: usize = 4;
/// The most granules in a row: 8 MiB, and a granule more for each run, because most blocks do not
/// begin with their run (`large`). Two threads that park at the same time may pass it.
const MOST: usize = (8 << 20) / GRANULE + PLACES;
/// The shortest run that is parked. No allocation asks for shorter ones: they were blocks that had
/// grown or had a large alignment, and would take the places of others.
const LEAST: usize = (512 << 10) / GRANULE + 1;
/// The low bits of a word, which hold the run's length in granules. A run's address is a multiple
/// of [`GRANULE`].
const LENGTH: usize = GRANULE - 1;
/// One in this many freed runs goes to the arena, whose ticks depend on such calls.
const PASS: u32 = 64;

/// What the threads of a CPU have parked. Each row has a cache line of its own.
#[repr(align(64))]
struct Row {
    places: [AtomicUsize; PLACES],
    /// Counts the calls of [`park`]. Two threads may store the same count, which does no harm.
    calls: AtomicU32,
    /// How many granules the row may have in all, by the last answers of [`kept::may_park`]. 0
    /// again at each call that passes its run to the arena ([`PASS`]). So when the program's use
    /// falls, up to 63 more runs are parked by the old answer.
    allowed: AtomicU32,
}

static ROWS_OF_CPUS: [Row; ROWS] = [const {
    Row {
        places: [const { AtomicUsize::new(0) }; PLACES],
        calls: AtomicU32::new(0),
        allowed: AtomicU32::new(0),
    }
}; ROWS];

/// The rows that have ever had a run, a bit for each, so that a search leaves out the others.
static ROWS_IN_USE: AtomicU64 = AtomicU64::new(0);

/// A run that was parked, and now belongs to the thread that has this value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parked {
    pub(super) head: u32,
    pub(super) granules: u32,
}

impl Parked {
    fn of_word(word: usize) -> Option<Parked> {
        (word != 0).then(|| Parked {
            head: index_of(word & !LENGTH),
            granules: (word & LENGTH) as u32,
        })
    }

    fn word(self) -> usize {
        address_of(self.head) as usize | self.granules as usize
    }
}

/// Returns the number of this CPU's row. A thread without an index uses the first row.
fn nth_row() -> usize {
    let index = pinfold_rseq::current();
    let known = index < pinfold_rseq::possible();
    if known { index % ROWS } else { 0 }
}

/// Returns the rows that may have a run.
fn rows() -> impl Iterator<Item = &'static Row> {
    // Relaxed: a thread that does not see a row's first run finds it the next time.
    let in_use = ROWS_IN_USE.load(Relaxed);
    let rows = ROWS_OF_CPUS.iter().enumerate();
    rows.filter_map(move |(nth, row)| (in_use >> nth & 1 != 0).then_some(row))
}

fn granules_in(row: &Row) -> usize {
    let words = row.places.iter().map(|place| place.load(Relaxed));
    words.map(|word| word & LENGTH).sum()
}

/// Parks a run on this CPU. Passes to `give` each run that should go to the arena: this one if it
/// may not be parked, and others for which there is no room any more. Costs one or two atomic steps
/// on a cache line of this CPU, and now and then loads of the nodes' figures. The caller owns the
/// run, whose entry in the page map is 0.
pub(super) fn park(run: Parked, mut give: impl FnMut(Parked)) {
    let nth = nth_row();
    let row = &ROWS_OF_CPUS[nth];
    let calls = row.calls.load(Relaxed).wrapping_add(1);
    row.calls.store(calls, Relaxed);
    let granules = run.granules as usize;
    let mut others = granules_in(row);
    let passes = calls.is_multiple_of(PASS);
    if passes {
        row.allowed.store(0, Relaxed);
    }
    let may_park = !passes
        && (LEAST..=MOST).contains(&granules)
        && !purge::gives_back_at_once()
        // Another node's run would serve no allocation on this CPU.
        && is_on(nodes::current(), run.word())
        && may_have(row, others, granules);
    if !may_park {
        return give(run);
    }
    if ROWS_IN_USE.load(Relaxed) >> nth & 1 == 0 {
        ROWS_IN_USE.fetch_or(1 << nth, Relaxed);
    }
    let mut room = None;
    // Begins at another place each time, so that no run stays that nothing needs.
    for nth in 0..PLACES {
        let place = &row.places[(calls as usize + nth) % PLACES];
        if others + granules > MOST
            && let Some(other) = take_if(place, |_| true)
        {
            others = others.saturating_sub(other.granules as usize);
            give(other);
        }
        if place.load(Relaxed) == 0 {
            room = Some(place);
        }
    }
    let place = room.unwrap_or(&row.places[calls as usize % PLACES]);
    // Release: the thread that takes this run sees what its last holder wrote. Acquire pairs with
    // the release of the thread that parked the other one.
    Parked::of_word(place.swap(run.word(), AcqRel))
        .into_iter()
        .for_each(give);
}

/// Returns whether a row that has `others` may have `granules` more. Without limits, this mostly
/// costs three loads.
fn may_have(row: &Row, others: usize, granules: usize) -> bool {
    // A limit may be lowered at any time, and holds for all CPUs together.
    if budget::dirty_limit().is_some() || budget::is_limited() {
        return kept::may_park(others, granules);
    }
    let all = others + granules;
    if all <= row.allowed.load(Relaxed) as usize {
        return true;
    }
    let allowed = kept::may_park(others, granules);
    if allowed {
        row.allowed.store(all as u32, Relaxed);
    }
    allowed
}

/// Takes a run of `granules` on `node` that this CPU has parked.
pub(super) fn take(node: usize, granules: usize) -> Option<Parked> {
    let fits = |word| word & LENGTH == granules && is_on(node, word);
    let row = &ROWS_OF_CPUS[nth_row()];
    row.places.iter().find_map(|place| take_if(place, fits))
}

/// Takes the runs of `node` that any CPU has parked and that `is_wanted` accepts, and passes each
/// to `f`. Reads a cache line for each of at most 64 CPUs.
pub(super) fn take_all(node: usize, is_wanted: impl Fn(Parked) -> bool, f: impl FnMut(Parked)) {
    let fits = |word| is_on(node, word) && Parked::of_word(word).is_some_and(&is_wanted);
    let places = rows().flat_map(|row| &row.places);
    places.filter_map(|place| take_if(place, fits)).for_each(f);
}

/// Takes the run of a place if `fits` accepts the place's word, which is not 0.
fn take_if(place: &AtomicUsize, fits: impl FnOnce(usize) -> bool) -> Option<Parked> {
    // Acquire, here and below, pairs with the release in `park`: a thread that sees the word also
    // sees the window in which the run lies, and what the run's last holder wrote.
    let word = place.load(Acquire);
    let taken =
        word != 0 && fits(word) && place.compare_exchange(word, 0, Acquire, Relaxed).is_ok();
    Parked::of_word(word).filter(|_| taken)
}

/// Returns whether the run of a word, which is not 0, is `node`'s.
fn is_on(node: usize, word: usize) -> bool {
    super::node_of(word & !LENGTH) == node
}

/// Returns how many granules of all nodes are parked. Reads a cache line for each of at most 64
/// CPUs.
pub(super) fn granules() -> usize {
    rows().map(granules_in).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{LARGE, alloc_run, free_block_run};

    #[test]
    fn a_cpu_keeps_little() {
        let alloc = |granules| alloc_run(granules, 0, LARGE, false).unwrap().start;
        // A process that uses much memory may keep much, too.
        let used = [900; 3].map(alloc);
        for block in [MOST / 3; 8].map(alloc).into_iter().chain(used) {
            // SAFETY: the block was allocated above, and is not used afterwards.
            unsafe { free_block_run(block) };
        }
        let most = rows().map(granules_in).max();
        assert!(most <= Some(MOST), "{most:?}");
    }
}
