//! The shards of one counter, and the totals that they are folded into.
//!
//! A counter has a *shard* on each CPU: a block of four words, at the same offset of every CPU's
//! unit. It has one *total*: a block of four words at that offset of the shared unit.
//!
//! | shard | content | total | content |
//! |---|---|---|---|
//! | `up` | all that was added on this CPU | `folded_up` | what folds have added for `up` |
//! | `up_limit` | how far `up` may go | `folded_down` | what folds have added for `down` |
//! | `down` | all that was taken away | `active` | the number of active shards, and the batch |
//! | `down_limit` | how far `down` may go | | unused |
//!
//! The *base* is an atomic in the counter's handle. Adds that use no shard go there. A *fold* adds
//! to the total how far a word has moved since the last fold, and raises the word's limit. The
//! other terms:
//!
//! * A word's *folded value* says how much of the word has been folded. It is the word's limit less
//!   the batch.
//! * A word's *unfolded* amount is how far it is past its folded value. The *batch* is the most
//!   that it may be.
//! * A word's *headroom* is how far it may grow before it reaches its limit.
//! * A shard is *active* once the slow path has counted it in `active` and set its limits. Before
//!   that, its four words are zero, and no add can succeed there.
//! * The *drift* is the batch times the number of active shards.
//!
//! All words count modulo 2^64.
//!
//! # Writers
//!
//! * `up` and `down`: the CPU itself, in critical sections that check the limit. They only grow.
//! * A shard's limits: the holder of the shard's [lock](super::stripe), and a thread that freezes
//!   the counter or ends its freeze, from any CPU, by atomic adds.
//! * `folded_up`, `folded_down` and the number of active shards: the holder of a shard's lock, for
//!   that shard, by atomic adds.
//! * The batch: the holder of all the counter's locks.
//!
//! # Invariants
//!
//! 1. `folded value <= word <= limit`, while the shard is not frozen. The critical section checks
//!    the limit before it commits. A limit is lowered only by a freeze, which changes no folded
//!    value, or after a fence, when no section is under way.
//! 2. `folded_up - folded_down` is the sum of the folded values of `up` less the sum of those of
//!    `down`. A fold first moves the total, and then the limit. Between the two steps the word has
//!    less headroom than its batch, however long the folding thread sleeps there. If both words of
//!    a shard have unfolded amounts, the smaller one is *cancelled*: both folded values move by
//!    it, and no total does.
//! 3. The value is the base, plus the sum of `up`, less the sum of `down`. Folds and freezes do not
//!    change it.
//!
//! # The freeze
//!
//! [`freeze`](Shards::freeze) takes [`FREEZE`] from every limit. Every add that begins later fails,
//! and goes to the counter's base. A word whose add had begun may still move once. After
//! [`quiesce`](Shards::quiesce) no word moves.
//!
//! A counter may be frozen several times at once, by different threads, or by a signal handler and
//! the thread that it interrupted: each takes its own [`FREEZE`]. Without a freeze, a word's
//! headroom is from 0 to the batch, which is below [`FREEZE`]. So the distance from a word to its
//! limit, modulo [`FREEZE`], is the headroom that the word has after all freezes.

use self::Direction::{Down, Up};
use super::freeze::Frozen;
use super::primitive::{can_fence, fence_is_refused, possible};
use super::stripe::{self, AllHeld};
use crate::counter_units::{self, shared, units, word_at};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use pinfold_rseq::MAX_INDEX;

/// Bytes of a shard, and of a total.
pub(crate) const SIZE: usize = 32;
/// The largest batch: far below [`FREEZE`], so that a freeze takes away all headroom.
pub(crate) const MAX_BATCH: u64 = 1 << 40;
/// What a freeze takes from a limit. A power of two, so that a distance that wraps at 2^64 stays
/// right modulo [`FREEZE`].
pub(super) const FREEZE: u64 = 1 << 44;

/// The direction of an add. Each has a word in the shard, and a word in the total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Up,
    Down,
}

impl Direction {
    /// Returns the direction in which an add of `n` moves the value.
    #[inline(always)]
    pub(crate) fn of(n: i64) -> Direction {
        if n < 0 { Down } else { Up }
    }

    /// Returns the bytes from the beginning of a shard to the word.
    #[inline(always)]
    const fn word(self) -> usize {
        match self {
            Up => 0,
            Down => 16,
        }
    }

