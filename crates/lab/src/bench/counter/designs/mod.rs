//! The competing counter designs. Each follows its authors' text, plus what user space needs to be
//! correct.

mod add_start;
mod atomic;
mod on_sections;
mod pinfold;
mod slowcount;
mod spinlock_batch;

pub use add_start::AddStart;
pub use atomic::Atomic;
pub use on_sections::{SpinlockRseq, TotalRseq};
pub use pinfold::{in_shared, largest_batch, max_drift, with_max_drift};
pub use slowcount::Slowcount;
pub use spinlock_batch::SpinlockBatch;

use super::shared::Zeroed;

/// A counter that many threads add to and one thread sums.
pub trait Design: Sync {
    /// Adds `n`, which may be negative.
    fn add(&self, n: i64);

    /// Returns the value, as exactly as the design can.
    fn sum(&self) -> i64;

    /// Returns how far a cheap read of the shared count may be off, or `None` if there is no bound.
    fn error_bound(&self) -> Option<u64> {
        None
    }
}

/// A design that works in memory shared by processes. Its all-zero state counts 0.
pub trait Shared: Design + Zeroed {
    /// Sets the batch. The caller does this before any thread counts.
    fn set_batch(&mut self, batch: i64);
}
