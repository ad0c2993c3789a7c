//! The slow path of an add: folds the CPU's shard, or adds to the base.

use super::PerCpuCounter;
use super::shards::{Direction, MAX_BATCH, Shards};
use super::stripe::{self, Held};
use crate::counter_units;
use core::sync::atomic::Ordering::AcqRel;

impl Shards {
    /// Gives the word of this CPU headroom for `n`, and then adds as [`add`](Self::add) does.
    /// Activates the shard if `may_activate` is true and the shard is not active yet.
    ///
    /// Returns false if `n` is above the batch, if another thread holds the shard's lock, or if the
    /// shard is frozen.
    #[cold]
    #[inline(never)]
    pub(crate) fn add_slow(self, direction: Direction, n: i64, may_activate: bool) -> bool {
        let fits = counter_units::install_here().is_some_and(|unit| {
            stripe::try_hold(unit, self.offset()).is_some_and(|held| {
                self.make_headroom(&held, unit, direction, n as u64, may_activate)
            })
        });
        // By now the thread may be on another CPU, or other threads may have used the headroom.
        fits && self.add(direction, n)
    }

    /// Gives the word of `direction` on `unit` headroom for `n`, if the batch allows. Activates the
    /// shard by three atomic instructions, or cancels or folds by two.
    ///
    /// Cancels if that gives headroom for `n` and for half the batch: moves both folded values by
    /// the smaller of the unfolded amounts. If a CPU's additions and subtractions balance, no fold
    /// then touches the total's cache line. Otherwise folds the word that needs headroom, and
    /// leaves the opposite word as it is. Both steps are complete on their own: after each, every
    /// word is within a batch of its folded value.
    fn make_headroom(
        self,
        held: &Held,
        unit: usize,
        direction: Direction,
        n: u64,
        may_activate: bool,
    ) -> bool {
        let batch = self.batch();
        if n > batch || self.is_frozen(unit) {
            return false;
        }
        if !self.is_active(unit) {
            if may_activate {
                self.activate(held, unit, batch);
            }
            return may_activate;
        }
        let unfolded = self.unfolded(unit);
        let (own, both) = (unfolded[direction as usize], unfolded[0].min(unfolded[1]));
        if batch - (own - both) < n.max(batch / 2) {
            // A fold first raises the total, and then the limit.
            self.raise_total(direction, own);
            self.move_limit(unit, direction, own);
        } else if both != 0 {
            self.move_limits(unit, both);
        }
        true
    }

    /// Folds the shard of the caller's CPU, if its words have moved a net `batch` or more since
    /// the last fold, and no other thread holds its lock.
    pub(super) fn fold_here(self, batch: u64) {
        let Some(unit) = counter_units::install_here() else {
            return;
        };
        let [up, down] = self.unfolded(unit);
        if self.is_active(unit)
            && (up.wrapping_sub(down) as i64).unsigned_abs() >= batch
            && let Some(held) = stripe::try_hold(unit, self.offset())
        {
            self.fold_unit(&held, unit, self.batch());
        }
    }
}

impl PerCpuCounter {
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
    fn fit_batch(&self, shards: Shards, size: u64) {
        if let Some(max_drift) = self.max_drift()
            && let Some(unit) = counter_units::install_here()
            && shards.wants_another_batch(unit, max_drift)
            && let Some(held) = stripe::try_hold_all(shards.offset())
        {
            shards.fit_batch(&held, unit, size, max_drift);
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