    /// Returns the bytes from the beginning of a total to the word.
    const fn folded(self) -> usize {
        match self {
            Up => 0,
            Down => 8,
        }
    }
}

/// Bytes from a word to its limit.
const LIMIT: usize = 8;
/// Bytes from the beginning of a total to `active`.
const ACTIVE: usize = 16;

/// The bits of `active` that hold the batch. The number of active shards is above them.
const BATCH_BITS: u64 = (1 << 41) - 1;
/// One active shard in `active`.
const ONE_SHARD: u64 = BATCH_BITS + 1;
const _: () = assert!(MAX_BATCH <= BATCH_BITS && MAX_INDEX < 1 << 22);

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

/// The shards and the total of one counter, named by the offset of the counter's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shards {
    offset: usize,
}

impl Shards {
    /// Returns the shards and the total whose block is at `offset`.
    ///
    /// # Safety
    ///
    /// `offset` is that of a block of [`SIZE`] bytes, which is not freed while the result is used.
    pub(crate) unsafe fn at(offset: usize) -> Shards {
        Shards { offset }
    }

    /// Sets the batch of a fresh block, which no other thread knows yet.
    pub(crate) fn open(self, batch: u64) {
        shared(self.offset + ACTIVE).store(batch, Relaxed);
    }

    pub(crate) fn offset(self) -> usize {
        self.offset
    }

    pub(crate) fn batch(self) -> u64 {
        shared(self.offset + ACTIVE).load(Relaxed) & BATCH_BITS
    }

    /// Returns the drift: the sum of the batches of all active shards.
    pub(crate) fn drift(self) -> u64 {
        // Acquire pairs with the releases in `activate` and `set_batch`: a thread that sees this
        // drift also sees the folds that allowed it.
        let active = shared(self.offset + ACTIVE).load(Acquire);
        (active / ONE_SHARD).saturating_mul(active & BATCH_BITS)
    }

    /// Sets the batch and the number of active shards, and so the drift.
    fn set_batch(self, _held: &AllHeld, shards: u64, batch: u64) {
        // Release: a thread that sees this drift sees the folds that allowed it.
        shared(self.offset + ACTIVE).store(shards * ONE_SHARD + batch, Release);
    }

    /// Adds `n`, which is at least 0, to this CPU's word of `direction`. Returns false if the
    /// word's headroom is less than `n`.
    #[inline(always)]
    pub(crate) fn add(self, direction: Direction, n: i64) -> bool {
        let word = self.offset + direction.word();
        // SAFETY: the caller of `at` gave the offset of a block of four words. `word` is `up` or
        // `down` there, with its limit in the next word.
        unsafe { units().add_within(word, n) }
    }

    /// Returns the totals, without a lock. The two words are not read at the same moment.
    pub(crate) fn folded(self) -> Moved {
        // Acquire pairs with the release in `raise_total`: a thread that sees the total also sees
        // the adds in it. Acquire also keeps a reader's two loads of the totals in order.
        Moved {
            up: shared(self.offset + Up.folded()).load(Acquire),
            down: shared(self.offset + Down.folded()).load(Acquire),
        }
    }

    /// Returns the sums of `up` and of `down` over all shards.
    ///
    /// If two collections agree, no word moved between the end of the first and the beginning of
    /// the second, because words only grow.
    #[inline]
    pub(crate) fn collect(self) -> Moved {
        let mut sum = Moved { up: 0, down: 0 };
        counter_units::for_each_used(self.offset, |[up, _, down, _]| {
            // Acquire pairs with the commit of an add, which is a release: this thread also sees
            // what the adding thread did before. Acquire also keeps two collections in order.
            sum.up = sum.up.wrapping_add(up.load(Acquire));
            sum.down = sum.down.wrapping_add(down.load(Acquire));
        });
        sum
    }

    /// Collects until no word has moved during a collection. This ends if the counter is frozen.
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

    /// Returns whether the shard is active.
    ///
    /// The four words of an active shard without headroom can all be 0, after exactly 2^64 were
    /// added there and as much was taken away. Such a shard is activated again. That moves both
    /// folded values by the same amount, and makes the drift too large.
    pub(super) fn is_active(self, unit: usize) -> bool {
        let mut words = (0..SIZE).step_by(8);
        words.any(|word| word_at(unit, self.offset + word).load(Relaxed) != 0)
    }

