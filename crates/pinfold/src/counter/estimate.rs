//! What a thread can do about the shards of other CPUs: estimate what they hold, and repair those
//! that a fork has left claimed.

use super::primitive::AtomicU64;
use super::shards::Shards;
use super::{fork, stripe};
use crate::counter_units;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use pinfold_rseq::shard::is_claimed;

/// Returns the distance of a shard, or 0 while it is claimed. At most its batch on both sides.
///
/// The words may move between the loads. Then the result is that of no moment, and still at most
/// the batch. An estimate may be any such number, because reads report it as a part of their error.
pub(super) fn distance([up, down, folded, batch]: &[AtomicU64; 4]) -> i64 {
    // Acquire pairs with the commit of an add and with the end of a claim: a thread that sees the
    // estimate also sees what the adding thread did before.
    let [up, down, folded] = [up, down, folded].map(|word| word.load(Acquire));
    let most = (batch.load(Relaxed) % super::shards::FREEZE) as i64;
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
    /// the lock held, and does not touch the total if that returns false.
    pub(super) fn estimate(
        self,
        wanted: &impl Fn(usize) -> bool,
        still_there: impl Fn() -> bool,
    ) -> usize {
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

    /// Ends the claim of this CPU's shard if a fork has left it behind.
    ///
    /// It is not known whether the lost thread had raised the total. But the total is the sum of
    /// `folded` over all shards, so what the other shards have folded tells it. If several claims
    /// were left behind, each shard gets the same distance. No distance then exceeds twice the
    /// batch, because with the true values none did.
    ///
    /// Does nothing if another claim is under way or another thread holds one of the locks. The
    /// next slow add tries again.
    #[cold]
    pub(super) fn repair(self) {
        let is_left_behind = |unit| self.claim_on(unit).is_some_and(fork::is_stale);
        if counter_units::install_here().is_some_and(is_left_behind)
            && let Some(_held) = stripe::try_hold_all(self.offset())
        {
            self.repair_all();
        }
    }

    fn repair_all(self) {
        let total = self.folded();
        let (mut left_behind, mut missing) = (0, total.net());
        for unit in self.active() {
            // The folded value of a shard that was claimed is unknown, and at first taken as the net.
            missing = missing.wrapping_sub(match self.claim_on(unit) {
                None => self.folded_of(unit),
                Some(token) if fork::is_stale(token) => {
                    left_behind += 1;
                    self.net_of(unit)
                }
                Some(_) => return,
            } as i64);
        }
        // If a fold ended meanwhile, the values do not belong together.
        if self.folded() != total {
            return;
        }
        for unit in self.active() {
            if self.claim_on(unit).is_some_and(fork::is_stale) {
                let share = missing / left_behind;
                missing -= share;
                left_behind -= 1;
                self.set_folded(unit, self.net_of(unit).wrapping_add_signed(share));
            }
        }
    }
}
