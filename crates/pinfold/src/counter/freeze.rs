//! Freezing a counter, so that no word of its shards moves for a while.
//!
//! An operation that must know every word exactly cannot ask the adders to wait. It freezes the
//! counter instead:
//!
//! 1. It takes [`FREEZE`] from every shard's batch. An add that begins now fails there, and goes to
//!    the counter's base.
//! 2. If an add that began earlier may still be under way, it fences, which ends that add. A sum
//!    does not fence, but collects again until no word moves.

use super::primitive::{backend, current, fence_index, possible};
use super::shards::{FREEZE, Shards};
use crate::counter_units::{self, COUNTER_UNITS};
use pinfold_rseq::{Backend, Index, MAX_INDEX};

impl Shards {
    /// Freezes the shards: all adds that begin from now on go to the base, until the result is
    /// dropped.
    pub(super) fn freeze(self, frozen: &mut Frozen) -> Freeze<'_> {
        let mut freeze = Freeze {
            shards: self,
            frozen,
        };
        freeze.extend();
        freeze
    }

    /// Waits until the adds that began before the caller froze the shards are over. Returns false
    /// if the fence fails.
    ///
    /// Fences only if another CPU may have such an add.
    pub(super) fn quiesce(self) -> bool {
        self.active_elsewhere().next().is_none() || COUNTER_UNITS.quiesce(possible()).is_ok()
    }

    /// Waits as [`quiesce`](Self::quiesce) does, but interrupts no CPU that `spared` accepts.
    /// Returns false if such a CPU may have an add under way, or if the fence fails.
    ///
    /// With CPU numbers, fences only the CPUs that may have an add under way. A concurrency id
    /// names no CPU. So with concurrency ids a fence interrupts every CPU that runs a thread of
    /// this process, even a spared one.
    pub(super) fn quiesce_sparing(self, spared: impl Fn(usize) -> bool) -> bool {
        if backend() != Backend::Rseq(Index::Cpu) {
            return self.quiesce();
        }
        // The kernel fences no CPU that is offline. The add of a thread that ran there was aborted
        // when the thread moved.
        self.active_elsewhere()
            .all(|unit| !spared(unit) && fence_index(unit).is_ok())
    }

    /// Returns the units in which an add that began before the caller froze the shards may be under
    /// way.
    ///
    /// These are the active shards, without that of the caller's CPU: there, the kernel aborted any
    /// other thread's add when it let the caller run. The aborted add starts again, and fails. On
    /// the atomic backend, a preempted add goes on later, although another thread has run on its
    /// CPU in between.
    fn active_elsewhere(self) -> impl Iterator<Item = usize> {
        let here = (backend() != Backend::Atomic).then(current);
        self.active().filter(move |&unit| Some(unit) != here)
    }
}

/// A bit for each unit whose shard a thread has frozen.
///
/// A shard may become active while the counter is frozen, because a sum takes no lock that would
/// prevent this. The end of the freeze must not raise the batch of such a shard. So the bits tell
/// which shards the thread has frozen.
///
/// The bits take a kilobyte, a quarter of the stack that counting may use. So functions that have a
/// `Frozen` are not inlined into others.
pub(super) struct Frozen([u64; MAX_INDEX / 64]);

impl Frozen {
    /// Returns the bits of a thread that has frozen no shard yet.
    pub(super) const fn none() -> Frozen {
        Frozen([0; MAX_INDEX / 64])
    }
}

/// Keeps a counter's shards frozen until dropped.
pub(super) struct Freeze<'f> {
    shards: Shards,
    frozen: &'f mut Frozen,
}

impl Freeze<'_> {
    /// Freezes the active shards that `self` has not frozen yet.
    pub(super) fn extend(&mut self) {
        for unit in self.shards.active() {
            let (bits, bit) = (&mut self.frozen.0[unit / 64], 1 << (unit % 64));
            if *bits & bit == 0 {
                *bits |= bit;
                self.shards.move_batch(unit, FREEZE.wrapping_neg());
            }
        }
    }
}

impl Drop for Freeze<'_> {
    fn drop(&mut self) {
        let is_frozen = |unit: &usize| self.frozen.0[unit / 64] & 1 << (unit % 64) != 0;
        let frozen = counter_units::used().filter(is_frozen);
        frozen.for_each(|unit| self.shards.move_batch(unit, FREEZE));
    }
}
