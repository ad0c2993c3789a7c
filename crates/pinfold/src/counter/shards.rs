//! The shards of one counter, and the totals that they are folded into.
//!
//! A counter has a *shard* on each CPU: a block of four words, at the same offset of every CPU's
//! unit. It has one *total*: a block of four words at that offset of the shared unit.
//!
//! | shard | content | total | content |
//! |---|---|---|---|
//! | `up` | all that was added on this CPU | `folded_up` | what folds have added upwards |
//! | `down` | all that was taken away | `folded_down` | what folds have added downwards |
//! | `folded` | what this shard's folds have added | `active` | the number of active shards, and the batch |
//! | `batch` | the batch, less what freezes took | `estimate` | what shards held at the last look from afar |
//!
//! The *base* is an atomic in the counter's handle. Adds that use no shard go there. The other
//! terms:
//!
//! * A shard's *net* is `up - down`. Its *distance* is the net less `folded`, a signed number.
//! * A *fold* moves `folded` and the total by the same amount, so that the shard's distance is
//!   small or has the other sign. The CPU itself folds, when an add has taken the distance past the
//!   *batch*.
//! * An *estimate* is the sum of the distances of all shards. Any thread can compute it, and writes
//!   nothing but the word in the total.
//! * A shard is *active* once the slow path has counted it in `active` and set its batch. Before
//!   that, its four words are zero, and no add can succeed there.
//! * The *drift* is twice the batch times the number of active shards.
//!
//! All words count modulo 2^64.
//!
//! # Writers
//!
//! * `up` and `down`: the CPU itself, in critical sections that check the distance. They only grow.
//! * `folded`: a thread that has [claimed](pinfold_rseq::shard) the shard, in a critical section on
//!   the CPU. That thread ends the claim by a plain store, from any CPU. Also a thread that holds
//!   all locks of the counter and has frozen it.
//! * A shard's `batch`: the holder of the shard's [lock](super::stripe) that activates it, the
//!   holder of all locks that changes the batch, and a thread that freezes the counter or ends its
//!   freeze, from any CPU, by atomic adds.
//! * `folded_up`, `folded_down`: threads that have claimed a shard, by atomic adds.
//! * The number of active shards: the holder of a shard's lock, for that shard, by atomic adds.
//! * The batch in `active`: the holder of all the counter's locks.
//! * `estimate`: the holder of one of the counter's locks.
//!
//! # The fold
//!
//! 1. The critical section [`claim`](pinfold_rseq::Units::claim) replaces `folded` by a token. From
//!    then on the shard's net does not move: adds on this CPU find the shard claimed, and go to
//!    the base. So the section alone decides which thread folds.
//! 2. The thread adds an amount to the total, by one atomic add.
//! 3. It stores `folded`, moved by that amount.
//!
//! # Invariants
//!
//! 1. The distance is at most twice the batch, on both sides, while the shard is not claimed. The
//!    critical section checks this before it commits. The batch is lowered only by a freeze, or
//!    after a fence, when no section is under way.
//! 2. `folded_up - folded_down` is the sum of `folded` over all shards, where a claimed shard
//!    counts with the value before or after its fold. The net of a claimed shard is at most twice
//!    the batch away from both. So at each moment, the net of all shards is at most the drift away
//!    from `folded_up - folded_down`.
//! 3. The value is the base, plus the sum of `up`, less the sum of `down`. Folds, estimates and
//!    freezes do not change it.
//!
//! A thread may stop for long between the steps of its fold. Its shard then stays claimed, which
//! costs the CPU an atomic add for each add, and changes no value and no bound. The same holds in
//! the child of a fork, which inherits claims of threads that it does not have. There, the next add
//! that finds such a claim [repairs](Shards::repair) the shard.
//!
//! # The freeze
//!
//! [`freeze`](Shards::freeze) takes [`FREEZE`] from the batch of every shard. Every add and every
//! claim that begins later fails, and the add goes to the counter's base. A word whose add had
//! begun may still move once. After [`quiesce`](Shards::quiesce) no word moves. Claims may still be
//! under way then.
//!
//! A counter may be frozen several times at once, by different threads, or by a signal handler and
//! the thread that it interrupted: each takes its own [`FREEZE`]. The batch is below [`FREEZE`]. So
//! a shard's `batch`, modulo [`FREEZE`], is the batch that it has after all freezes.

