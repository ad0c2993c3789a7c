//! What the shepherd of a process does.

use crate::live::per_second;
use crate::live::snapshot::{self, Snapshot};

/// The shepherd's work. Rates are of a second.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shepherd {
    /// The work so far.
    pub so_far: snapshot::Shepherd,
    pub ticks: f64,
    /// Shards of counters folded.
    pub folds: f64,
    /// Milliseconds in ticks.
    pub in_ticks: f64,
    /// Bytes given back to the system.
    pub returned: f64,
    returned_so_far: u64,
}

impl Shepherd {
    /// Reads the shepherd's work. `before` is the reading `seconds` ago.
    pub fn read(snapshot: &Snapshot, seconds: Option<f64>, before: &Shepherd) -> Shepherd {
        let (so_far, old) = (snapshot.shepherd, before.so_far);
        let rate = |before, now| per_second(seconds, before, now);
        Shepherd {
            so_far,
            ticks: rate(old.ticks, so_far.ticks),
            folds: rate(old.folds, so_far.folds),
            in_ticks: rate(old.in_ticks_ns, so_far.in_ticks_ns) / 1e6,
            returned: rate(before.returned_so_far, snapshot.returned),
            returned_so_far: snapshot.returned,
        }
    }

    /// Returns the seconds since the last tick at the time `now_ns` of the system's clock. Returns
    /// `None` before the first tick.
    pub fn age(&self, now_ns: u64) -> Option<f64> {
        let at = self.so_far.ticked_ns;
        (at > 0).then(|| now_ns.saturating_sub(at) as f64 / 1e9)
    }
}