    /// Returns the units whose shards are active.
    pub(super) fn active(self) -> impl Iterator<Item = usize> {
        counter_units::used().filter(move |&unit| self.is_active(unit))
    }

    /// Returns how far a word is below its limit. If the shard is frozen, the result is above
    /// [`FREEZE`], because the distance wraps below 0.
    fn below_limit(self, unit: usize, direction: Direction) -> u64 {
        let word = self.offset + direction.word();
        let limit = word_at(unit, word + LIMIT).load(Relaxed);
        // Acquire pairs with the commit of an add. A thread that sees a total raised by a fold then
        // also sees what the adding thread did before.
        limit.wrapping_sub(word_at(unit, word).load(Acquire))
    }

    /// Returns whether the shard of `unit` is frozen.
    pub(super) fn is_frozen(self, unit: usize) -> bool {
        self.below_limit(unit, Up) >= FREEZE
    }

    /// Returns how far `up` and `down` are past their folded values, frozen or not. The
    /// caller holds the shard's lock. The words may still grow.
    pub(super) fn unfolded(self, unit: usize) -> [u64; 2] {
        let batch = self.batch();
        [Up, Down].map(|direction| batch.wrapping_sub(self.below_limit(unit, direction) % FREEZE))
    }

    /// Moves a limit by `by`, whether the shard is frozen or not.
    pub(super) fn move_limit(self, unit: usize, direction: Direction, by: u64) {
        // Release: a section that sees this limit sees the drift or the total that allowed it.
        word_at(unit, self.offset + direction.word() + LIMIT).fetch_add(by, Release);
    }

    /// Moves both limits of a shard by `by`.
    pub(super) fn move_limits(self, unit: usize, by: u64) {
        self.move_limit(unit, Down, by);
        self.move_limit(unit, Up, by);
    }

    /// Activates the shard of `unit`. The caller holds its lock.
    pub(super) fn activate(self, _held: &impl Sized, unit: usize, batch: u64) {
        // Raises the drift first, so that a shard never has headroom that the drift does not count.
        shared(self.offset + ACTIVE).fetch_add(ONE_SHARD, AcqRel);
        self.move_limits(unit, batch);
    }

    /// Returns whether [`fit_batch`](Self::fit_batch) may have something to do for the shard of
    /// `unit`, with a drift of at most `most`.
    pub(super) fn wants_another_batch(self, unit: usize, most: u64) -> bool {
        let (batch, drift) = (self.batch(), self.drift());
        if self.is_active(unit) {
            batch < MAX_BATCH && drift.saturating_mul(2) <= most
        } else {
            // Without a fence, a batch that is too large for one more shard cannot be lowered.
            drift / batch < most && (drift + batch <= most || !fence_is_refused())
        }
    }

    /// Chooses a batch that allows an add of `n` on `unit`, if there is one with a drift of at most
    /// `most`.
    ///
    /// 1. Halves the batch until the batches of all active shards, and of `unit`'s if that is new,
    ///    fit into `most`. Lowering the batch needs a fence.
    /// 2. Doubles the batch if `most` allows and the shard was active before, because such a shard
    ///    has used up its batch.
    /// 3. Doubles the batch until `n` fits, as far as `most` allows.
    /// 4. Activates the shard of `unit` if that is new.
    pub(super) fn fit_batch(self, held: &AllHeld, unit: usize, n: u64, most: u64) {
        let was_active = self.is_active(unit);
        let shards = self.active().count() as u64 + u64::from(!was_active);
        let fits = |batch: u64| batch <= MAX_BATCH && shards.saturating_mul(batch) <= most;
        // If a batch exceeds one CPU's share of the drift, it must be lowered when another CPU
        // begins to use the counter. That needs a fence.
        let share = most / possible() as u64;
        let may_widen = |batch: u64| fits(batch) && (batch <= share || can_fence());
        let mut batch = self.batch();
        while !fits(batch) && batch > 1 {
            batch /= 2;
        }
        if !fits(batch) || (batch < self.batch() && !self.lower(held, batch)) {
            return;
        }
        if was_active && may_widen(batch * 2) {
            batch *= 2;
        }
        while batch < n && may_widen(batch * 2) {
            batch *= 2;
        }
        if batch > self.batch() {
            self.raise(held, batch);
        }
        // Activates the shard here: the sum of all batches is known only while all locks are held.
        if !was_active {
            self.activate(held, unit, batch);
        }
    }

