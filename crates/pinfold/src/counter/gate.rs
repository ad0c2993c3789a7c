//! Gates: closing shards, so that no word moves for a while.
//!
//! An operation that must know every word exactly cannot ask the adders to wait. It closes a gate
//! instead:
//!
//! 1. It takes [`GATE`] from every limit. An add that begins now finds no headroom, and goes to the
//!    counter's base.
//! 2. If an add that began earlier may still be under way, it waits for that add by the fence.

use super::primitive::{backend, current, fence_index, possible};
use super::shards::{GATE, Shards};
use crate::counter_units::{self, COUNTER_UNITS};
use pinfold_rseq::{Backend, Index, MAX_INDEX};

impl Shards {
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
        self.granted_elsewhere().next().is_none() || COUNTER_UNITS.quiesce(possible()).is_ok()
    }

    /// Waits as [`quiesce`](Self::quiesce) does, but interrupts no CPU that `spared` accepts.
    /// Returns false if such a CPU may have an add under way, or if the fence fails.
    ///
    /// With CPU numbers, fences only the CPUs that may have an add under way. A concurrency id
    /// names no CPU. So with concurrency ids a fence interrupts every CPU that runs a thread of
    /// this process, also a spared one.
    pub(super) fn quiesce_sparing(self, spared: impl Fn(usize) -> bool) -> bool {
        if backend() != Backend::Rseq(Index::Cpu) {
            return self.quiesce();
        }
        // The kernel fences no CPU that is offline. The add of a thread that ran there was aborted
        // when the thread moved.
        self.granted_elsewhere()
            .all(|unit| !spared(unit) && fence_index(unit).is_ok())
    }

    /// Returns the units in which an add that began before the gate was closed may be under way.
    /// The caller keeps a gate closed.
    ///
    /// These are the granted shards, without that of the caller's CPU: there, the kernel aborted
    /// any other thread's add when it let the caller run. The aborted add starts again, and finds
    /// the gate. On atomics, a preempted add goes on later, although another thread has run on its
    /// CPU in between.
    fn granted_elsewhere(self) -> impl Iterator<Item = usize> {
        let here = (backend() != Backend::Atomic).then(current);
        self.granted().filter(move |&unit| Some(unit) != here)
    }
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
