//! The smallest form of the kernel's zone item, which Pinfold's peers share. It has a total for the
//! zone and a total for all zones. Each CPU has a difference, which is folded into both totals when
//! it passes the threshold. The fold leaves the difference half a threshold on the other side.

use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::Relaxed;

/// The two totals.
#[derive(Default)]
pub struct Zone {
    zone: AtomicI64,
    whole: AtomicI64,
}

impl Zone {
    /// Adds to both totals, as the kernel's `zone_page_state_add` does.
    pub fn add(&self, n: i64) {
        self.zone.fetch_add(n, Relaxed);
        self.whole.fetch_add(n, Relaxed);
    }

    /// Returns the zone's total. `None` if the total of all zones differs from it, although this is
    /// the only zone.
    pub fn read(&self) -> Option<i64> {
        let zone = self.zone.load(Relaxed);
        (zone == self.whole.load(Relaxed)).then_some(zone)
    }
}

/// Returns the difference after a change of `BY`, which is 1 or -1, and what is folded, or 0.
#[inline(always)]
pub fn step<const BY: i8>(difference: i8, threshold: i8) -> (i8, i64) {
    let (sum, overstep) = (difference + BY, threshold / 2 * BY);
    if sum * BY > threshold {
        (-overstep, i64::from(sum) + i64::from(overstep))
    } else {
        (sum, 0)
    }
}
