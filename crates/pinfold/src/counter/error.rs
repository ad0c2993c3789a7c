//! Why a counter cannot be made or changed.

use core::fmt;

/// Why counters cannot be made, or a batch cannot be changed.
///
/// ```
/// use pinfold::counter::{CounterError, PerCpuCounter};
///
/// let refused = PerCpuCounter::new().set_batch(0).unwrap_err();
/// assert_eq!(refused, CounterError::Batch { batch: 0 });
/// assert_eq!(refused.to_string(), "a batch of 0: give one from 1 to 2^40");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CounterError {
    /// The batch is 0 or above 2^40. With a batch of 0, no CPU could keep anything to itself.
    Batch {
        /// The batch that the caller gave.
        batch: u64,
    },
    /// There is no memory, or no room left in the per-CPU units.
    OutOfMemory,
    /// Lowering the batch needs a fence and the end of all folds, and one of these did not come.
    ///
    /// With restartable sequences, the kernel cannot fence: it is older than 5.10, or a sandbox
    /// forbids `membarrier`. On the atomic backend, another thread held the lock of a CPU's unit
    /// for about a second. On every backend, another thread was in the middle of a fold for about a
    /// second. Both can happen on a loaded machine; try again.
    Fence,
}

impl fmt::Display for CounterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CounterError::Batch { batch } => {
                write!(f, "a batch of {batch}: give one from 1 to 2^40")
            }
            CounterError::OutOfMemory => write!(f, "no memory for per-CPU counters"),
            CounterError::Fence => write!(
                f,
                "a smaller batch needs a fence: membarrier of Linux 5.10 that no sandbox forbids, or, on a loaded machine, another try"
            ),
        }
    }
}

impl core::error::Error for CounterError {}
