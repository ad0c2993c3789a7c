//! The slow path of an add: folds the CPU's shard, activates it, or adds to the base.

use super::PerCpuCounter;
use super::fork::token;
use super::primitive::{Claim, fence};
use super::shards::{Direction, MAX_BATCH, REFUSED, Shards};
use super::stripe;
use crate::counter_units::{self, units};
use core::sync::atomic::Ordering::{AcqRel, SeqCst};

impl Shards {
    /// Adds as [`add`](Self::add) does, after it has made that possible: activates this CPU's
    /// shard if `may_activate` is true and the shard is not active yet, or folds it.
    ///
    /// Returns false if `n` is above the batch, if the shard is frozen or another thread folds it,
    /// or if the shard cannot be activated at this moment.
    #[cold]
    #[inline(never)]
    pub(crate) fn add_slow(self, direction: Direction, n: i64, may_activate: bool) -> bool {
        let fold = || self.fold_past_batch(direction);
        self.add_slow_after(direction, n, may_activate, fold)
    }

    /// Adds as [`add_slow`](Self::add_slow) does, but calls `fold` to fold this CPU's shard.
    pub(super) fn add_slow_after(
        self,
        direction: Direction,
        n: i64,
        may_activate: bool,
        fold: impl FnOnce(),
    ) -> bool {
        let Some(unit) = counter_units::install_here() else {
            return false;
        };
        if n as u64 > self.batch() || self.is_frozen(unit) {
            return false;
        }
        if self.is_active(unit) {
            fold();
        } else if !may_activate || !self.try_activate(unit) {
            return false;
        }
        // By now the thread may be on another CPU, or other threads may have used the shard.
        self.add(direction, n) != REFUSED
    }

    /// Returns whether another thread folds this CPU's shard. Ends a claim that a fork has left
    /// behind.
    #[inline]
    pub(crate) fn is_claimed_here(self) -> bool {
        let claim = counter_units::install_here().and_then(|unit| self.claim_on(unit));
        if claim.is_some_and(|claim| claim.is_stale()) {
            self.repair();
        }
        claim.is_some()
    }

    /// Activates the shard of `unit`. Returns false if another thread holds its lock.
    fn try_activate(self, unit: usize) -> bool {
        stripe::try_hold(unit, self.offset()).is_some_and(|held| {
            if !self.is_active(unit) {
                // The batch does not change while the lock is held.
                self.activate(&held, unit, self.batch());
            }
            true
        })
    }

    /// Folds this CPU's shard, if its distance in `direction` is more than the batch. Leaves it
    /// half a batch on the other side, so that a CPU that counts in one direction folds less often.
    ///
    /// Does nothing if another thread has claimed the shard, or if it is frozen. Costs one critical
    /// section, one atomic add to the total, and one store.
    #[inline]
    pub(crate) fn fold_past_batch(self, direction: Direction) {
        let Some(claim) = self.claim() else {
            return self.repair();
        };
        let (most, rest) = (claim.batch, claim.batch / 2);
        self.fold(claim, direction, most, rest, |by| {
            self.raise_total_in_order(direction, by);
        });
    }

    /// Folds this CPU's shard, if its distance is `most` or more. Leaves a distance of 0.
    pub(super) fn fold_from(self, most: u64) {
        let Some(claim) = self.claim() else {
            return self.repair();
        };
        let direction = Direction::of(claim.net.wrapping_sub(claim.folded) as i64);
        self.fold(claim, direction, most.saturating_sub(1), 0, |by| {
            self.raise_total_in_order(direction, by);
        });
    }

    /// Claims this CPU's shard.
    #[inline(always)]
    pub(super) fn claim(self) -> Option<Claim> {
        // SAFETY: the caller of `at` gave the offset of a block of four words.
        unsafe { units().claim(self.offset(), token()) }
    }

    /// Ends a claim. Folds the shard if its distance in `direction` is more than `most`, and leaves
    /// a distance of `rest` on the other side. Calls `raise` with what the total gets in
    /// `direction`.
    #[inline(always)]
    pub(super) fn fold(
        self,
        claim: Claim,
        direction: Direction,
        most: u64,
        rest: u64,
        raise: impl FnOnce(u64),
    ) {
        let (net, folded) = (claim.net, claim.folded);
        // Separate code for each direction, so that the processor finds the total's address without
        // a wait for the words of the shard.
        let (distance, after) = match direction {
            Direction::Up => (net.wrapping_sub(folded), net.wrapping_add(rest)),
            Direction::Down => (folded.wrapping_sub(net), net.wrapping_sub(rest)),
        };
        if (distance as i64) <= most as i64 {
            return claim.release(folded);
        }
        raise(distance + rest);
        claim.release(after);
    }

    /// Adds `amount` to the total of `direction`, before the CPU's next sections.
    #[inline(always)]
    fn raise_total_in_order(self, direction: Direction, amount: u64) {
        self.raise_total(direction, amount);
        order_total();
    }
}

/// Orders a fold's add to the total before what the CPU loads later. Pairs with the fence in
/// `limited_add`: if that call's load of the total misses the fold, later sections find the shard
/// frozen. On x86-64, the atomic add does that by itself.
#[inline(always)]
fn order_total() {
    if cfg!(not(target_arch = "x86_64")) {
        fence(SeqCst);
    }
}

impl PerCpuCounter {
    /// Finishes an add of `n` after which [`Shards::add`] returned `left`, a negative number.
    #[cold]
    #[inline(never)]
    pub(super) fn finish_add(&self, shards: Shards, n: i64, left: i64) {
        if left == REFUSED {
            return match shards.is_claimed_here() {
                true => self.add_to_base(n),
                false => self.add_slow(n),
            };
        }
        if self.max_drift().is_some() {
            self.fit_batch(shards, n.unsigned_abs());
        }
        shards.fold_past_batch(Direction::of(n));
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn add_slow(&self, n: i64) {
        if !self.add_to_shard(n) {
            self.add_to_base(n);
        }
    }

    /// Adds `n` to this CPU's shard. First activates the shard, changes the batch or folds, if that
    /// is needed. Returns false if `n` does not fit, the counter is frozen, or there is no memory.
    fn add_to_shard(&self, n: i64) -> bool {
        let size = n.unsigned_abs();
        let shards = (size <= MAX_BATCH).then(|| self.shards_or_alloc());
        // If the batch does not widen, an add above the batch never fits.
        let max_drift = self.max_drift();
        let fits = |shards: &Shards| max_drift.is_some() || size <= shards.batch();
        shards.flatten().filter(fits).is_some_and(|shards| {
            self.fit_batch(shards, size);
            shards.add_slow(Direction::of(n), size as i64, max_drift.is_none())
        })
    }

    /// Widens the batch for an add of `size`, or lowers it for a new shard, if this counter's batch
    /// widens.
    #[inline(never)]
    fn fit_batch(&self, shards: Shards, size: u64) {
        if let Some(max_drift) = self.max_drift()
            && let Some(unit) = counter_units::install_here()
            && shards.wants_another_batch(unit, max_drift)
            && let Some(held) = stripe::try_hold_all(shards.offset())
        {
            shards.fit_batch(&held, unit, size, max_drift);
            self.expect_batch(shards.batch());
        }
    }

    /// Adds `n` to the base, by one atomic add.
    #[inline]
    pub(crate) fn add_to_base(&self, n: i64) {
        // Release: a thread that sees this add sees what this thread did before. It pairs with the
        // acquire of the sums.
        self.base.fetch_add(n, AcqRel);
    }
}
