//! The operations that need the exact value: summing, setting, adding up to a limit, and changing
//! the batch.

use super::error::CounterError;
use super::freeze::Frozen;
use super::primitive::fence;
use super::shards::{MAX_BATCH, Shards};
use super::stripe::{self, pause};
use super::{PerCpuCounter, freezers, pace};
use core::sync::atomic::Ordering::{AcqRel, Acquire, SeqCst};

/// How often a sum tries before it freezes the counter.
const TRIES: u32 = if cfg!(loom) { 1 } else { 8 };

/// Makes the calling thread's adds visible to all threads, before anything is collected.
///
/// An add is a plain store, which may wait in its CPU's store buffer while later loads go ahead.
/// Two threads that each add and then sum could both miss the other's add. This fence pairs with
/// the one in the other thread's sum: one of the two fences comes first, and the sum after the
/// second fence sees both adds.
#[inline]
pub(crate) fn order_own_adds() {
    fence(SeqCst);
}

impl PerCpuCounter {
    /// Returns the exact value: the value that the counter had at one moment during the call. The
    /// sum is linearizable.
    ///
    /// The sum contains everything that the calling thread added before. It contains an add of
    /// another thread if the caller has seen something that happened after that add.
    ///
    /// Collects the words of all CPUs until two collections agree. They agree at once if no thread
    /// adds. If adds keep coming in between, the call sends them to the counter's base for about a
    /// microsecond, until two collections agree. An add never waits for a sum. The call takes no
    /// lock and interrupts no CPU. It makes no system call, except to wait while the process forks.
    ///
    /// If the value moved lately, the call spins for about a microsecond at its end, so that a
    /// thread that sums all the time does not slow down the CPUs that add.
    pub fn sum(&self) -> i64 {
        order_own_adds();
        let mut tries = 0;
        loop {
            if let Some(sum) = self.try_sums() {
                // A counter without shards has no adders to disturb.
                if self.shards().is_some() {
                    pace::leave_adders_alone(&self.seen, sum as u64);
                }
                return sum;
            }
            if let Some(shards) = self.shards()
                && let Some(_pass) = freezers::enter()
            {
                return self.sum_frozen(shards);
            }
            pause(&mut tries);
        }
    }

    /// Tries to sum up to [`TRIES`] times.
    fn try_sums(&self) -> Option<i64> {
        (0..TRIES).find_map(|_| self.try_sum())
    }

    /// Returns the sum if no shard moved during the call.
    ///
    /// The base is loaded between two collections. If the collections agree, every word stood still
    /// while the base was loaded. So the sum was the value at that moment.
    #[inline]
    fn try_sum(&self) -> Option<i64> {
        let (first, base, second) = self.collect_around_base();
        (first == second).then(|| base.wrapping_add(first.net()))
    }

    /// Sums while the counter is frozen.
    ///
    /// The loop ends, because only two kinds of adds still move a word: those that had begun before
    /// the freeze, at most one on each CPU, and those in shards that become active meanwhile. The
    /// next iteration freezes these shards too.
    #[cold]
    #[inline(never)]
    pub(super) fn sum_frozen(&self, shards: Shards) -> i64 {
        let mut frozen = Frozen::none();
        let mut freeze = shards.freeze(&mut frozen);
        loop {
            if let Some(sum) = self.try_sums() {
                return sum;
            }
            freeze.extend();
        }
    }

    /// Sets the value. Costs and waits as much as [`swap`](Self::swap).
    ///
    /// Not for signal handlers.
    pub fn set(&self, value: i64) {
        self.swap(value);
    }

    /// Sets the value and returns the previous one, at one moment. An add at the same time counts
    /// either into the result or into the new value.
    ///
    /// Fences if another CPU has ever added within its batch. A fence interrupts each CPU that runs
    /// a thread of this process, for some microseconds. Takes the counter's locks. Adds do not wait
    /// for these locks. Not for signal handlers.
    ///
    /// Even if the fence fails, no add is lost or counted twice, but a concurrent
    /// [`sum`](Self::sum) may see the old value a little longer. If another thread is folding,
    /// waits for that thread, for at most about a second.
    pub fn swap(&self, value: i64) -> i64 {
        self.swap_after(value, || {})
    }

