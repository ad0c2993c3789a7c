//! The shards of one counter, and the totals they are folded into.
//!
//! A counter has a block of four words at the same offset of every CPU's unit, its *shards*, and one of four words in the
//! shared unit, its *total*:
//!
//! | shard | | total | |
//! |---|---|---|---|
//! | `up` | all that was added on this CPU | `folded_up` | what folds have added for `up` |
//! | `up_limit` | how far `up` may run | `folded_down` | the same for `down` |
//! | `down` | all that was taken away on this CPU | `drift` | the sum of the batches granted to shards |
//! | `down_limit` | how far `down` may run | `batch` | how far a word may run past its mark |
//!
//! All count modulo 2^64. A word's *mark*, how much of it has been folded, is its limit less the batch.
//!
//! # Who writes what
//!
//! * `up` and `down` only the CPU itself, in critical sections that check the limit, and only upwards.
//! * A shard's limits only the holder of its [lock](super::stripe), from any CPU; `batch` only the holder of all its locks.
//! * `folded_up`, `folded_down` and `drift` whoever holds a shard's lock, by atomic adds for that shard.
//! * A shard with `up_limit` 0 was never *granted*: no add can succeed there until the slow path counts its batch into
//!   `drift` and sets its limits.
//!
//! # Invariants
//!
//! 1. `mark <= word <= limit`: the section checks before it commits, and a limit is only lowered by a gate, which
//!    changes no mark, or once the fence has shown that no section is under way.
//! 2. `folded_up - folded_down` is the sum of the marks of `up` less those of `down`. A fold first moves the total, then the
//!    limit; so between the two a word has *less* room than its batch, never more, however long the folder sleeps there. What both
//!    words of a shard have moved is *cancelled*: both marks move, and no total.
//! 3. Value = base + sum of `up` - sum of `down`. Folds and gates do not change it.
//!
//! # The gate
//!
//! [`gate`](Shards::gate) takes [`GATE`] from every limit: every add from then on fails over to the counter's base. Words
//! whose add had begun may still move, once each; after [`quiesce`](Shards::quiesce) nothing moves.

use super::stripe::{self, AllHeld, Held};
use crate::percpu::{self, UNITS, shared, word_at};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use pinfold_rseq::possible;

/// Bytes of a shard, and of a total.
pub(crate) const SIZE: usize = 32;
/// The largest batch: far below [`GATE`], so that a gate closes whatever room there is.
pub(crate) const BATCH_MOST: u64 = 1 << 40;
const GATE: u64 = 1 << 52;

const UP: usize = 0;
const DOWN: usize = 16;
/// From a word to its limit.
const LIMIT: usize = 8;
const FOLDED_UP: usize = 0;
const FOLDED_DOWN: usize = 8;
const DRIFT: usize = 16;
const BATCH: usize = 24;

/// All that was ever added to the shards, and all that was ever taken away, modulo 2^64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moved {
    pub(crate) up: u64,
    pub(crate) down: u64,
}

impl Moved {
    pub(crate) fn net(self) -> i64 {
        self.up.wrapping_sub(self.down) as i64
    }
}

/// The block of one counter, by its offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shards {
    offset: usize,
}

impl Shards {
    /// # Safety
    ///
    /// `offset` is that of a block of [`SIZE`] bytes from [`percpu::alloc`], or of a part of one, which nobody frees meanwhile.
    pub(crate) unsafe fn at(offset: usize) -> Shards {
        Shards { offset }
    }

    /// What a fresh block needs before anybody knows of it.
    pub(crate) fn open(self, batch: u64) {
        shared(self.offset + BATCH).store(batch, Relaxed);
    }

    pub(crate) fn offset(self) -> usize {
        self.offset
    }

    pub(crate) fn batch(self) -> u64 {
        shared(self.offset + BATCH).load(Relaxed)
    }

    pub(crate) fn drift(self) -> u64 {
        // Acquire pairs with the releases in `grant`, `raise` and `lower`.
        shared(self.offset + DRIFT).load(Acquire)
    }

    /// Adds `n`, not negative, to what was added (or, `down`, taken away) on this CPU if there is room.
    #[inline(always)]
    pub(crate) fn add(self, down: bool, n: i64) -> bool {
        let word = self.offset + if down { DOWN } else { UP };
        // SAFETY: `at` was given a block of four words.
        unsafe { UNITS.add_within(word, n) }
    }

    /// As [`add`](Self::add), for when that found no room: makes some on this CPU if the batch allows and nobody else is at it.
    #[cold]
    #[inline(never)]
    pub(crate) fn add_after_making_room(self, down: bool, n: i64) -> bool {
        let room = percpu::install_here().is_some_and(|unit| {
            stripe::try_hold(unit, self.offset)
                .is_ok_and(|held| self.make_room(&held, unit, down, n as u64))
        });
        // By now the thread may be on another CPU, or others may have used the room up.
        room && self.add(down, n)
    }

