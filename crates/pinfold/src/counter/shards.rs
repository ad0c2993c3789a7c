//! The shards of one counter, and the totals they are folded into.
//!
//! A counter has a block of four words at the same offset of every CPU's unit, its *shards*, and one of four words in the
//! shared unit, its *total*:
//!
//! | shard | | total | |
//! |---|---|---|---|
//! | `up` | all that was added on this CPU | `folded_up` | what folds have added for `up` |
//! | `up_limit` | how far `up` may run | `folded_down` | the same for `down` |
//! | `down` | all that was taken away on this CPU | `granted` | how many shards were granted, and the batch: how far a word may run past its mark |
//! | `down_limit` | how far `down` may run | `reach` | how far the totals may go, see [`reach`](super::reach) |
//!
//! All count modulo 2^64. A word's *mark*, how much of it has been folded, is its limit less the
//! batch. The *drift* is the batch times the number of granted shards.
//!
//! # Who writes what
//!
//! * `up` and `down` only the CPU itself, in critical sections that check the limit, and only upwards.
//! * A shard's limits the holder of its [lock](super::stripe) and who keeps a gate, from any CPU,
//!   by atomic adds; the batch and `reach` only the holder of all its locks.
//! * `folded_up`, `folded_down` and the number of granted shards: the holder of a shard's lock, by
//!   atomic adds for that shard.
//! * A shard of four zeroes was never *granted*: no add can succeed there until the slow path
//!   counts it in `granted` and sets its limits.
//!
//! # Invariants
//!
//! 1. `mark <= word <= limit`, gates apart: the section checks before it commits, and a limit is only lowered by a gate, which
//!    changes no mark, or once the fence has shown that no section is under way.
//! 2. `folded_up - folded_down` is the sum of the marks of `up` less those of `down`. A fold first moves the total, then the
//!    limit; so between the two a word has *less* room than its batch, never more, however long the folder sleeps there. What both
//!    words of a shard have moved is *cancelled*: both marks move, and no total.
//! 3. Value = base + sum of `up` - sum of `down`. Folds and gates do not change it.
//!
//! # The gate
//!
//! [`gate`](Shards::gate) takes [`GATE`] from every limit: every add from then on fails over to the counter's base. Words
//! whose add had begun may still move, once each; after [`quiesce`](Shards::quiesce) nothing moves. Gates of several threads, and of
//! a signal handler in its own thread's, add up. How many are closed shows in how far a limit is behind its word, which is how
//! folds go on below a gate.
//!
//! # Parked shards
//!
//! A swap that has fenced leaves the shards of other CPUs *parked*: [`PARK`] is taken from their
//! limits until their CPU adds again and takes the slow path. No add is under way in a parked
//! shard, so the next swap need not fence for it.

use super::gate::Closed;
use super::reach::Reach;
use super::stripe::{self, AllHeld, Held};
use crate::percpu::{self, shared, units, word_at};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use pinfold_rseq::{MAX_INDEX, possible};

/// Bytes of a shard, and of a total.
pub(crate) const SIZE: usize = 32;
/// The largest batch: far below [`GATE`], so that a gate closes whatever room there is.
pub(crate) const BATCH_MOST: u64 = 1 << 40;
/// Small enough that a quarter of a million gates at a time are told apart, and a parked shard from
/// them.
pub(super) const GATE: u64 = 1 << 44;
/// As so many gates as there never are.
pub(super) const PARK: u64 = 1 << 62;

pub(super) const UP: usize = 0;
const DOWN: usize = 16;
/// From a word to its limit.
pub(super) const LIMIT: usize = 8;
const FOLDED_UP: usize = 0;
const FOLDED_DOWN: usize = 8;
const GRANTED: usize = 16;
const REACH: usize = 24;

/// In `granted`: the batch, and one shard.
const BATCH_BITS: u64 = (1 << 41) - 1;
const ONE_SHARD: u64 = BATCH_BITS + 1;
const _: () = assert!(BATCH_MOST <= BATCH_BITS && MAX_INDEX < 1 << 22);

