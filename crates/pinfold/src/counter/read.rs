//! The reads that wait for no thread: the approximate value, its bound, and folding.

use super::PerCpuCounter;
use super::exact::order_own_adds;
use super::shards::{Moved, Shards};
use crate::spared::{self, Kind};
use core::cmp::Ordering;
use core::sync::atomic::Ordering::Acquire;

impl PerCpuCounter {
    /// Returns the approximate value: at one moment during the call, it was at most
    /// [`error_bound`](Self::error_bound) off.
    ///
    /// Loads words of two cache lines that folds and large adds write, with no lock and no system
    /// call. The call starts again if a fold happens in between.
    #[inline]
    pub fn read(&self) -> i64 {
        self.read_with_bound().0
    }

    /// Returns what [`read`](Self::read) returns, or 0 if that is negative. The kernel's
    /// percpu_counter_read_positive.
    ///
    /// For a value that is never negative, such as a number of objects, because even its
    /// approximate read can be negative. The result is off by at most
    /// [`error_bound`](Self::error_bound) too.
    ///
    /// ```
    /// use pinfold::counter::PerCpuCounter;
    ///
    /// let counter = PerCpuCounter::new().with_value(-5);
    /// assert_eq!((counter.read(), counter.read_positive()), (-5, 0));
    /// ```
    #[inline]
    pub fn read_positive(&self) -> i64 {
        self.read().max(0)
    }

    /// Returns the exact [`sum`](Self::sum), or 0 if that is negative. The kernel's
    /// percpu_counter_sum_positive.
    ///
    /// ```
    /// use pinfold::counter::PerCpuCounter;
    ///
    /// let counter = PerCpuCounter::new();
    /// counter.add(-5);
    /// assert_eq!((counter.sum(), counter.sum_positive()), (-5, 0));
    /// ```
    #[inline]
    pub fn sum_positive(&self) -> i64 {
        self.sum().max(0)
    }

    /// Returns what [`read`](Self::read) returns and how far that may be off, even while
    /// [`set_batch`](Self::set_batch) changes the bound. Costs as much as [`read`](Self::read).
    ///
    /// ```
    /// use pinfold::counter::PerCpuCounter;
    ///
    /// let counter = PerCpuCounter::new();
    /// counter.add(5);
    /// let (value, bound) = counter.read_with_bound();
    /// assert!(value.abs_diff(5) <= bound);
    /// ```
    #[inline]
    pub fn read_with_bound(&self) -> (i64, u64) {
        loop {
            let shards = self.shards();
            let folded = shards.map(Shards::folded);
            let base = self.base.load(Acquire);
            // An estimate that is old or wrong is off by at most its size and what the shards hold.
            let held = shards.map_or(0, Shards::estimated);
            // A thread that lowers the drift first moves the totals, so this read starts again.
            let bound = shards.map_or(0, Shards::drift);
            if shards == self.shards() && folded == shards.map(Shards::folded) {
                let known = base.wrapping_add(folded.map_or(0, Moved::net));
                let bound = bound.saturating_add(held.unsigned_abs());
                return (known.wrapping_add(held), bound);
            }
        }
    }

    /// Returns how far [`read`](Self::read) may be off: twice the batches of all CPUs that have
    /// added so far, and what the last [`fold`](Self::fold) found there, which is at most as much
    /// again. Two loads.
    ///
    /// The bound holds for reads that ended before the call, unless the batch was lowered or a fold
    /// happened in between. [`read_with_bound`](Self::read_with_bound) returns both together.
    #[inline]
    pub fn error_bound(&self) -> u64 {
        self.shards().map_or(0, |shards| {
            let held = shards.estimated().unsigned_abs();
            shards.drift().saturating_add(held)
        })
    }

    /// Returns a lower and an upper bound of the value at one moment during the call. They differ
    /// by what was added and subtracted during the call. If nothing was, both are the value.
    ///
    /// Reads each CPU's words twice. Takes no lock, makes no system call and interrupts no CPU.
    pub fn bounds(&self) -> (i64, i64) {
        order_own_adds();
        let (first, base, second) = self.collect_around_base();
        let low = base.wrapping_add(first.up.wrapping_sub(second.down) as i64);
        let high = base.wrapping_add(second.up.wrapping_sub(first.down) as i64);
        (low, high)
    }

    /// Compares the value with `with`.
    ///
    /// Decides from [`read`](Self::read) if the result is far enough from `with`, and from the
    /// exact [`sum`](Self::sum) otherwise.
    pub fn compare(&self, with: i64) -> Ordering {
        let (read, bound) = self.read_with_bound();
        if read.abs_diff(with) > bound {
            return read.cmp(&with);
        }
        self.sum().cmp(&with)
    }

    /// Adds to what [`read`](Self::read) returns what every CPU holds now. Returns how many CPUs
    /// hold something, or 0 if nothing has changed since the last fold. Does nothing, and returns
    /// 0, if another thread folds the counter or changes its batch.
    ///
    /// After this call, and while no CPU adds, `read` is exact. Runs in the calling thread alone.
    /// The CPUs that added notice only that their cache lines were read.
    pub fn fold(&self) -> usize {
        spared::note(Kind::Fold);
        self.shards()
            .map_or(0, |shards| shards.estimate(&|_| true, || true))
    }

    /// Collects all shards, loads the base, and collects all shards again. A counter without a
    /// block finds zeroes in the closed block.
    pub(super) fn collect_around_base(&self) -> (Moved, i64, Moved) {
        let first = self.shards_or_closed().collect();
        let base = self.base.load(Acquire);
        (first, base, self.shards_or_closed().collect())
    }
}
