//! Why a counter cannot be made.

use core::fmt;

/// Why a counter cannot be made as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CounterError {
    /// The batch is 0 (nothing could ever be added on a CPU's own words) or above 2^40.
    Batch {
        /// What was asked for.
        batch: u64,
    },
    /// The drift that is allowed is 0: for a counter that is never off, use an atomic.
    Drift,
    /// There is no memory, or no room among the per-CPU blocks.
    OutOfMemory,
    /// A smaller batch needs a fence, and the kernel offers none: it is older than 5.10, or a sandbox forbids `membarrier`.
    Fence,
}

impl fmt::Display for CounterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CounterError::Batch { batch } => {
                write!(f, "a batch of {batch}: give one from 1 to 2^40")
            }
            CounterError::Drift => write!(f, "a drift of 0: give at least 1, or use an atomic"),
            CounterError::OutOfMemory => write!(f, "no memory for per-CPU counters"),
            CounterError::Fence => write!(
                f,
                "a smaller batch needs membarrier with restartable sequences: Linux 5.10, and a sandbox that lets it pass"
            ),
        }
    }
}

impl core::error::Error for CounterError {}
