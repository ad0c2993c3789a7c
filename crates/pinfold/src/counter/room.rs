//! The slow path of an add: makes room in the CPU's shard, or adds to the base.

use super::PerCpuCounter;
use super::shards::{DOWN, FOLDED_DOWN, FOLDED_UP, MAX_BATCH, Shards, UP};
use super::stripe::{self, Held};
use crate::counter_units;
use core::sync::atomic::Ordering::AcqRel;

impl Shards {
    /// Makes room on this CPU, and then adds as [`add`](Self::add) does. Grants the shard if
    /// `may_grant` is true and the shard is not granted yet.
    ///
    /// Makes no room if `n` is above the batch, if another thread holds the shard's lock, or if a
    /// gate is closed.
    #[cold]
    #[inline(never)]
    pub(crate) fn add_after_making_room(self, down: bool, n: i64, may_grant: bool) -> bool {
        let room = counter_units::install_here().is_some_and(|unit| {
            stripe::try_hold(unit, self.offset())
                .is_some_and(|held| self.make_room(&held, unit, (down, n as u64), may_grant))
        });
        // By now the thread may be on another CPU, or other threads may have used the room up.
        room && self.add(down, n)
    }

    /// Makes room on `unit` for an add of `n` to `up` or `down`, if the batch allows. Grants the
    /// shard, or cancels and folds.
    fn make_room(self, held: &Held, unit: usize, (down, n): (bool, u64), may_grant: bool) -> bool {
        let batch = self.batch();
        if n > batch || self.is_closed(unit) {
            return false;
        }
        if !self.is_granted(unit) {
            if may_grant {
                self.grant(held, unit, batch);
            }
            return may_grant;
        }
        self.make_room_here(unit, (down, n), batch);
        true
    }

    /// Makes room with as few atomic instructions as possible: two.
    ///
    /// Cancels if that gives enough room. If a CPU's additions and subtractions balance, no fold
    /// then touches the total's cache line. Otherwise folds the word that needs room, and leaves
    /// the opposite word as far past its mark as it is. Both steps are complete on their own: after
    /// each, every word is within a batch of its mark.
    #[inline]
    fn make_room_here(self, unit: usize, (down, n): (bool, u64), batch: u64) {
        let past = [UP, DOWN].map(|half| batch - self.room(unit, half).1);
        let (half, total) = if down {
            (DOWN, FOLDED_DOWN)
        } else {
            (UP, FOLDED_UP)
        };
        let (own, both) = (past[usize::from(down)], past[0].min(past[1]));
        let cancels = batch - (own - both) >= n.max(batch / 2);
        // A fold first raises the total, and then the limit.
        if !cancels {
            self.raise_total(total, own);
            self.move_limit(unit, half, own);
        } else if both != 0 {
            self.move_limits(unit, both);
        }
    }
}

impl PerCpuCounter {
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
            shards.add_after_making_room(n < 0, size as i64, max_drift == 0)
        })
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
