//! Sums that leave adders alone.
//!
//! A collection takes the adders' lines away; whoever sums without end would leave adders no time to get on between two of
//! them, and then see no change. So a sum of a counter that moves waits a little at its end.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

/// Turns of the wait, about a microsecond together. Measured with one adder: it then keeps three quarters and more of its
/// speed while another CPU sums all the time.
const PAUSES: u32 = 32;
/// After so many sums without a change the counter stands still.
const QUIET: u32 = 64;

/// What the last sums were; counters that share an entry wait without need.
#[repr(align(16))]
struct Seen {
    sum: AtomicU64,
    /// How many sums in a row were the same.
    same: AtomicU32,
}

static SEEN: [Seen; 64] = [const {
    Seen {
        sum: AtomicU64::new(0),
        same: AtomicU32::new(0),
    }
}; 64];

/// Waits unless the last sums of the counter at address `counter` were all `sum`.
#[inline]
pub(super) fn leave_adders_alone(counter: usize, sum: u64) {
    let seen = &SEEN[counter / 16 % SEEN.len()];
    if seen.sum.load(Relaxed) != sum || seen.same.load(Relaxed) < QUIET {
        wait(seen, sum);
    }
}

#[cold]
fn wait(seen: &Seen, sum: u64) {
    if seen.sum.swap(sum, Relaxed) == sum {
        seen.same.fetch_add(1, Relaxed);
    } else {
        seen.same.store(0, Relaxed);
    }
    (0..PAUSES).for_each(|_| core::hint::spin_loop());
}