    /// Sets the value as [`swap`](Self::swap) does. Calls `folded` if all shards are folded: no
    /// distance is left, and no thread can claim a shard before `folded` returns.
    pub(super) fn swap_after(&self, value: i64, folded: impl FnOnce()) -> i64 {
        let Some(shards) = self.shards_or_alloc() else {
            return self.base.swap(value, AcqRel);
        };
        let (old, is_folded) = self.swap_locked(shards, value, folded);
        if !is_folded {
            stripe::give_way();
        }
        old
    }

    /// Sets the value as [`swap_after`](Self::swap_after) does. Returns the previous value, and
    /// whether all shards are folded.
    #[inline(never)]
    fn swap_locked(&self, shards: Shards, value: i64, folded: impl FnOnce()) -> (i64, bool) {
        let held = stripe::hold_all(shards.offset());
        let mut frozen = Frozen::none();
        let _freeze = shards.freeze(&mut frozen);
        // After the fence, no word moves until the freeze ends.
        let quiet = shards.quiesce();
        let moved = if quiet {
            shards.collect()
        } else {
            shards.collect_at_rest()
        };
        let old = self
            .base
            .swap(value.wrapping_sub(moved.net()), AcqRel)
            .wrapping_add(moved.net());
        let is_folded = quiet && shards.fold_all(&held, true);
        if is_folded {
            folded();
        }
        (old, is_folded)
    }

    /// Adds `amount` if that does not take the value past `limit`, and returns whether it did. A
    /// positive amount must not take the value above `limit`, and a negative one must not take it
    /// below.
    ///
    /// The decision is exact under any race: at the moment of the addition, the value is within the
    /// limit. An amount of 0 always succeeds.
    ///
    /// The cost depends on the distance from the limit:
    ///
    /// | distance | cost |
    /// |---|---|
    /// | beyond the limit by more than [`error_bound`](Self::error_bound) | a [`read`](Self::read) |
    /// | within the limit by more than three times that | the counter's locks, at most 64, while adds go to the base for a moment |
    /// | nearer | also a fence: an interrupt to each CPU that runs this process |
    ///
    /// In three cases the call may refuse an amount that fits: in a signal handler that interrupted
    /// a slow path of this library, if another thread holds the counter's locks for a tenth of a
    /// second, and near the limit if the fence fails. Near means that less than
    /// the batches of all CPUs together is left.
    ///
    /// ```
    /// use pinfold::counter::PerCpuCounter;
    ///
    /// let connections = PerCpuCounter::new();
    /// assert!(connections.limited_add(2, 1) && connections.limited_add(2, 1));
    /// assert!(!connections.limited_add(2, 1));
    /// assert_eq!(connections.sum(), 2);
    /// ```
    pub fn limited_add(&self, limit: i64, amount: i64) -> bool {
        if amount == 0 {
            return true;
        }
        // Refuses without a lock if no value within the bound leaves room for `amount`.
        let (read, bound) = self.read_with_bound();
        if passes(read.saturating_sub(slack(bound, amount)), limit, amount) {
            return false;
        }
        self.limited_add_locked(limit, amount)
    }

    /// Adds within the limit, or refuses, with all locks of the counter.
    #[inline(never)]
    fn limited_add_locked(&self, limit: i64, amount: i64) -> bool {
        let Some(shards) = self.shards_or_alloc() else {
            return self.add_base_within(0, limit, amount);
        };
        let Some(_held) = stripe::hold_all_or_refuse(shards.offset()) else {
            return false;
        };
        let mut frozen = Frozen::none();
        let _freeze = shards.freeze(&mut frozen);
        // Pairs with `order_total`.
        fence(SeqCst);
        // While the locks are held, the drift does not change. While the counter is frozen, a shard
        // moves by the add that was under way there, and the total by the fold. So from now on, the
        // net of all shards is at most two and a quarter drifts away from the total as it is now.
        let slack = slack(shards.drift().saturating_mul(3), amount);
        let farthest = shards.folded().net().wrapping_add(slack);
        self.add_base_within(farthest, limit, amount)
            || self.limited_add_frozen(shards, limit, amount)
    }

