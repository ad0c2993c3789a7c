//! Sums that leave adders alone.
//!
//! A collection takes the adders' lines away. A thread that sums one counter all the time would
//! leave its adders no time to get on between two sums. So a sum that finds another value than the
//! sum before waits a little at its end, and some sums after it wait too: an adder that found no
//! time looks like one that rests.
//!
//! Each counter has a word of its own for that. A counter that rests costs no wait, however many
//! there are.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

/// Turns of the wait, about a microsecond together. Measured with one adder: it then keeps three quarters and more of its
/// speed while another CPU sums all the time.
const PAUSES: u32 = 32;
/// After a change, so many sums wait even if they find none.
const QUIET: u64 = 63;
/// The bits of the word that count them; the others are the last sum, without its upper bits. 0
/// before the first sum.
const COUNT: u32 = 6;

/// Waits if the counter moved since the last sum, or not long before. `seen` is the counter's word
/// for that.
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

/// What the word becomes after a sum of `sum`, with no sums left to wait if this one need not wait.
fn after(last: u64, sum: u64) -> u64 {
    if last == 0 {
        // The first sum says nothing about how often the counter is summed.
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
