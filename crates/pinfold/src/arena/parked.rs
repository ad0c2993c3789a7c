//! Freed large blocks that a CPU keeps for its next allocation of the same size.
//!
//! A program that allocates and frees a large block again and again would take the arena's lock
//! twice each time, and threads on several CPUs would meet there. So a CPU *parks* the runs of a
//! few freed blocks, outside the arena. A parked run is found by its exact length only. It has no
//! entry in the page map, so a second free of the block is still recognised.
//!
//! Parked memory serves nobody else, so it is bounded, and goes back to the arena:
//!
//! 1. when an allocation finds no dirty run that fits (`runs`);
//! 2. when dirty runs are looked through for old ones, and when free memory is trimmed (`purge`);
//! 3. when the CPU parks another run and has no place left.
//!
//! # Who may write what
//!
//! A place holds 0, or a run's address and length in one word. Whoever replaces a word by 0, in one
//! atomic step, owns the run. Any thread may do so, for any CPU: in a signal handler, during a
//! fork, and on a CPU that it has just left.

use super::{GRANULE, address_of, index_of, kept, purge};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicUsize};

/// The number of rows. CPUs with higher numbers share a row with others.
const ROWS: usize = 64;
/// The most runs in a row.
const PLACES: usize = 4;
/// The most granules in a row: 8 MiB.
const MOST: usize = (8 << 20) / GRANULE;
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
}

static ROWS_OF_CPUS: [Row; ROWS] = [const {
    Row {
        places: [const { AtomicUsize::new(0) }; PLACES],
        calls: AtomicU32::new(0),
    }
}; ROWS];

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

/// Returns this CPU's row. A thread without an index uses the first row.
fn row() -> &'static Row {
    let index = pinfold_rseq::current();
    let known = index < pinfold_rseq::possible();
    &ROWS_OF_CPUS[if known { index % ROWS } else { 0 }]
}

fn rows() -> impl Iterator<Item = &'static Row> {
    ROWS_OF_CPUS.iter().take(pinfold_rseq::possible())
}

fn granules_in(row: &Row) -> usize {
    let words = row.places.iter().map(|place| place.load(Relaxed));
    words.map(|word| word & LENGTH).sum()
}

/// Parks a run on this CPU. Returns the run that should go to the arena instead: one for which
/// there is no place any more, or this one if it may not be parked. Costs one or two atomic steps
/// on a cache line of this CPU. The caller owns the run, whose page map entries are 0.
pub(super) fn park(run: Parked) -> Option<Parked> {
    let row = row();
    let calls = row.calls.load(Relaxed).wrapping_add(1);
    row.calls.store(calls, Relaxed);
    let after = granules_in(row) + run.granules as usize;
    let is_due = calls.is_multiple_of(PASS);
    if is_due || after > MOST || purge::gives_back_at_once() || !kept::may_stay(after) {
        return Some(run);
    }
    // Release pairs with the acquires below: who takes the run sees what its last holder wrote.
    let free = row
        .places
        .iter()
        .filter(|place| place.load(Relaxed) == 0)
        .any(|place| {
            place
                .compare_exchange(0, run.word(), Release, Relaxed)
                .is_ok()
        });
    if free {
        return None;
    }
    let oldest = &row.places[calls as usize % PLACES];
    Parked::of_word(oldest.swap(run.word(), AcqRel))
}

/// Takes a run of `granules` on `node` that this CPU has parked.
pub(super) fn take(node: usize, granules: usize) -> Option<Parked> {
    let fits = |word| word & LENGTH == granules && is_on(node, word);
    row().places.iter().find_map(|place| take_if(place, fits))
}

/// Takes the runs of `node` that any CPU has parked, and passes each to `f`. Reads a cache line for
/// each of at most 64 CPUs.
pub(super) fn take_all(node: usize, f: impl FnMut(Parked)) {
    let places = rows().flat_map(|row| &row.places);
    places
        .filter_map(|place| take_if(place, |word| is_on(node, word)))
        .for_each(f);
}

/// Takes the run of a place if `fits` accepts the place's word, which is not 0.
fn take_if(place: &AtomicUsize, fits: impl FnOnce(usize) -> bool) -> Option<Parked> {
    let word = place.load(Relaxed);
    let taken = word != 0
        && fits(word)
        // Acquire pairs with the release in `park`.
        && place.compare_exchange(word, 0, Acquire, Relaxed).is_ok();
    Parked::of_word(word).filter(|_| taken)
}

/// Returns whether the run of a word, which is not 0, is `node`'s.
fn is_on(node: usize, word: usize) -> bool {
    super::node_of(word & !LENGTH) == node
}

/// Returns how many granules of `node` are parked. Reads a cache line for each of at most 64 CPUs.
pub(super) fn granules(node: usize) -> usize {
    let words = rows().flat_map(|row| &row.places);
    let words = words.map(|place| place.load(Relaxed));
    let here = words.filter(|&word| word != 0 && is_on(node, word));
    here.map(|word| word & LENGTH).sum()
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
        assert!(most > Some(0) && most <= Some(MOST), "{most:?}");
    }
}
