//! The smallest form of the kernel's zone item, which Pinfold's peers share. It has a total for the
//! zone and a total for all zones. Each CPU has a difference of one byte, which is folded into both
//! totals when it passes the threshold.

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

/// Increments as the kernel's `__inc_zone_state` does. The increment is plain: the caller keeps
/// handlers and other threads off `difference`.
#[inline(always)]
pub fn increment_plain(difference: &mut i8, threshold: i8, zone: &Zone) {
    *difference += 1;
    if *difference > threshold {
        let overstep = threshold / 2;
        zone.add(i64::from(*difference) + i64::from(overstep));
        *difference = -overstep;
    }
}
