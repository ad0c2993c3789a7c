//! Gates: closing shards, so that no word moves for a while.
//!
//! An operation that must know every word exactly cannot ask the adders to wait. It closes a gate
//! instead:
//!
//! 1. It takes [`GATE`] from every limit. An add that begins now finds no room, and goes to the
//!    counter's base.
//! 2. If an add that began earlier may still be under way, it waits for that add by the fence.

use super::primitive::{backend, current, possible};
use super::shards::{GATE, LIMIT, PARK, Shards, UP};
use super::stripe::AllHeld;
use crate::counter_units::{self, COUNTER_UNITS, word_at};
use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::{Backend, MAX_INDEX};

impl Shards {
    /// Returns how many gates close the shard of `unit`, and whether the shard is parked.
    pub(super) fn closed(self, unit: usize) -> (u64, bool) {
        let limit = word_at(unit, self.offset() + UP + LIMIT).load(Relaxed);
        let word = word_at(unit, self.offset() + UP).load(Relaxed);
        let behind = u64::try_from(word.wrapping_sub(limit) as i64).unwrap_or(0);
        let closings = behind.div_ceil(GATE);
        (closings % (PARK / GATE), closings >= PARK / GATE)
    }

    /// Parks all shards except that of the caller's CPU. The caller holds all locks. It closed a
    /// gate before it fenced, and still keeps the gate closed.
    pub(super) fn park_others(self, _held: &AllHeld) {
        let here = own_unit();
        for unit in self.granted() {
            if Some(unit) != here && !self.closed(unit).1 {
                self.move_limits(unit, PARK.wrapping_neg());
            }
        }
    }

    /// Returns whether no add can be under way. The caller keeps a gate closed.
    ///
    /// Only an add that began before the gate was closed could be under way. Two kinds of shards
    /// have no such add:
    ///
    /// * In a parked shard, no add has been under way since it was parked.
    /// * In the shard of the caller's CPU, the kernel aborted any other thread's add when it let
    ///   the caller run. The aborted add starts again, and finds the gate.
    fn stands_still(self) -> bool {
        let here = own_unit();
        self.granted()
            .all(|unit| Some(unit) == here || self.closed(unit).1)
    }

    /// Closes a gate: all adds that begin from now on go to the base, until the gate is dropped.
    pub(super) fn gate(self, closed: &mut Closed) -> Gate<'_> {
        let mut gate = Gate {
            shards: self,
            closed,
        };
        gate.close();
        gate
    }

    /// Waits until the adds that began before the gate was closed are over. The caller keeps a gate
    /// closed. Returns false if the fence fails.
    ///
    /// Fences only if another CPU may have such an add.
    pub(super) fn quiesce(self) -> bool {
        self.stands_still() || COUNTER_UNITS.quiesce(possible()).is_ok()
    }
}

/// Returns whether no other thread has an add under way in `unit` that began before this call.
///
/// The kernel aborted such an add when it let this thread run there.
pub(super) fn is_own(unit: usize) -> bool {
    own_unit() == Some(unit)
}

/// Returns the unit on which no other thread has an add under way, because the caller runs there.
///
/// Returns `None` on atomics. There, a preempted add goes on later, although another thread has run
/// on its CPU in between.
fn own_unit() -> Option<usize> {
    (backend() != Backend::Atomic).then(current)
}

/// A bit for each unit whose shard a gate closes.
///
/// A shard may be granted while a gate is closed, because a sum takes no lock that would prevent
/// this. Opening the gate must not raise the limits of such a shard. So the bits tell which shards
/// the gate has closed.
///
/// The bits take a kilobyte of stack, a quarter of what counting may take. So functions that have a
/// `Closed` are not inlined into others.
pub(super) struct Closed([u64; MAX_INDEX / 64]);

impl Closed {
    #[inline]
    /// Returns the bits for a gate that closes no shard yet.
    pub(super) const fn none() -> Closed {
        Closed([0; MAX_INDEX / 64])
    }
}

/// A closed gate.
pub(super) struct Gate<'c> {
    shards: Shards,
    closed: &'c mut Closed,
}

impl Gate<'_> {
    /// Closes the gate for all granted shards, including those granted since the last call.
    pub(super) fn close(&mut self) {
        for unit in self.shards.granted() {
            let (bits, bit) = (&mut self.closed.0[unit / 64], 1 << (unit % 64));
            if *bits & bit == 0 {
                *bits |= bit;
                self.shards.move_limits(unit, GATE.wrapping_neg());
            }
        }
    }
}

impl Drop for Gate<'_> {
    fn drop(&mut self) {
        let is_closed = |unit: &usize| self.closed.0[unit / 64] & 1 << (unit % 64) != 0;
        let closed = counter_units::used().filter(is_closed);
        closed.for_each(|unit| self.shards.move_limits(unit, GATE));
    }
}
