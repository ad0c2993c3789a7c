//! The slow path of an add: makes room in the CPU's shard, or adds to the base.
//!
//! # Overstep
//!
//! A word that only grows is folded each time it is a batch past its mark. An *overstep* makes
//! these folds rarer, as in the kernel: the fold adds half a batch more than the shard has counted.
//! The shard is then half a batch *behind* its total, and may count one and a half batches before
//! it is a batch ahead.
//!
//! The shard stores the overstep in the opposite word's mark: the fold moves that mark back by half
//! a batch. For a fold of `up`:
//!
//! 1. Lower the limit of `down` by half a batch. Its mark moves back with it.
//! 2. Check that the thread runs on the shard's own CPU, and that `down` is within its limit. No
//!    section can then be under way that has checked the old limit: the kernel aborted such a
//!    section when it let this thread run.
//! 3. Add to the total the distance of `up` past its mark, plus half a batch.
//! 4. Raise the limit of `up` by its distance past its mark.
//!
//! An overstep costs its CPU more than it saves there: the CPU takes this slow path twice in one
//! and a half batches. The gain is elsewhere: the totals' cache line moves between CPUs less often.
//! So a counter on which a single CPU counts does not overstep.
//!
//! If step 2 or 3 fails, the limit of `down` is put back, and an ordinary fold follows.
//!
//! From then on `down` is past its mark by half a batch. When `up` has used its batch, cancelling
//! moves both marks by that half. This gives `up` room for half a batch more, and touches no total.
//! A fold from afar cancels in the same way, so the totals it leaves are exact.

use super::PerCpuCounter;
use super::gate::is_own;
use super::shards::{DOWN, FOLDED_DOWN, FOLDED_UP, MAX_BATCH, PARK, Shards, UP};
use super::stripe::{self, Held};
use crate::counter_units;
use core::sync::atomic::Ordering::AcqRel;

/// What making room may do.
#[derive(Clone, Copy)]
pub(crate) struct Making {
    /// Grants the shard if it is not granted yet.
    pub(crate) may_grant: bool,
    /// Folds half a batch more than was counted.
    pub(crate) overstep: bool,
}

impl Shards {
    /// Makes room on this CPU, and then adds as [`add`](Self::add) does.
    ///
    /// Makes no room if `n` is above the batch, if another thread holds the shard's lock, or if a
    /// gate is closed.
    #[cold]
    #[inline(never)]
    pub(crate) fn add_after_making_room(self, down: bool, n: i64, making: Making) -> bool {
        let room = counter_units::install_here().is_some_and(|unit| {
            stripe::try_hold(unit, self.offset())
                .is_some_and(|held| self.make_room(&held, unit, (down, n as u64), making))
        });
        // By now the thread may be on another CPU, or other threads may have used the room up.
        room && self.add(down, n)
    }

    /// Makes room on `unit` for an add of `n` to `up` or `down`, if the batch allows. Grants the
    /// shard, or cancels and folds.
    fn make_room(self, held: &Held, unit: usize, (down, n): (bool, u64), making: Making) -> bool {
        let batch = self.batch();
        let (gates, parked) = self.closed(unit);
        if n > batch || gates != 0 {
            return false;
        }
        if parked {
            self.move_limits(unit, PARK);
        }
        if !self.is_granted(unit) {
            if making.may_grant {
                self.grant(held, unit, batch);
            }
            return making.may_grant;
        }
        if making.overstep && self.is_shared() {
            self.make_room_beyond(held, unit, (down, n), batch);
        } else {
            self.make_room_here(unit, (down, n), batch);
        }
        true
    }

    /// Makes room with as few atomic instructions as possible: two, if no reach is stated.
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
        if !cancels && self.raise_total(total, own) {
            self.move_limit(unit, half, own);
        } else if both != 0 {
            // Also reached if the reach does not let the total grow.
            self.move_limits(unit, both);
        }
    }

    /// Makes room by cancelling, and by a fold of half a batch more if that is not enough.
    fn make_room_beyond(self, held: &Held, unit: usize, (down, n): (bool, u64), batch: u64) {
        let rest = self.cancel(unit, batch);
        let past = rest[usize::from(down)];
        if batch - past < n.max(batch / 2) && !self.fold_beyond(held, unit, down, past) {
            self.fold_rest(unit, batch, batch, rest);
        }
    }

    /// Returns whether several CPUs count, and so move the cache line of the totals about.
    fn is_shared(self) -> bool {
        self.drift() > self.batch()
    }

    /// Folds `rest` and half a batch more. `rest` is the distance past its mark of the word that
    /// `down` selects. Returns false and changes nothing if this thread cannot do so now.
    fn fold_beyond(self, _held: &Held, unit: usize, down: bool, rest: u64) -> bool {
        let batch = self.batch();
        let more = batch / 2;
        let (word, total, opposite) = if down {
            (DOWN, FOLDED_DOWN, UP)
        } else {
            (UP, FOLDED_UP, DOWN)
        };
        if more == 0 {
            return false;
        }
        self.move_limit(unit, opposite, more.wrapping_neg());
        // A word beyond its limit looks as if one more gate were closed, and so has more room than
        // a batch.
        let within = || self.room(unit, opposite).1 <= batch;
        let done = is_own(unit) && within() && self.raise_total(total, rest + more);
        if done {
            self.move_limit(unit, word, rest);
        } else {
            self.move_limit(unit, opposite, more);
        }
        done
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
            self.keep_reach_centred(shards);
            let making = Making {
                may_grant: max_drift == 0,
                overstep: false,
            };
            shards.add_after_making_room(n < 0, size as i64, making)
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
