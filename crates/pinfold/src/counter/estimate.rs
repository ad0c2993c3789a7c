//! What a thread can do about the shards of other CPUs: estimate what they hold, and repair those
//! that a fork has left claimed.

use super::fork;
use super::primitive::AtomicU64;
use super::shards::{FREEZE, Shards};
use super::stripe;
use crate::counter_units;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use pinfold_rseq::shard::is_claimed;

/// Returns the distance of a shard, or 0 while it is claimed. At most twice its batch on both
/// sides.
///
/// The words may move between the loads. Then the result is that of no moment, and still at most
/// that. An estimate may be any such number, because reads report it as a part of their error.
pub(super) fn distance([up, down, folded, batch]: &[AtomicU64; 4]) -> i64 {
    // Acquire pairs with the commit of an add and with the end of a claim: a thread that sees the
    // estimate also sees what the adding thread did before.
    let [up, down, folded] = [up, down, folded].map(|word| word.load(Acquire));
    let most = 2 * (batch.load(Relaxed) % FREEZE) as i64;
    let net = up.wrapping_sub(down);
    if is_claimed(net, folded) {
        return 0;
    }
    (net.wrapping_sub(folded) as i64).clamp(-most, most)
}

impl Shards {
    /// Computes the estimate from the shards of the units that `wanted` accepts, and stores it.
    /// Returns how many shards hold something, at least 1, or 0 if the estimate has not changed.
    ///
    /// Leaves the counter out if another thread holds one of its locks. Calls `still_there` with
    /// the lock held, and writes nothing if that returns false. First ends the claims that a fork
    /// has left behind, because it is not known what such a shard holds.
    pub(super) fn estimate(
        self,
        wanted: &impl Fn(usize) -> bool,
        still_there: impl Fn() -> bool,
    ) -> usize {
        if fork::has_happened() && self.active().any(|unit| self.look_at(unit).is_stale()) {
            self.repair_all(&still_there);
        }
        let Some(_held) = stripe::try_hold(0, self.offset()) else {
            return 0;
        };
        let (mut holding, mut found) = (0, 0i64);
        for unit in counter_units::used().filter(|&unit| wanted(unit)) {
            // Batches change only under all locks, so each distance is within the present batch.
            let distance = distance(counter_units::blocks_of(unit)(self.offset()));
            holding += usize::from(distance != 0);
            found = found.wrapping_add(distance);
        }
        if found == self.estimated() || !still_there() {
            return 0;
        }
        self.set_estimate(found);
        holding.max(1)
    }

    /// Ends all claims that a fork has left behind, if this CPU's shard has one.
    #[cold]
    pub(super) fn repair(self) {
        let is_left_behind = |unit| self.look_at(unit).is_stale();
        if counter_units::install_here().is_some_and(is_left_behind) {
            self.repair_all(|| true);
        }
    }