    /// The totals that folds have reached. Lock-free; the two words are not of one moment.
    pub(crate) fn folded(self) -> Moved {
        // Acquire orders the two collections of a reader; it pairs with the release in `fold_word`.
        Moved {
            up: shared(self.offset + FOLDED_UP).load(Acquire),
            down: shared(self.offset + FOLDED_DOWN).load(Acquire),
        }
    }

    /// The sums over all shards. When two collections agree, no word moved between the end of the first and the beginning of
    /// the second: each only grows.
    #[inline]
    pub(crate) fn collect(self) -> Moved {
        let mut sum = Moved { up: 0, down: 0 };
        percpu::for_each_used(self.offset, |[up, _, down, _]| {
            // Acquire pairs with the commit, which is a release, and orders the collections.
            sum.up = sum.up.wrapping_add(up.load(Acquire));
            sum.down = sum.down.wrapping_add(down.load(Acquire));
        });
        sum
    }

    /// A granted shard has a limit; while a gate has taken it down to 0, its word is not 0.
    fn is_granted(self, unit: usize) -> bool {
        word_at(unit, self.offset + UP + LIMIT).load(Relaxed) != 0
            || word_at(unit, self.offset + UP).load(Relaxed) != 0
    }

    fn granted(self) -> impl Iterator<Item = usize> {
        percpu::used().filter(move |&unit| self.is_granted(unit))
    }

    /// Makes room for an add of `n`, `down` or up, on `unit` if its batch allows: grants the shard, or cancels and folds.
    fn make_room(self, held: &Held, unit: usize, down: bool, n: u64) -> bool {
        let batch = self.batch();
        if n > batch {
            return false;
        }
        if !self.is_granted(unit) {
            self.grant(held, unit, batch);
            return true;
        }
        let [up, down_half] = self.cancel(unit, batch, 0);
        let left = batch - if down { down_half } else { up };
        // Where ups and downs balance, the total's line stays where it is.
        if left < n.max(batch / 2) {
            self.fold_rest(unit, batch, batch, 0, [up, down_half]);
        }
        true
    }

    /// Lets adds into a shard for the first time.
    fn grant(self, _held: &Held, unit: usize, batch: u64) {
        // The drift first: at no moment may a shard have room that it does not count.
        shared(self.offset + DRIFT).fetch_add(batch, AcqRel);
        word_at(unit, self.offset + DOWN + LIMIT).store(batch, Release);
        word_at(unit, self.offset + UP + LIMIT).store(batch, Release);
    }

    /// Whether [`fit_batch`](Self::fit_batch) would have anything to do.
    pub(super) fn wants_another_batch(self, unit: usize, n: u64, most: u64) -> bool {
        let wider = self.batch() < BATCH_MOST && self.drift().saturating_mul(2) <= most;
        wider || n > self.batch() || !self.is_granted(unit)
    }

    /// Chooses a batch that makes room for `n` on `unit` while the drift stays within `most`: twice the batch when a shard is
    /// full or `n` beyond it, less when `unit` is a new shard and all together would be too much. False when there is none.
    pub(super) fn fit_batch(self, held: &AllHeld, unit: usize, n: u64, most: u64) -> bool {
        let granted = self.is_granted(unit);
        let shards = self.granted().count() as u64 + u64::from(!granted);
        let fits = |batch: u64| batch <= BATCH_MOST && shards.saturating_mul(batch) <= most;
        let mut batch = self.batch();
        while !fits(batch) && batch > 1 {
            batch /= 2;
        }
        if batch < self.batch() {
            return fits(batch) && n <= batch && self.lower(held, batch);
        }
        if granted && fits(batch * 2) {
            batch *= 2;
        }
        while batch < n && fits(batch * 2) {
            batch *= 2;
        }
        if batch > self.batch() {
            self.raise(held, batch);
        }
        fits(batch) && n <= batch
    }

    /// Raises the batch: the drift first, then the limits.
    pub(super) fn raise(self, _held: &AllHeld, batch: u64) {
        let more = batch - self.batch();
        let shards = self.granted().count() as u64;
        shared(self.offset + DRIFT).store(shards * batch, Release);
        shared(self.offset + BATCH).store(batch, Relaxed);
        self.change_limits(|limit| limit.wrapping_add(more));
    }

    /// Lowers the batch: closes the gate, waits until no section is under way, folds everything, and only then counts less
    /// drift. False, and nothing changed, when the kernel cannot fence.
    pub(super) fn lower(self, held: &AllHeld, batch: u64) -> bool {
        self.gate(held);
        let quiet = self.quiesce();
        if quiet {
            let shards = self.fold_gated(held, batch) as u64;
            shared(self.offset + BATCH).store(batch, Relaxed);
            shared(self.offset + DRIFT).store(shards * batch, Release);
        }
        self.ungate(held);
        quiet
    }

