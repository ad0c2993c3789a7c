//! The numbers of grace periods, the step that advances the one under way, and the counts of
//! spilled readers. [`grace`](super) explains all three. Its model in loom runs this file.

use super::primitive::{AtomicU64, AtomicUsize, fence};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// Bytes of a block of counts: *entered* of phase 0 and 1, *left* of phase 0 and 1.
pub(super) const SIZE: usize = 32;
/// Bytes from a phase's *entered* to its *left*.
pub(super) const LEFT: usize = 16;
/// Bytes from phase 0's words to phase 1's.
pub(super) const PHASE_1: usize = 8;

/// A set with both phases.
const BOTH: u8 = 0b11;

/// The state of grace periods, except the set of phases that the one under way still waits for. The
/// lock `PERIOD` holds that set.
pub(super) struct Periods {
    /// The phase that readers enter, as the offset of its words in the block: 0 or [`PHASE_1`].
    pub(super) phase: AtomicUsize,
    /// The number of the last grace period that has begun.
    pub(super) started: AtomicU64,
    /// The number of the last grace period that is over.
    pub(super) done: AtomicU64,
    /// The highest number of a grace period that a thread needs.
    pub(super) needed: AtomicU64,
}

impl Periods {
    /// Returns the phase that a reader enters now.
    #[inline]
    pub(super) fn phase(&self) -> usize {
        // Relaxed, because an old phase does no harm: see the module's description.
        self.phase.load(Relaxed)
    }

    /// Returns the number of a grace period that begins after everything that the caller has done,
    /// and asks for that grace period. Costs a memory fence.
    pub(super) fn ticket(&self) -> u64 {
        // Pairs with the fence of the step that begins a grace period. Either that step sees what
        // the caller did, or the caller sees the new number in `started`.
        fence(SeqCst);
        let ticket = self.started.load(Relaxed) + 1;
        self.needed.fetch_max(ticket, Relaxed);
        ticket
    }

    /// Returns whether the grace period `ticket` is over.
    #[inline]
    pub(super) fn passed(&self, ticket: u64) -> bool {
        // Acquire pairs with the release in `step`: the readers' last uses of objects come before.
        self.done.load(Acquire) >= ticket
    }

    /// Returns whether a thread needs a grace period that is not over.
    pub(super) fn is_needed(&self) -> bool {
        !self.passed(self.needed.load(Relaxed))
    }

    /// Makes one step of the grace period under way. If none is, begins one.
    ///
    /// `waited_for` has a bit for each phase that the grace period still waits for, and is 0 if
    /// none is under way. The caller holds the lock of `waited_for`. `sum` returns the sum of the
    /// counts at an offset of the block. `fence` executes the fence F of the module's description.
    pub(super) fn step<E>(
        &self,
        waited_for: &mut u8,
        sum: impl Fn(usize) -> u64,
        fence: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        if *waited_for == 0 {
            // Relaxed: the fence below comes after this add, and pairs with the fence in `ticket`.
            self.started.fetch_add(1, Relaxed);
            *waited_for = BOTH;
        }
        let left = [LEFT, LEFT + PHASE_1].map(&sum);
        fence()?;
        let entered = [0, PHASE_1].map(&sum);
        for phase in 0..2 {
            if left[phase] == entered[phase] {
                *waited_for &= !(1 << phase);
            }
        }
        let current = self.phase.load(Relaxed);
        if *waited_for == 0 {
            // Pairs with the acquire in `passed`: the readers' last uses of objects come before.
            self.done.store(self.started.load(Relaxed), Release);
        } else if *waited_for == 1 << (current / PHASE_1) {
            // Relaxed, because the proof holds no matter when readers see the new phase.
            self.phase.store(PHASE_1 - current, Relaxed);
        }
        Ok(())
    }
}

/// The counts of spilled readers, in the order of a block.
pub(super) struct Spilled(pub(super) [AtomicU64; SIZE / 8]);

impl Spilled {
    /// Counts a reader that enters `phase`, and fences.
    pub(super) fn enter(&self, phase: usize) {
        self.0[phase / 8].fetch_add(1, Relaxed);
        // Pairs with the writer's fence: either the writer sees the add, or this reader sees what
        // the writer did before. Spilled readers fence in light processes too.
        fence(SeqCst);
    }

    /// Counts a reader that leaves by `word`. The caller has fenced since its last use of an
    /// object.
    pub(super) fn leave(&self, word: usize) {
        self.0[word / 8].fetch_add(1, Release);
    }

    /// Returns the count at `word`.
    pub(super) fn count(&self, word: usize) -> u64 {
        // Acquire: what a counted reader did before it counted comes before the rest of this step.
        self.0[word / 8].load(Acquire)
    }

    /// Begins new counts, in the child of a fork.
    pub(super) fn clear(&self) {
        self.0.iter().for_each(|count| count.store(0, Relaxed));
    }
}
