//! The kernel's zone item in its smallest form, which the rivals share: a total for the zone, a total for the whole, and
//! for each CPU a difference of one byte that is folded into both totals when it passes the threshold.

use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::Relaxed;

/// The totals.
#[derive(Default)]
pub struct Zone {
    zone: AtomicI64,
    whole: AtomicI64,
}

impl Zone {
    /// The kernel's `zone_page_state_add`.
    pub fn add(&self, n: i64) {
        self.zone.fetch_add(n, Relaxed);
        self.whole.fetch_add(n, Relaxed);
    }

    /// The zone's total; `None` when it is not the same as the whole's, of which it is the only zone.
    pub fn read(&self) -> Option<i64> {
        let zone = self.zone.load(Relaxed);
        (zone == self.whole.load(Relaxed)).then_some(zone)
    }
}

/// The kernel's `__inc_zone_state`: plain, so the caller keeps everybody else off `difference`.
#[inline(always)]
pub fn increment_plain(difference: &mut i8, threshold: i8, zone: &Zone) {
    *difference += 1;
    if *difference > threshold {
        let overstep = threshold / 2;
        zone.add(i64::from(*difference) + i64::from(overstep));
        *difference = -overstep;
    }
}