    /// Brings a shard's marks up to its words. Returns whether they were behind.
    fn fold_unit(self, _held: &Held, unit: usize) -> bool {
        let batch = self.batch();
        let before = word_at(unit, self.offset + UP + LIMIT).load(Relaxed);
        let rest = self.cancel(unit, batch, 0);
        self.fold_rest(unit, batch, batch, 0, rest);
        rest != [0, 0] || before != word_at(unit, self.offset + UP + LIMIT).load(Relaxed)
    }

    /// Moves both marks forward by what both words have moved, which changes no total. Returns how far each word is past its
    /// mark then. Limits are less by `gate`.
    ///
    /// When one limit is raised before the other, the words of the other side have moved as far already, and do not go back: the
    /// difference of the two stays within the batch.
    fn cancel(self, unit: usize, batch: u64, gate: u64) -> [u64; 2] {
        let halves = [UP, DOWN].map(|half| {
            let limit = word_at(unit, self.offset + half + LIMIT);
            let mark = limit.load(Relaxed).wrapping_add(gate).wrapping_sub(batch);
            // Acquire pairs with the commit.
            let word = word_at(unit, self.offset + half).load(Acquire);
            (limit, word.wrapping_sub(mark))
        });
        let [(up_limit, up), (down_limit, down)] = halves;
        let mut both = up.min(down);
        if both != 0 {
            let raised = |limit: &AtomicU64, by: u64| limit.load(Relaxed).wrapping_add(by);
            // A limit of 0 says that the shard was never granted: one unit is left for the next time.
            both -= u64::from(raised(up_limit, both).wrapping_add(gate) == 0);
            up_limit.store(raised(up_limit, both), Release);
            down_limit.store(raised(down_limit, both), Release);
        }
        [up - both, down - both]
    }

    /// Adds what the words are past their marks, `rest`, to the totals, and puts the limits a batch of `after` ahead instead of
    /// `before`. Limits are less by `gate`.
    fn fold_rest(self, unit: usize, before: u64, after: u64, gate: u64, rest: [u64; 2]) {
        for (half, total, mut rest) in [(UP, FOLDED_UP, rest[0]), (DOWN, FOLDED_DOWN, rest[1])] {
            let limit = word_at(unit, self.offset + half + LIMIT);
            let ahead = |rest: u64| {
                let mark = limit.load(Relaxed).wrapping_sub(before);
                mark.wrapping_add(rest).wrapping_add(after)
            };
            if half == UP && ahead(rest).wrapping_add(gate) == 0 {
                rest = rest.saturating_sub(1);
            }
            if rest != 0 {
                // Release: who sees the total sees the adds, and who sees the limit sees the total.
                shared(self.offset + total).fetch_add(rest, Release);
            }
            if rest != 0 || before != after {
                limit.store(ahead(rest), Release);
            }
        }
    }

    /// Folds the shards of the units that are `wanted`, but those in whose slow path somebody is; returns how many had moved.
    /// `still_there` is asked with the shard's lock held.
    pub(super) fn fold(
        self,
        wanted: impl Fn(usize) -> bool,
        still_there: impl Fn() -> bool,
    ) -> usize {
        let moved = self.granted().filter(|&unit| {
            wanted(unit)
                && stripe::try_hold(unit, self.offset)
                    .is_ok_and(|held| still_there() && self.fold_unit(&held, unit))
        });
        moved.count()
    }

    /// Folds all shards while the gate is closed, for a batch that is `batch` from now on; returns how many there are. A smaller
    /// batch than before needs [`quiesce`](Self::quiesce) first.
    pub(super) fn fold_gated(self, _held: &AllHeld, batch: u64) -> usize {
        let before = self.batch();
        let folded = self.granted().map(|unit| {
            let rest = self.cancel(unit, before, GATE);
            self.fold_rest(unit, before, batch, GATE, rest);
        });
        folded.count()
    }

    fn change_limits(self, to: impl Fn(u64) -> u64) {
        for unit in self.granted() {
            for half in [UP, DOWN] {
                let limit = word_at(unit, self.offset + half + LIMIT);
                limit.store(to(limit.load(Relaxed)), Release);
            }
        }
    }

    /// Sends all adds that begin from now on to the base.
    pub(super) fn gate(self, _held: &AllHeld) {
        self.change_limits(|limit| limit.wrapping_sub(GATE));
    }

    /// Lets adds into the shards again.
    pub(super) fn ungate(self, _held: &AllHeld) {
        self.change_limits(|limit| limit.wrapping_add(GATE));
    }

    /// Waits until the adds that had begun are over. False when the kernel cannot say.
    pub(super) fn quiesce(self) -> bool {
        UNITS.quiesce(possible()).is_ok()
    }
}