use self::Direction::{Down, Up};
use super::fork::is_stale;
use super::freeze::Frozen;
use super::primitive::{AtomicU64, can_fence, fence_is_refused, possible};
use super::stripe::{self, AllHeld};
use crate::counter_units::{self, CLOSED, shared, units, word_at};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use pinfold_rseq::MAX_INDEX;
pub(crate) use pinfold_rseq::shard::{MAX_BATCH, REFUSED};
use pinfold_rseq::shard::{SHARD_SIZE, is_claimed};

/// Bytes of a shard, and of a total.
pub(crate) const SIZE: usize = SHARD_SIZE;
/// What a freeze takes from a shard's batch. A power of two above every batch, so that a freeze
/// makes the batch negative, and the batch stays right modulo [`FREEZE`].
pub(super) const FREEZE: u64 = 1 << 44;
const _: () = assert!(MAX_BATCH < FREEZE);

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

    /// Returns the bytes from the beginning of a shard or of a total to the word of this direction.
    const fn word(self) -> usize {
        match self {
            Up => 0,
            Down => 8,
        }
    }
}

/// Bytes from the beginning of a shard to `folded` and to `batch`.
const FOLDED: usize = 16;
const BATCH: usize = 24;
/// Bytes from the beginning of a total to `active` and to `estimate`.
const ACTIVE: usize = 16;
const ESTIMATE: usize = 24;

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

/// Returns the largest error of a read of a counter with `shards` active shards: each holds at most
/// twice its batch, and so does its part of the estimate.
pub(super) const fn largest_error(shards: u64, batch: u64) -> u64 {
    shards.saturating_mul(4 * batch)
}

