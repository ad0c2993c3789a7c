//! Sums that leave the adding CPUs time to add.
//!
//! A collection takes the cache lines away from the CPUs that add. A thread that sums one counter
//! all the time would leave these CPUs no time to add between two sums.
//!
//! So a sum that finds another value than the previous sum waits a little at its end. Some sums
//! after it wait too, because a CPU that found no time to add looks like one that does not add.
//!
//! Each counter has a word of its own for this. Summing a counter that rests costs no wait, however
//! many counters there are.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

/// Iterations of the waiting loop, together about a microsecond. Measured with one CPU that adds:
/// it keeps at least three quarters of its speed while another CPU sums all the time.
const PAUSES: u32 = 32;
/// How many sums wait after a change, including the one that finds it.
const QUIET: u64 = 63;
/// The number of low bits of a counter's word, which count the sums that have yet to wait. The bits
/// above hold the last sum, without its upper bits. The word is 0 before the first sum.
const COUNT: u32 = 6;

/// Waits if the counter moved since the last sum, or shortly before that sum. `seen` is the
/// counter's word for this.
#[inline]
pub(super) fn leave_adders_alone(seen: &AtomicU64, sum: u64) {
    let last = seen.load(Relaxed);
    if last != sum << COUNT {
        wait(seen, last, sum << COUNT);
    }
}

#[cold]
fn wait(seen: &AtomicU64, last: u64, sum: u64) {
    let next = after(last, sum);
    seen.store(next, Relaxed);
    if next != sum {
        (0..PAUSES).for_each(|_| core::hint::spin_loop());
    }
}

/// Returns what the word becomes after a sum. `sum` is that sum in its bits of the word, with a
/// count of 0.
fn after(last: u64, sum: u64) -> u64 {
    if last == 0 {
        // The first sum does not show how often the counter is summed.
        return sum;
    }
    match last.wrapping_sub(sum) {
        left @ 1..=QUIET => sum + left - 1,
        _ => sum + QUIET,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_change_makes_sums_wait() {
        let seen = AtomicU64::new(0);
        let waits = |sum: u64| {
            leave_adders_alone(&seen, sum);
            seen.load(Relaxed) != sum << COUNT
        };
        assert!((0..100).all(|_| !waits(7)), "a counter that rests");
        assert!(waits(8) && waits(9), "a counter that moves");
        assert_eq!((0..1000).filter(|_| waits(9)).count(), QUIET as usize - 1);
        assert!(!waits(9));
    }
}
