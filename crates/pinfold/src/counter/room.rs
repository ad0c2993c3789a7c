//! The slow path of an add: makes room in the CPU's shard, or adds to the base.

use super::PercpuCounter;
use super::shards::{DOWN, MAX_BATCH, Shards, UP};
use super::stripe;
use crate::counter_units;
use core::sync::atomic::Ordering::AcqRel;

impl PercpuCounter {
    #[cold]
    #[inline(never)]
    pub(crate) fn add_slow(&self, n: i64) {
        if !self.add_after_making_room(n) {
            self.add_to_base(n);
        }
    }

    /// Makes room for `n` in this CPU's shard, and adds it there. Returns false if there is no
    /// room.
    fn add_after_making_room(&self, n: i64) -> bool {
        let size = n.unsigned_abs();
        let shards = (size <= MAX_BATCH)
            .then(|| self.shards_or_alloc())
            .flatten();
        // If the batch does not widen, nothing can make room for an add above the batch.
        let max_drift = self.max_drift();
        let shards = shards.filter(|shards| max_drift != 0 || size <= shards.batch());
        shards.is_some_and(|shards| {
            self.fit_batch(shards, size);
            self.keep_reach_centred(shards);
            shards.add_after_making_room(n < 0, size as i64, max_drift == 0)
        })
    }

    /// Centres the reach on the totals if they have come near its end, where folds would stop. Does
    /// nothing if another thread has one of the counter's locks.
    pub(super) fn keep_reach_centred(&self, shards: Shards) {
        if shards.is_off_centre()
            && let Some(held) = stripe::try_hold_all(shards.offset())
        {
            self.state_reach(&held, shards, self.base.reach().width());
        }
    }

    /// Widens the batch for an add of `size`, or lowers it for a new shard, if this counter's batch
    /// widens.
    fn fit_batch(&self, shards: Shards, size: u64) {
        let max_drift = self.max_drift();
        if max_drift == 0 {
            return;
        }
        if let Some(unit) = counter_units::install_here()
            && shards.wants_another_batch(unit, max_drift)
            && let Some(held) = stripe::try_hold_all(shards.offset())
        {
            self.state_reach(&held, shards, 0);
            shards.fit_batch(&held, unit, size, max_drift);
        }
    }

    /// Adds `n` to the base, by one atomic add.
    #[inline]
    pub(crate) fn add_to_base(&self, n: i64) {
        // Release: a thread that sees this add sees what this thread did before. It pairs with the
        // acquire of the sums.
        self.base.value.fetch_add(n, AcqRel);
    }
}

impl Shards {
    /// Folds the shard of the caller's CPU, if its words have moved a net `batch` or more past
    /// their marks, and no other thread holds its lock.
    pub(super) fn fold_here(self, batch: u64) {
        let Some(unit) = counter_units::install_here() else {
            return;
        };
        let kept = || {
            let [up, down] =
                [UP, DOWN].map(|half| self.batch().wrapping_sub(self.room(unit, half).1));
            up.wrapping_sub(down) as i64
        };
        if self.is_granted(unit)
            && kept().unsigned_abs() >= batch
            && let Some(held) = stripe::try_hold(unit, self.offset())
        {
            self.fold_unit(&held, unit);
        }
    }
}
