//! What needs the value to the last unit: the sum, resetting, adding up to a limit, changing the batch.

use super::error::CounterError;
use super::gate::Closed;
use super::reach::{self, Reach};
use super::shards::{BATCH_MOST, Shards};
use super::stripe::{self, AllHeld, pause};
use super::{PercpuCounter, gates, pace};
use core::sync::atomic::Ordering::{AcqRel, Acquire, SeqCst};
use core::sync::atomic::fence;

/// Collections that a sum tries before it closes the gate.
const TRIES: u32 = 8;

/// Of two threads that each add and then sum, one at least must see both adds. An add is a plain store, which waits in its CPU's
/// buffer; this has the thread's own visible to all before anything is collected. It pairs with that of the other's sum.
#[inline]
pub(crate) fn order_own_adds() {
    fence(SeqCst);
}

impl PercpuCounter {
    /// The value, exactly: what the counter was at one moment during the call (it is linearizable). What the thread has added
    /// before is in it, and so is what others added before something that the thread has seen of them.
    ///
    /// Collects the words of all CPUs until two collections agree, which they do at once when nobody adds. When adders
    /// keep outrunning it, it sends them to the counter's base for the microsecond that a quiet collection takes; they never
    /// wait. No lock, no system call, no interrupt; only while the process forks may it wait, for that to be over.
    pub fn sum(&self) -> i64 {
        order_own_adds();
        let mut looks = 0;
        loop {
            if let Some(sum) = self.try_sums() {
                // A counter without shards has no adders to disturb.
                if self.shards().is_some() {
                    pace::leave_adders_alone(&self.seen, sum as u64);
                }
                return sum;
            }
            if let Some(shards) = self.shards()
                && let Some(_pass) = gates::enter()
            {
                return self.sum_gated(shards);
            }
            pause(&mut looks);
        }
    }

    fn try_sums(&self) -> Option<i64> {
        (0..TRIES).find_map(|_| self.try_sum())
    }

    /// The sum if no shard moved meanwhile. The base is loaded while, by the agreement of the collections around it, every
    /// word stood still: the sum was the value at that moment.
    #[inline]
    fn try_sum(&self) -> Option<i64> {
        let (first, base, second) = self.collect_around_base();
        (first == second).then(|| base.wrapping_add(first.net()))
    }

    /// Only adds that had begun before the gate still move a word, at most one a CPU, and those of shards that are granted
    /// just then: this ends.
    #[cold]
    #[inline(never)]
    fn sum_gated(&self, shards: Shards) -> i64 {
        let mut closed = Closed::none();
        let mut gate = shards.gate(&mut closed);
        loop {
            if let Some(sum) = self.try_sums() {
                return sum;
            }
            gate.close();
        }
    }

    /// Sets the value; [`swap`](Self::swap) without its answer.
    pub fn set(&self, value: i64) {
        self.swap(value);
    }

    /// Sets the value and returns what it was, in one moment: whatever is added at the same time counts either into the
    /// answer or into the new value, never into both or neither.
    ///
    /// Interrupts each CPU that runs a thread of this process (the fence), some microseconds, if
    /// another CPU has added within its batch since the last call; adders do not wait. Not for
    /// signal handlers. Where the kernel cannot fence, nothing is lost or doubled either, but a
    /// [`sum`](Self::sum) at the same time may see the old value a little longer.
    #[inline(never)]
    pub fn swap(&self, value: i64) -> i64 {
        let Some(shards) = self.place() else {
            return self.base.value.swap(value, AcqRel);
        };
        let held = stripe::hold_all(shards.offset());
        self.state_reach(&held, shards, 0);
        let mut closed = Closed::none();
        let _gate = shards.gate(&mut closed);
        let quiet = shards.quiesce();
        // After the fence the words stand still until the gate opens.
        let moved = if quiet {
            shards.collect()
        } else {
            shards.collect_at_rest()
        };
        let old = self
            .base
            .value
            .swap(value.wrapping_sub(moved.net()), AcqRel)
            .wrapping_add(moved.net());
        shards.fold_gated(&held, shards.batch());
        if quiet {
            shards.park_others(&held);
        }
        old
    }

    /// Adds `amount` if the value does not pass `limit` by it: not above for a positive amount, not
    /// below for a negative one. Returns whether it did; to add nothing always succeeds. Exact
    /// under any race: at the moment of the addition the value was within the limit.
    ///
    /// Far from the limit it costs one compare-exchange of the base, and takes no lock. Nearer, or
    /// when the counter has moved far, it takes the counter's locks. Where the batches of the other
    /// CPUs could make the difference it closes the gate for a moment, and, if it is close even
    /// then, fences (an interrupt to each CPU that runs this process). Not for signal handlers.
    /// Where the kernel cannot fence, it may refuse although there is room for less than what the
    /// CPUs have in hand.
    #[inline]
    pub fn limited_add(&self, limit: i64, amount: i64) -> bool {
        amount == 0 || self.limited_add_far(limit, amount) || self.limited_add_near(limit, amount)
    }

