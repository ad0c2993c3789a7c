//! The competing counter designs. Each follows its authors' text, plus what user space needs to be
//! correct.

mod add_start;
mod atomic;
mod pinfold;
mod slowcount;
mod spinlock_batch;

pub use add_start::AddStart;
pub use atomic::Atomic;
pub use pinfold::{in_shared, max_drift, with_max_drift};
pub use slowcount::Slowcount;
pub use spinlock_batch::SpinlockBatch;

use super::shared::Zeroed;

/// A counter that many threads add to and one thread sums.
pub trait Design: Sync {
    /// Adds `n`, which may be negative.
    fn add(&self, n: i64);

    /// Returns the value, as exactly as the design can.
    fn sum(&self) -> i64;
}

/// A design that works in memory shared by processes. Its all-zero state counts 0.
pub trait Shared: Design + Zeroed {
    /// Sets the batch. The caller does this before any thread counts.
    fn set_batch(&mut self, batch: i64);
}
