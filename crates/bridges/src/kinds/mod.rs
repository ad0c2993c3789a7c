//! What the kinds of metrics are made of, whichever crate's interface stands in front.

mod buckets;
mod gauge;
mod sum;

pub use buckets::Buckets;
pub use gauge::FloatGauge;
pub use sum::FloatSum;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks. A thread that panicked while it held one of this crate's locks left nothing half done.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