    /// Raises the batch: first the drift, and then the limits.
    pub(super) fn raise(self, held: &AllHeld, batch: u64) {
        let more = batch - self.batch();
        let shards = self.active().count() as u64;
        self.set_batch(held, shards, batch);
        self.active().for_each(|unit| self.move_limits(unit, more));
    }

    /// Lowers the batch. Returns false, with nothing changed, if the fence fails.
    ///
    /// 1. Freezes the counter, and waits until no section is under way.
    /// 2. Folds all shards, with limits that are the new batch ahead of the folded values.
    /// 3. Adds 1 to both totals, and stores the smaller drift.
    pub(super) fn lower(self, held: &AllHeld, batch: u64) -> bool {
        self.lower_after(held, batch, Shards::quiesce)
    }

    /// Lowers the batch as [`lower`](Self::lower) does. `quiesce` waits until no section is under
    /// way, or returns false.
    #[inline(never)]
    pub(super) fn lower_after(
        self,
        held: &AllHeld,
        batch: u64,
        quiesce: impl FnOnce(Shards) -> bool,
    ) -> bool {
        let mut frozen = Frozen::none();
        let _freeze = self.freeze(&mut frozen);
        let quiet = quiesce(self);
        if quiet {
            let shards = self.fold_all(held, batch) as u64;
            // Moves both totals by the same amount, which does not change what is read. A read that
            // began before finds other totals when it loads them again, and so does not return the
            // new drift for an older value.
            self.raise_total(Up, 1);
            self.raise_total(Down, 1);
            self.set_batch(held, shards, batch);
        }
        quiet
    }

    /// Folds all that the words of a shard have moved, and sets each limit `batch` ahead of its
    /// word. Returns whether the words had moved.
    ///
    /// The smaller of the two unfolded amounts is cancelled. One limit is raised
    /// before the other, and its word may then grow at once. The error bound still holds: the other
    /// word has already moved as far, and never goes back. So the difference of the two amounts
    /// stays within the batch.
    pub(super) fn fold_unit(self, _held: &impl Sized, unit: usize, batch: u64) -> bool {
        let wider = batch.wrapping_sub(self.batch());
        let [up, down] = self.unfolded(unit);
        let both = up.min(down);
        if both != 0 {
            self.move_limits(unit, both);
        }
        for (direction, rest) in [(Up, up - both), (Down, down - both)] {
            if rest != 0 {
                self.raise_total(direction, rest);
            }
            if rest != 0 || wider != 0 {
                self.move_limit(unit, direction, rest.wrapping_add(wider));
            }
        }
        [up, down] != [0, 0]
    }

    /// Adds `rest` to the total of `direction`.
    pub(super) fn raise_total(self, direction: Direction, rest: u64) {
        // Release: a thread that sees the total sees the adds in it.
        shared(self.offset + direction.folded()).fetch_add(rest, Release);
    }

    /// Folds all shards. Returns how many had moved. Leaves out shards whose lock another thread
    /// holds.
    pub(super) fn fold(self) -> usize {
        let moved = counter_units::used().filter(|&unit| self.fold_on(unit, || true));
        moved.count()
    }

    /// Folds the shard of `unit`. Returns whether it had moved.
    ///
    /// Leaves out the shard if it is not active, or if another thread holds its lock. Calls
    /// `still_there` with the lock held, and does not touch the shard if that returns false.
    pub(super) fn fold_on(self, unit: usize, still_there: impl Fn() -> bool) -> bool {
        stripe::try_hold(unit, self.offset).is_some_and(|held| {
            still_there() && self.is_active(unit) && self.fold_unit(&held, unit, self.batch())
        })
    }

    /// Folds all shards, and sets their limits for a batch of `batch`. Returns how many shards are
    /// active.
    ///
    /// A batch below the present one needs [`quiesce`](Self::quiesce) first.
    pub(super) fn fold_all(self, held: &AllHeld, batch: u64) -> usize {
        let folded = self.active().map(|unit| self.fold_unit(held, unit, batch));
        folded.count()
    }
}