/// Returns the largest power of two that `shards` shards may have as their batch while the error is
/// at most `most`, and at least 1.
pub(super) fn batch_for(most: u64, shards: usize) -> u64 {
    let share = (most / largest_error(shards as u64, 1)).max(1);
    1 << share.ilog2()
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

    /// Returns the drift: twice the batches of all active shards together.
    pub(crate) fn drift(self) -> u64 {
        // Acquire pairs with the releases in `activate` and `set_batch`: a thread that sees this
        // drift also sees the folds that allowed it.
        let active = shared(self.offset + ACTIVE).load(Acquire);
        (active / ONE_SHARD).saturating_mul(2 * (active & BATCH_BITS))
    }

    /// Sets the batch and the number of active shards, and so the drift.
    fn set_batch(self, _held: &AllHeld, shards: u64, batch: u64) {
        // Release: a thread that sees this drift sees the folds that allowed it.
        shared(self.offset + ACTIVE).store(shards * ONE_SHARD + batch, Release);
    }

    /// Adds `n`, which is from 0 to [`MAX_BATCH`], to this CPU's word of `direction`.
    ///
    /// Returns [`REFUSED`], which is negative, if nothing was added. Another negative result says
    /// that the distance is past the batch, and that the shard should be folded.
    #[inline(always)]
    pub(crate) fn add(self, direction: Direction, n: i64) -> i64 {
        debug_assert!(n as u64 <= MAX_BATCH || self.offset == CLOSED);
        // SAFETY: the caller of `at` gave the offset of a block of four words.
        unsafe {
            match direction {
                Up => units().count_up(self.offset, n),
                Down => units().count_down(self.offset, n),
            }
        }
    }

    /// Returns the totals, without a lock. The two words are not read at the same moment.
    pub(crate) fn folded(self) -> Moved {
        // Acquire pairs with the release in `raise_total`: a thread that sees the total also sees
        // the adds in it. Acquire also keeps a reader's two loads of the totals in order.
        Moved {
            up: shared(self.offset + Up.word()).load(Acquire),
            down: shared(self.offset + Down.word()).load(Acquire),
        }
    }

    /// Returns the sums of `up` and of `down` over all shards.
    ///
    /// If two collections agree, no word moved between the end of the first and the beginning of
    /// the second, because words only grow.
    #[inline]
    pub(crate) fn collect(self) -> Moved {
        let mut sum = Moved { up: 0, down: 0 };
        counter_units::for_each_used(self.offset, |[up, down, _, _]| {
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

    /// Returns a shard's `batch`, less what freezes took from it.
    fn batch_word(self, unit: usize) -> &'static AtomicU64 {
        word_at(unit, self.offset + BATCH)
    }

    /// Returns whether the shard is active. The batch of an active shard is never 0, frozen or not.
    pub(super) fn is_active(self, unit: usize) -> bool {
        self.batch_word(unit).load(Relaxed) != 0
    }

    /// Returns the units whose shards are active.
    pub(super) fn active(self) -> impl Iterator<Item = usize> {
        counter_units::used().filter(move |&unit| self.is_active(unit))
    }

    /// Returns whether the shard of `unit` is frozen.
    pub(super) fn is_frozen(self, unit: usize) -> bool {
        (self.batch_word(unit).load(Relaxed) as i64) < 0
    }

    /// Moves the batch of a shard by `by`, whether the shard is frozen or not.
    pub(super) fn move_batch(self, unit: usize, by: u64) {
        // Release: a section that sees this batch sees the drift that allowed it.
        self.batch_word(unit).fetch_add(by, Release);
    }

    /// Activates the shard of `unit`. The caller holds its lock.
    pub(super) fn activate(self, _held: &impl Sized, unit: usize, batch: u64) {
        // Raises the drift first, so that a shard never holds more than the drift counts.
        shared(self.offset + ACTIVE).fetch_add(ONE_SHARD, AcqRel);
        self.move_batch(unit, batch);
    }

    /// Returns whether [`fit_batch`](Self::fit_batch) may have something to do for the shard of
    /// `unit`, with an error of at most `most`.
    pub(super) fn wants_another_batch(self, unit: usize, most: u64) -> bool {
        let batch = self.batch();
        let shards = self.drift() / (2 * batch);
        if self.is_active(unit) {
            batch < MAX_BATCH && largest_error(shards, 2 * batch) <= most
        } else {
            // Without a fence, a batch that is too large for one more shard cannot be lowered.
            largest_error(shards + 1, 1) <= most
                && (largest_error(shards + 1, batch) <= most || !fence_is_refused())
        }
    }

    /// Chooses a batch that allows an add of `n` on `unit`, if there is one with an error of at
    /// most `most`.
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
        let fits = |batch: u64| batch <= MAX_BATCH && largest_error(shards, batch) <= most;
        // If a batch exceeds one CPU's share of the error, it must be lowered when another CPU
        // begins to use the counter. That needs a fence.
        let share = batch_for(most, possible());
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

    /// Raises the batch: first the drift, and then the batches of the shards.
    pub(super) fn raise(self, held: &AllHeld, batch: u64) {
        let more = batch - self.batch();
        let shards = self.active().count() as u64;
        self.set_batch(held, shards, batch);
        self.active().for_each(|unit| self.move_batch(unit, more));
    }

    /// Lowers the batch. Returns false, with nothing changed, if the fence fails, or if a fold is
    /// under way.
    ///
    /// 1. Freezes the counter, and waits until no section is under way.
    /// 2. [Folds everything](Self::fold_all).
    /// 3. Lowers the batches of the shards.
    /// 4. Adds 1 to both totals, and stores the smaller drift.
    fn lower(self, held: &AllHeld, batch: u64) -> bool {
        self.lower_after(held, batch, false, Shards::quiesce)
    }

    /// Lowers the batch as [`lower`](Self::lower) does. `quiesce` waits until no section is under
    /// way, or returns false. Waits for folds if `may_wait` is true.
    #[inline(never)]
    pub(super) fn lower_after(
        self,
        held: &AllHeld,
        batch: u64,
        may_wait: bool,
        quiesce: impl FnOnce(Shards) -> bool,
    ) -> bool {
        let mut frozen = Frozen::none();
        let _freeze = self.freeze(&mut frozen);
        let quiet = quiesce(self) && self.fold_all(held, may_wait);
        let shards = self.active().count() as u64;
        if quiet {
            let by = batch.wrapping_sub(self.batch());
            self.active().for_each(|unit| self.move_batch(unit, by));
            // Moves both totals by the same amount, which does not change what is read. A read that
            // began before finds other totals when it loads them again, and so does not return the
            // new drift for an older value. Between the two steps, a read is off by 1.
            if shards != 0 {
                self.raise_total(Up, 1);
                self.raise_total(Down, 1);
            }
            self.set_batch(held, shards, batch);
        }
        quiet
    }

    /// Folds all shards, so that every distance is 0. The counter is frozen, and no section is
    /// under way.
    ///
    /// If a thread folds, waits for its end if `may_wait` is true, for about a second. Returns
    /// false if the fold has not ended by then, or if `may_wait` is false. Claims that a fork has
    /// left behind end here.
    pub(super) fn fold_all(self, _held: &AllHeld, may_wait: bool) -> bool {
        /// Pauses, of which most sleep.
        const MOST: u32 = 10_000;
        for unit in self.active() {
            let mut tries = 0;
            while self.claim_on(unit).is_some_and(|claim| !claim.is_stale()) {
                // A signal handler may have interrupted the folding thread. If the handler forks,
                // it waits for the locks that the caller holds, so the fold ends only after this
                // gives up.
                if !may_wait || tries >= MOST {
                    return false;
                }
                stripe::pause(&mut tries);
            }
        }
        // No claim begins while the counter is frozen, so no total moves any more.
        let missing = (self.collect().net()).wrapping_sub(self.folded().net());
        self.raise_total(Direction::of(missing), missing.unsigned_abs());
        for unit in self.active() {
            self.set_folded(unit, self.net_of(unit));
        }
        self.set_estimate(0);
        true
    }

    /// Adds `amount` to the total of `direction`.
    pub(super) fn raise_total(self, direction: Direction, amount: u64) {
        // Release: a thread that sees the total sees the adds in it.
        shared(self.offset + direction.word()).fetch_add(amount, Release);
    }

    /// Returns the estimate: what the shards held at the last look from afar.
    pub(super) fn estimated(self) -> i64 {
        // Acquire pairs with the release in `set_estimate`: a thread that sees the estimate also
        // sees the adds in it.
        shared(self.offset + ESTIMATE).load(Acquire) as i64
    }

    /// Stores the estimate. The caller holds one of the counter's locks.
    pub(super) fn set_estimate(self, found: i64) {
        // Release pairs with the acquire in `estimated`.
        shared(self.offset + ESTIMATE).store(found as u64, Release);
    }

    /// Stores `folded` of the shard of `unit`, where no thread can claim it meanwhile.
    pub(super) fn set_folded(self, unit: usize, folded: u64) {
        // Release, as at the end of a claim: a thread that sees this value sees the total.
        word_at(unit, self.offset + FOLDED).store(folded, Release);
    }

    /// Returns `up - down` of the shard of `unit`.
    pub(super) fn net_of(self, unit: usize) -> u64 {
        // Acquire pairs with the commit of an add. A thread that sees a total raised by a fold then
        // also sees what the adding thread did before.
        let word =
            |direction: Direction| word_at(unit, self.offset + direction.word()).load(Acquire);
        word(Up).wrapping_sub(word(Down))
    }

    /// Returns the net of the shard of `unit`, and its `folded`, at one moment.
    pub(super) fn look_at(self, unit: usize) -> Look {
        let load = || {
            let folded = word_at(unit, self.offset + FOLDED);
            let words = [Up, Down].map(|direction| word_at(unit, self.offset + direction.word()));
            // Acquire pairs with the commit of an add, and with the release at the end of a claim:
            // this thread sees the total. Acquire also keeps the loads in order.
            (folded.load(Acquire), words.map(|word| word.load(Acquire)))
        };
        let mut before = load();
        loop {
            let now = load();
            // `up` and `down` only grow, so the net was the same at both loads of `folded`.
            if now == before {
                let (folded, [up, down]) = now;
                let net = up.wrapping_sub(down);
                return Look { net, folded };
            }
            before = now;
        }
    }

    /// Returns the claim of the shard of `unit`, or `None` if it is not claimed.
    pub(super) fn claim_on(self, unit: usize) -> Option<Look> {
        Some(self.look_at(unit)).filter(Look::is_claimed)
    }
}

/// What a thread sees of a shard.
#[derive(Clone, Copy)]
pub(super) struct Look {
    pub(super) net: u64,
    /// What was folded, or a token beyond the net.
    pub(super) folded: u64,
}

impl Look {
    pub(super) fn is_claimed(&self) -> bool {
        is_claimed(self.net, self.folded)
    }

    /// Returns whether the shard is claimed by a thread that a fork has left behind.
    pub(super) fn is_stale(&self) -> bool {
        self.is_claimed() && is_stale(self.folded.wrapping_sub(self.net))
    }
}
