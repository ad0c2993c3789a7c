//! Changes of the batch that leave some CPUs undisturbed.

use super::gate::is_own;
use super::shards::Shards;
use super::{CounterError, PerCpuCounter};
use pinfold_rseq::{Backend, Index, backend, fence_index};

impl PerCpuCounter {
    /// Sets the batch as [`set_batch`](Self::set_batch) does, but interrupts no CPU that `spared`
    /// accepts. Not for signal handlers.
    ///
    /// # Errors
    ///
    /// As for `set_batch`. [`CounterError::Fence`] also if the batch is to be lowered, and a spared
    /// CPU has added within its batch. Nothing has changed then.
    pub(crate) fn set_batch_sparing(
        &self,
        batch: u64,
        spared: impl Fn(usize) -> bool,
    ) -> Result<(), CounterError> {
        self.set_batch_after(batch, |shards| shards.quiesce_sparing(spared))
    }
}

impl Shards {
    /// Waits until the adds that began before the gate was closed are over. The caller keeps a gate
    /// closed. Interrupts no CPU that `spared` accepts: returns false if such a CPU may have an
    /// add under way, or if the fence fails.
    ///
    /// With CPU numbers, fences only the CPUs whose shards may have an add under way. A concurrency
    /// id names no CPU. So with concurrency ids a fence interrupts every CPU that runs a thread of
    /// this process, and `spared` gets ids that are not CPU numbers.
    fn quiesce_sparing(self, spared: impl Fn(usize) -> bool) -> bool {
        if backend() != Backend::Rseq(Index::Cpu) {
            return self.quiesce();
        }
        // In a parked shard, and in the shard of a CPU on which this thread has run since it closed
        // the gate, no such add is under way.
        let rests = |unit| is_own(unit) || self.closed(unit).1;
        // The kernel fences no CPU that is offline. The add of a thread that ran there was aborted
        // when the thread moved.
        self.granted()
            .all(|unit| rests(unit) || (!spared(unit) && fence_index(unit).is_ok()))
    }
}
