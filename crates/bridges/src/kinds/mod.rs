//! The kinds of metrics, made of Pinfold's counters, for both interfaces.

mod buckets;
#[cfg(feature = "metrics")]
mod extremes;
mod gauge;
mod sum;

pub use buckets::Buckets;
#[cfg(feature = "metrics")]
pub use extremes::Extremes;
pub use gauge::FloatGauge;
pub use sum::FloatSum;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, even if a thread panicked while it held the lock. Such a thread left nothing half
/// done.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