    /// Ends all claims that a fork has left behind. Calls `still_there` with all locks held, and
    /// does nothing if that returns false.
    ///
    /// It is not known whether the lost thread had raised the total. But the total is the sum of
    /// `folded` over all shards, so what the other shards have folded tells it. If several claims
    /// were left behind, each shard gets the same distance. No distance then exceeds twice the
    /// batch, because with the true values none did.
    ///
    /// Does nothing if another claim is under way or another thread holds one of the locks. The
    /// next slow add or estimate tries again.
    #[cold]
    fn repair_all(self, still_there: impl Fn() -> bool) {
        let Some(_held) = stripe::try_hold_all(self.offset()).filter(|_| still_there()) else {
            return;
        };
        let total = self.folded();
        let (mut left_behind, mut missing) = (0, total.net());
        for look in self.active().map(|unit| self.look_at(unit)) {
            // What a claimed shard had folded is unknown, and at first taken as the net.
            let folded = match (look.is_claimed(), look.is_stale()) {
                (false, _) => look.folded,
                (true, true) => look.net,
                (true, false) => return,
            };
            missing = missing.wrapping_sub(folded as i64);
            left_behind += i64::from(look.is_stale());
        }
        // If a fold ended meanwhile, the values do not belong together.
        if self.folded() != total {
            return;
        }
        // No other thread ends a claim that a fork has left behind: all locks are held.
        for unit in self.active() {
            let look = self.look_at(unit);
            if look.is_stale() {
                let share = missing / left_behind;
                missing -= share;
                left_behind -= 1;
                self.set_folded(unit, look.net.wrapping_add_signed(share));
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::PerCpuCounter;
    use super::super::fork::in_child;
    use super::super::shards::Direction;
    use super::*;
    use crate::counter_units::{used, word_at};
    use core::sync::atomic::Ordering::SeqCst;
    use std::vec::Vec;

    /// Sets `up` and `folded` of each shard, as if it had counted and not folded yet.
    fn set_distances(shards: Shards, distance: i64) {
        let held = stripe::hold_all(shards.offset());
        for unit in used() {
            if !shards.is_active(unit) {
                shards.activate(&held, unit, shards.batch());
            }
            let net = 1000 + unit as u64;
            word_at(unit, shards.offset()).store(net, SeqCst);
            word_at(unit, shards.offset() + 8).store(0, SeqCst);
            shards.set_folded(unit, net.wrapping_add_signed(-distance));
        }
        let total: u64 = used().map(|unit| shards.look_at(unit).folded).sum();
        let by = (total as i64).wrapping_sub(shards.folded().net());
        shards.raise_total(Direction::of(by), by.unsigned_abs());
    }

    #[test]
    fn shards_that_a_fork_left_claimed_are_repaired() {
        const BATCH: i64 = 100;
        let counter = PerCpuCounter::new().with_batch(BATCH as u64);
        use_two_units(&counter);
        let shards = counter.shards_or_alloc().unwrap();
        // A token of another thread, of another generation.
        let token = fork::token() ^ (1 << 50 | 1 << 20);
        assert!(fork::is_stale(token) && !fork::is_stale(fork::token()));
        let most = 2 * BATCH;
        for distance in [-most, -BATCH, 0, BATCH + 1, most] {
            // Each lost thread had raised the total, or had not.
            for raised in 0..4u32 {
                set_distances(shards, distance);
                let sum = counter.sum();
                for (nth, unit) in used().enumerate() {
                    let net = shards.look_at(unit).net;
                    shards.set_folded(unit, net.wrapping_add(token));
                    if raised >> (nth % 2) & 1 == 1 {
                        let by = distance + distance.signum() * BATCH / 2;
                        shards.raise_total(Direction::of(by), by.unsigned_abs());
                    }
                }
                assert!(used().all(|unit| shards.look_at(unit).is_stale()));
                // Other tests' counters share the locks, without which neither call does anything.
                until(|| {
                    shards.repair_all(|| true);
                    !used().any(|unit| shards.look_at(unit).is_stale())
                });
                let mut folded = 0;
                for look in used().map(|unit| shards.look_at(unit)) {
                    let left = look.net.wrapping_sub(look.folded) as i64;
                    assert!(left.abs() <= most, "{distance}, {raised:b}: {left}");
                    folded += look.folded as i64;
                }
                assert_eq!(folded, shards.folded().net(), "{distance}, {raised:b}");
                assert_eq!(counter.sum(), sum);
                until(|| {
                    counter.fold();
                    counter.read() == sum
                });
            }
        }
    }

    /// Waits until `is_done` returns true. Panics after 30 seconds.
    fn until(is_done: impl Fn() -> bool) {
        let begin = std::time::Instant::now();
        while !is_done() {
            assert!(begin.elapsed().as_secs() < 30);
            std::thread::yield_now();
        }
    }

    /// Lets two threads count until two units are in use and the counter has its block. That takes
    /// long if the machine is loaded, and so both threads run on one CPU.
    fn use_two_units(counter: &PerCpuCounter) {
        let is_done = || used().count() >= pinfold_rseq::possible().min(2);
        let begin = std::time::Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_done() || counter.shards().is_none() {
                        counter.add(1);
                        assert!(begin.elapsed().as_secs() < 30, "only one unit is in use");
                    }
                });
            }
        });
    }

    #[test]
    fn a_childs_fold_ends_the_claims_of_all_cpus() {
        assert!(crate::fork::retry(|| fork::register().then_some(())).is_some());
        let counter = PerCpuCounter::new().with_batch(100);
        use_two_units(&counter);
        let shards = counter.shards_or_alloc().unwrap();
        set_distances(shards, 7);
        let before: Vec<_> = used().map(|unit| (unit, shards.look_at(unit))).collect();
        for (unit, look) in &before {
            // The token of another thread of this process.
            shards.set_folded(*unit, look.net.wrapping_add(fork::token() ^ 1));
        }
        let folds = || (counter.fold(), counter.read() == counter.sum()).1;
        assert!(!folds(), "a live claim hides what its shard holds");
        assert!(in_child(folds));
        for (unit, look) in before {
            shards.set_folded(unit, look.folded);
        }
    }

    #[test]
    fn a_live_claim_is_not_repaired() {
        let counter = PerCpuCounter::new().with_batch(100);
        use_two_units(&counter);
        let shards = counter.shards_or_alloc().unwrap();
        set_distances(shards, 7);
        let unit = used().next().unwrap();
        // Another shard is left behind. What it had folded cannot be known beside a live claim.
        if let Some(other) = used().nth(1) {
            let before = shards.look_at(other);
            let lost = before.net.wrapping_add(fork::token() ^ (1 << 50 | 1 << 20));
            shards.set_folded(other, lost);
            let live = shards.look_at(unit);
            shards.set_folded(unit, live.net.wrapping_add(fork::token()));
            shards.repair_all(|| true);
            assert_eq!(shards.look_at(other).folded, lost);
            shards.set_folded(unit, live.folded);
            shards.set_folded(other, before.folded);
        }
        let look = shards.look_at(unit);
        let claimed = look.net.wrapping_add(fork::token());
        shards.set_folded(unit, claimed);
        shards.repair_all(|| true);
        assert_eq!(shards.look_at(unit).folded, claimed);
        let held = stripe::hold_all(shards.offset());
        assert!(!shards.fold_all(&held, false), "waits for no claim");
        shards.set_folded(unit, look.folded);
        assert!(shards.fold_all(&held, true));
        assert_eq!(counter.read(), counter.sum());
    }
}