    /// Adds `amount` if the stated reach shows that even the farthest value is within the limit. No
    /// lock.
    #[inline]
    fn limited_add_far(&self, limit: i64, amount: i64) -> bool {
        self.base.add_if(amount, |base, reach| {
            !passes(reach.farthest(base, amount), limit, amount)
        })
    }

    #[cold]
    #[inline(never)]
    fn limited_add_near(&self, limit: i64, amount: i64) -> bool {
        let Some(shards) = self.place() else {
            return self.add_base_within(0, limit, amount);
        };
        let held = stripe::hold_all(shards.offset());
        // While the locks are held no total and no limit moves: the value is within the drift of what `read` says.
        let folded = shards.folded().net();
        let slack = slack(shards.drift(), amount);
        if self.add_base_within(folded.wrapping_add(slack), limit, amount) {
            self.state_reach_below(&held, shards, limit);
            return true;
        }
        let least = self.base.value.load(Acquire).wrapping_add(folded);
        if passes(least.saturating_sub(slack), limit, amount) {
            return false;
        }
        self.limited_add_gated(shards, limit, amount)
    }

    /// States a reach within which limited adds to `limit` need no lock, half as wide as the way to
    /// the limit, unless the limit is too near.
    fn state_reach_below(&self, held: &AllHeld, shards: Shards, limit: i64) {
        let base = self.base.value.load(Acquire);
        let way = limit.abs_diff(base.wrapping_add(shards.folded().net()));
        let width = way / 2;
        if width >= shards.least_reach() && reach::is_supported() {
            self.state_reach(held, shards, width);
        }
    }

    /// States a reach of `width` around the totals, with all locks held; no reach if the batches
    /// are too large for that.
    pub(super) fn state_reach(&self, held: &AllHeld, shards: Shards, width: u64) {
        let reach = if width >= shards.least_reach() {
            Reach::around(shards.folded().net(), width)
        } else {
            Reach::NONE
        };
        // The base first: once folds may go beyond the old reach, no limited add relies on it.
        self.base.state(reach);
        shards.keep_within(held, reach);
    }

    /// Closes the gate first, and decides with all locks held.
    #[inline(never)]
    fn limited_add_gated(&self, shards: Shards, limit: i64, amount: i64) -> bool {
        let mut closed = Closed::none();
        let _gate = shards.gate(&mut closed);
        if let Some(sum) = self.try_sum()
            && passes(sum, limit, amount)
        {
            return false;
        }
        // What adds that had begun before the gate can still bring.
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
            .value
            .fetch_update(AcqRel, Acquire, |base| {
                within(base).then(|| base.wrapping_add(amount))
            })
            .is_ok()
    }

    /// Changes how much each CPU may keep to itself, at once and for all CPUs; [`error_bound`](Self::error_bound) follows.
    ///
    /// Raising it is a few stores a CPU. Lowering it interrupts each CPU that runs a thread of this process (the fence). Not
    /// for signal handlers.
    ///
    /// # Errors
    ///
    /// [`CounterError::Batch`] when `batch` is 0 or above 2^40; [`CounterError::OutOfMemory`] when there is no place to
    /// keep it; [`CounterError::Fence`] when a lower one would need a fence that the kernel does not offer.
    pub fn set_batch(&self, batch: u64) -> Result<(), CounterError> {
        if batch == 0 || batch > BATCH_MOST {
            return Err(CounterError::Batch { batch });
        }
        let shards = self.place().ok_or(CounterError::OutOfMemory)?;
        let held = stripe::hold_all(shards.offset());
        self.state_reach(&held, shards, 0);
        if batch >= shards.batch() {
            shards.raise(&held, batch);
        } else if !shards.lower(&held, batch) {
            return Err(CounterError::Fence);
        }
        Ok(())
    }
}

/// Whether `value + amount` is beyond `limit` in the direction of `amount`.
fn passes(value: i64, limit: i64, amount: i64) -> bool {
    let after = i128::from(value) + i128::from(amount);
    if amount >= 0 {
        after > i128::from(limit)
    } else {
        after < i128::from(limit)
    }
}

/// The drift, in the direction in which `amount` goes.
fn slack(drift: u64, amount: i64) -> i64 {
    let drift = i64::try_from(drift).unwrap_or(i64::MAX);
    if amount >= 0 { drift } else { -drift }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_from_its_limit_a_limited_add_takes_no_lock() {
        let counter = PercpuCounter::with_batch(0, 1).unwrap();
        assert!(!counter.limited_add_far(1 << 20, 1), "no reach yet");
        assert!(counter.limited_add(1 << 20, 1) && counter.limited_add(-1 << 20, -1));
        let shards = counter.shards().unwrap();
        let held = stripe::hold_all(shards.offset());
        // With the locks held, an add that wants one of them would never return.
        let far = reach::is_supported();
        assert_eq!(counter.limited_add_far(1 << 20, 100), far);
        assert_eq!(counter.limited_add_far(-1 << 20, -100), far);
        assert!(!counter.limited_add_far(1000, 100), "too near");
        counter.state_reach(&held, shards, 0);
        assert!(!counter.limited_add_far(1 << 20, 1), "no reach any more");
    }
}