    /// Adds within the limit, or refuses, with all locks held and the counter frozen.
    fn limited_add_frozen(&self, shards: Shards, limit: i64, amount: i64) -> bool {
        if let Some(sum) = self.try_sum()
            && passes(sum, limit, amount)
        {
            return false;
        }
        // Waits for the adds that had begun before the freeze.
        if !shards.quiesce() {
            return false;
        }
        let moved = shards.collect().net();
        self.add_base_within(moved, limit, amount)
    }

    /// Adds `amount` to the base if base + `rest` + `amount` does not pass `limit`.
    fn add_base_within(&self, rest: i64, limit: i64, amount: i64) -> bool {
        let within = |base: i64| !passes(base.wrapping_add(rest), limit, amount);
        self.base
            .fetch_update(AcqRel, Acquire, |base| {
                within(base).then(|| base.wrapping_add(amount))
            })
            .is_ok()
    }

    /// Sets the batch: how much each CPU may keep to itself. Takes effect at once for all CPUs, and
    /// [`error_bound`](Self::error_bound) follows.
    ///
    /// Raising the batch takes a few stores for each CPU. Lowering it needs a fence if another CPU
    /// has ever added within its batch. The fence interrupts each CPU that runs a thread of this
    /// process. Not for signal handlers.
    ///
    /// # Errors
    ///
    /// * [`CounterError::Batch`] if `batch` is 0 or above 2^40.
    /// * [`CounterError::OutOfMemory`] if there is no memory for the batch.
    /// * [`CounterError::Fence`] if the batch is to be lowered, and the fence for it failed, or a
    ///   thread that folds did not end its fold within a second.
    pub fn set_batch(&self, batch: u64) -> Result<(), CounterError> {
        self.set_batch_after(batch, Shards::quiesce)
    }

    /// Sets the batch as [`set_batch`](Self::set_batch) does, but interrupts no CPU that `spared`
    /// accepts.
    ///
    /// # Errors
    ///
    /// Those of `set_batch`. [`CounterError::Fence`] also if the batch is to be lowered, and a
    /// spared CPU has added within its batch. Nothing has changed then.
    pub(crate) fn set_batch_sparing(
        &self,
        batch: u64,
        spared: impl Fn(usize) -> bool,
    ) -> Result<(), CounterError> {
        self.set_batch_after(batch, |shards| shards.quiesce_sparing(spared))
    }

    /// Sets the batch. If the batch is to be lowered, `quiesce` waits until no section is under
    /// way, or returns false.
    fn set_batch_after(
        &self,
        batch: u64,
        quiesce: impl FnOnce(Shards) -> bool,
    ) -> Result<(), CounterError> {
        if batch == 0 || batch > MAX_BATCH {
            return Err(CounterError::Batch { batch });
        }
        let shards = super::fork::outlast(|| self.shards_or_alloc());
        let shards = shards.ok_or(CounterError::OutOfMemory)?;
        let held = stripe::hold_all(shards.offset());
        if batch >= shards.batch() {
            shards.raise(&held, batch);
        } else if !shards.lower_after(&held, batch, true, quiesce) {
            drop(held);
            stripe::give_way();
            return Err(CounterError::Fence);
        }
        self.expect_batch(batch);
        Ok(())
    }

    /// Raises the batch to at least `batch`. Needs no fence and waits for no lock. Returns false,
    /// with nothing changed, if the counter has no shards or another thread holds one of its locks.
    pub(crate) fn try_raise_batch(&self, batch: u64) -> bool {
        let Some(shards) = self.shards() else {
            return false;
        };
        stripe::try_hold_all(shards.offset()).is_some_and(|held| {
            if batch > shards.batch() {
                shards.raise(&held, batch);
            }
            true
        })
    }
}

/// Returns whether `value + amount` is beyond `limit` in the direction of `amount`.
fn passes(value: i64, limit: i64, amount: i64) -> bool {
    let after = i128::from(value) + i128::from(amount);
    if amount >= 0 {
        after > i128::from(limit)
    } else {
        after < i128::from(limit)
    }
}

/// Returns the drift, with the sign of `amount`.
fn slack(drift: u64, amount: i64) -> i64 {
    let drift = i64::try_from(drift).unwrap_or(i64::MAX);
    if amount >= 0 { drift } else { -drift }
}
