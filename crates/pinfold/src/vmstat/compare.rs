//! Comparisons that take the exact sum only where the cheap read cannot decide.

use super::{Item, VmStat, Zone};
use core::cmp::Ordering;

impl<I: Item> VmStat<I> {
    /// Compares an item's total over all zones with `with`.
    ///
    /// Decides from [`read`](Self::read) if this differs from `with` by more than its error bound.
    /// Otherwise takes the exact [`sum`](Self::sum). Interrupts no CPU.
    ///
    /// ```
    /// use core::cmp::Ordering;
    /// use pinfold::vmstat::{VmStat, Zone};
    ///
    /// pinfold::vmstat_items! {
    ///     pub enum Pool { Free = "nr_free" }
    /// }
    ///
    /// static POOL: VmStat<Pool> = VmStat::new();
    /// POOL.add(Zone::normal(0), Pool::Free, 1000);
    /// POOL.dec(Zone::normal(0), Pool::Free);
    /// assert_eq!(POOL.compare(Pool::Free, 999), Ordering::Equal);
    /// assert_eq!(POOL.compare(Pool::Free, 1_000_000), Ordering::Less);
    /// ```
    pub fn compare(&self, item: I, with: i64) -> Ordering {
        let nothing = (0i64, 0u64);
        let read = self.of(item).fold(nothing, |(value, bound), zone| {
            let (more, off) = zone.read_with_bound();
            (value.wrapping_add(more), bound.saturating_add(off))
        });
        decide(read, with, || self.sum(item))
    }

    /// Compares an item's total in one zone with `with`, as [`compare`](Self::compare) does. The
    /// total of a zone that does not exist is 0.
    pub fn compare_zone(&self, zone: Zone, item: I, with: i64) -> Ordering {
        self.in_zone(zone, item)
            .map_or(0.cmp(&with), |counter| counter.compare(with))
    }

    /// Returns whether an item's total in one zone is above the watermark `mark`.
    ///
    /// Costs a few loads while the total is far from the mark on either side, and the exact sum
    /// near the mark. The kernel's `zone_watermark_ok_safe` takes the sum whenever the total is
    /// below `percpu_drift_mark`.
    ///
    /// ```
    /// use pinfold::vmstat::{VmStat, Zone};
    ///
    /// pinfold::vmstat_items! {
    ///     pub enum Pool { Free = "nr_free" }
    /// }
    ///
    /// static POOL: VmStat<Pool> = VmStat::new();
    /// let zone = Zone::normal(0);
    /// POOL.add(zone, Pool::Free, 500);
    /// assert!(POOL.is_above_mark(zone, Pool::Free, 499));
    /// assert!(!POOL.is_above_mark(zone, Pool::Free, 500));
    /// ```
    pub fn is_above_mark(&self, zone: Zone, item: I, mark: i64) -> bool {
        self.compare_zone(zone, item, mark) == Ordering::Greater
    }
}

/// Compares `read`, which is off by at most `bound`, with `with`. Calls `exact` only if the bound
/// allows more than one answer.
fn decide((read, bound): (i64, u64), with: i64, exact: impl FnOnce() -> i64) -> Ordering {
    if read.abs_diff(with) > bound {
        read.cmp(&with)
    } else {
        exact().cmp(&with)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;

    #[test]
    fn the_exact_sum_is_taken_only_within_the_bound() {
        for with in -30..30 {
            let sums = Cell::new(0);
            let exact = || {
                sums.set(sums.get() + 1);
                7
            };
            let found = decide((3, 10), with, exact);
            assert_eq!(found, 7.cmp(&with), "{with}");
            let near = (-7..=13).contains(&with);
            assert_eq!(sums.get(), usize::from(near), "{with}");
        }
    }
}