/// A reach has room for the batches of all CPUs so many times, or else it would be left too soon.
const BATCHES_IN_REACH: u64 = 8;

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
        shared(self.offset + GRANTED).store(batch, Relaxed);
    }

    pub(crate) fn offset(self) -> usize {
        self.offset
    }

    pub(crate) fn batch(self) -> u64 {
        shared(self.offset + GRANTED).load(Relaxed) & BATCH_BITS
    }

    /// The sum of the batches of all granted shards.
    pub(crate) fn drift(self) -> u64 {
        // Acquire pairs with the releases in `grant` and `set_batch`.
        let granted = shared(self.offset + GRANTED).load(Acquire);
        (granted / ONE_SHARD).saturating_mul(granted & BATCH_BITS)
    }

    /// Sets the batch, and the drift to that of `shards` shards.
    fn set_batch(self, _held: &AllHeld, shards: u64, batch: u64) {
        // Release: who sees this drift sees what allowed it.
        shared(self.offset + GRANTED).store(shards * ONE_SHARD + batch, Release);
    }

    fn reach(self) -> Reach {
        // Only a holder of all locks changes it, and who relies on it holds one.
        Reach(shared(self.offset + REACH).load(Relaxed))
    }

    /// Has folds keep the totals within `reach`, less what shards may move without a fold.
    pub(super) fn keep_within(self, _held: &AllHeld, reach: Reach) {
        shared(self.offset + REACH).store(reach.0, Relaxed);
    }

    /// What all shards together may move without a fold, those included that are not granted yet.
    fn most_drift(self) -> u64 {
        (possible() as u64).saturating_mul(self.batch())
    }

    /// The least width of a reach that is worth stating.
    pub(super) fn least_reach(self) -> u64 {
        self.most_drift().max(64).saturating_mul(BATCHES_IN_REACH)
    }

    /// Whether the totals are in the outer half of the reach.
    pub(super) fn is_off_centre(self) -> bool {
        let reach = self.reach();
        reach != Reach::NONE && !reach.allows(self.folded().net(), reach.width() / 2)
    }

    /// Adds `n`, not negative, to what was added (or, `down`, taken away) on this CPU if there is room.
    #[inline(always)]
    pub(crate) fn add(self, down: bool, n: i64) -> bool {
        let word = self.offset + if down { DOWN } else { UP };
        // SAFETY: `at` was given a block of four words.
        unsafe { units().add_within(word, n) }
    }

    /// As [`add`](Self::add), for when that found no room: makes some on this CPU if the batch allows, nobody else is at it, and no
    /// gate is closed. A shard that was never granted is granted if `may_grant`.
    #[cold]
    #[inline(never)]
    pub(crate) fn add_after_making_room(self, down: bool, n: i64, may_grant: bool) -> bool {
        let room = percpu::install_here().is_some_and(|unit| {
            stripe::try_hold(unit, self.offset)
                .is_some_and(|held| self.make_room(&held, unit, (down, n as u64), may_grant))
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

    /// A collection during which no word moved. With a gate closed this ends.
    pub(super) fn collect_at_rest(self) -> Moved {
        let mut before = self.collect();
        loop {
            let now = self.collect();
            if now == before {
                return now;
            }
            before = now;
        }
    }

    /// Whether the shard was granted. Once 2^64 were added and as much taken away, to the unit, one without room may look as
    /// if not: granting it again moves both marks by as much, and counts too much drift.
    fn is_granted(self, unit: usize) -> bool {
        let words = [UP, UP + LIMIT, DOWN, DOWN + LIMIT];
        words
            .iter()
            .any(|&word| word_at(unit, self.offset + word).load(Relaxed) != 0)
    }

    pub(super) fn granted(self) -> impl Iterator<Item = usize> {
        percpu::used().filter(move |&unit| self.is_granted(unit))
    }

    /// A limit as if no gate were closed, and how far its word is from it. With the shard's lock held; the word may move on.
    fn room(self, unit: usize, half: usize) -> (u64, u64) {
        let limit = word_at(unit, self.offset + half + LIMIT).load(Relaxed);
        // Acquire pairs with the commit.
        let word = word_at(unit, self.offset + half).load(Acquire);
        let behind = word.wrapping_sub(limit) as i64;
        let gates = u64::try_from(behind).map_or(0, |behind| behind.div_ceil(GATE));
        let limit = limit.wrapping_add(gates.wrapping_mul(GATE));
        (limit, limit.wrapping_sub(word))
    }

    /// Moves a limit, whatever gates are closed.
    fn move_limit(self, unit: usize, half: usize, by: u64) {
        // Release: who sees the limit sees what allowed it: the drift, the total.
        word_at(unit, self.offset + half + LIMIT).fetch_add(by, Release);
    }

    pub(super) fn move_limits(self, unit: usize, by: u64) {
        self.move_limit(unit, DOWN, by);
        self.move_limit(unit, UP, by);
    }

    /// Makes room for an add, down or up and its size, on `unit` if its batch allows: grants the shard, or cancels and folds.
    fn make_room(self, held: &Held, unit: usize, (down, n): (bool, u64), may_grant: bool) -> bool {
        let batch = self.batch();
        let (gates, parked) = self.closed(unit);
        if n > batch || gates != 0 {
            return false;
        }
        if parked {
            self.move_limits(unit, PARK);
        }
        if !self.is_granted(unit) {
            if may_grant {
                self.grant(held, unit, batch);
            }
            return may_grant;
        }
        let [up, down_half] = self.cancel(unit, batch);
        let left = batch - if down { down_half } else { up };
        // Where ups and downs balance, the total's line stays where it is.
        if left < n.max(batch / 2) {
            self.fold_rest(unit, batch, batch, [up, down_half]);
        }
        true
    }

    /// Lets adds into a shard for the first time, with its lock held.
    fn grant(self, _held: &impl Sized, unit: usize, batch: u64) {
        // The drift first: at no moment may a shard have room that it does not count.
        shared(self.offset + GRANTED).fetch_add(ONE_SHARD, AcqRel);
        self.move_limits(unit, batch);
    }

    /// Whether [`fit_batch`](Self::fit_batch) may have something to do.
    pub(super) fn wants_another_batch(self, unit: usize, most: u64) -> bool {
        let (batch, drift) = (self.batch(), self.drift());
        if self.is_granted(unit) {
            batch < BATCH_MOST && drift.saturating_mul(2) <= most
        } else {
            // Without a fence a batch that is too large for one shard more stays.
            drift / batch < most && (drift + batch <= most || !pinfold_rseq::fence_is_refused())
        }
    }

    /// Chooses a batch that makes room for `n` on `unit` while the drift stays within `most`: twice the batch when a shard is
    /// full or `n` beyond it, less when `unit` is a new shard and all together would be too much; and grants a new shard. False when
    /// there is none.
    pub(super) fn fit_batch(self, held: &AllHeld, unit: usize, n: u64, most: u64) -> bool {
        let granted = self.is_granted(unit);
        let shards = self.granted().count() as u64 + u64::from(!granted);
        let fits = |batch: u64| batch <= BATCH_MOST && shards.saturating_mul(batch) <= most;
        // Beyond a share of the drift for each CPU, a new shard needs a smaller batch, and that
        // needs a fence.
        let share = most / possible() as u64;
        let may_widen = |batch: u64| fits(batch) && (batch <= share || pinfold_rseq::can_fence());
        let mut batch = self.batch();
        while !fits(batch) && batch > 1 {
            batch /= 2;
        }
        if !fits(batch) || (batch < self.batch() && !self.lower(held, batch)) {
            return false;
        }
        if granted && may_widen(batch * 2) {
            batch *= 2;
        }
        while batch < n && may_widen(batch * 2) {
            batch *= 2;
        }
        if batch > self.batch() {
            self.raise(held, batch);
        }
        // Here and not later: only with all locks held is the sum of all batches known.
        if !granted {
            self.grant(held, unit, batch);
        }
        n <= batch
    }

    /// Raises the batch: the drift first, then the limits.
    pub(super) fn raise(self, held: &AllHeld, batch: u64) {
        let more = batch - self.batch();
        let shards = self.granted().count() as u64;
        self.set_batch(held, shards, batch);
        self.granted().for_each(|unit| self.move_limits(unit, more));
    }

    /// Lowers the batch: closes the gate, waits until no section is under way, folds everything, and only then counts less
    /// drift. False, and nothing changed, when the kernel cannot fence.
    #[inline(never)]
    pub(super) fn lower(self, held: &AllHeld, batch: u64) -> bool {
        let mut closed = Closed::none();
        let _gate = self.gate(&mut closed);
        let quiet = self.quiesce();
        if quiet {
            let shards = self.fold_gated(held, batch) as u64;
            // Both totals by the same: a read that began before does not take the new drift for its own.
            shared(self.offset + FOLDED_UP).fetch_add(1, Release);
            shared(self.offset + FOLDED_DOWN).fetch_add(1, Release);
            self.set_batch(held, shards, batch);
        }
        quiet
    }

    /// Brings a shard's marks up to its words. Returns whether they were behind.
    fn fold_unit(self, _held: &Held, unit: usize) -> bool {
        let batch = self.batch();
        let before = self.room(unit, UP).0;
        let rest = self.cancel(unit, batch);
        self.fold_rest(unit, batch, batch, rest);
        rest != [0, 0] || before != self.room(unit, UP).0
    }

    /// Moves both marks forward by what both words have moved, which changes no total. Returns how far each word is past its
    /// mark then.
    ///
    /// When one limit is raised before the other, the words of the other side have moved as far already, and do not go back: the
    /// difference of the two stays within the batch.
    fn cancel(self, unit: usize, batch: u64) -> [u64; 2] {
        let [up, down] = [UP, DOWN].map(|half| batch - self.room(unit, half).1);
        let both = up.min(down);
        if both != 0 {
            self.move_limits(unit, both);
        }
        [up - both, down - both]
    }

    /// Adds `rest` to one total, unless the totals would leave the reach by it. Returns whether it
    /// did.
    ///
    /// The totals only grow: while this looks, the other one can only move away from the end of the
    /// reach to which this one goes.
    fn raise_total(self, total: usize, rest: u64) -> bool {
        let (word, reach) = (shared(self.offset + total), self.reach());
        if rest == 0 || reach == Reach::NONE {
            // Release: who sees the total sees the adds.
            word.fetch_add(rest, Release);
            return true;
        }
        let slack = self.most_drift();
        let other = shared(self.offset + (FOLDED_UP + FOLDED_DOWN - total)).load(Relaxed);
        let net = |now: u64| match total {
            FOLDED_UP => now.wrapping_sub(other) as i64,
            _ => other.wrapping_sub(now) as i64,
        };
        let raised =
            |now: u64| Some(now.wrapping_add(rest)).filter(|&now| reach.allows(net(now), slack));
        word.fetch_update(Release, Relaxed, raised).is_ok()
    }

    /// Adds what the words are past their marks, `rest`, to the totals, and puts the limits a batch of `after` ahead instead of
    /// `before`. With a reach stated, a word whose total may not grow stays where it is.
    fn fold_rest(self, unit: usize, before: u64, after: u64, rest: [u64; 2]) {
        for (half, total, rest) in [(UP, FOLDED_UP, rest[0]), (DOWN, FOLDED_DOWN, rest[1])] {
            if rest != 0 && !self.raise_total(total, rest) {
                continue;
            }
            if rest != 0 || before != after {
                self.move_limit(unit, half, rest.wrapping_add(after).wrapping_sub(before));
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
                    .is_some_and(|held| still_there() && self.fold_unit(&held, unit))
        });
        moved.count()
    }

    /// Folds all shards while a gate is closed, for a batch that is `batch` from now on; returns how many there are. A smaller
    /// batch than before needs [`quiesce`](Self::quiesce) first.
    pub(super) fn fold_gated(self, _held: &AllHeld, batch: u64) -> usize {
        let before = self.batch();
        let folded = self.granted().map(|unit| {
            let rest = self.cancel(unit, before);
            self.fold_rest(unit, before, batch, rest);
        });
        folded.count()
    }
}
