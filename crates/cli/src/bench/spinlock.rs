//! The lock of designs that the kernel had.

use super::spin_until;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// A spinlock. All zeroes is unlocked.
#[derive(Default)]
pub struct Spinlock(AtomicBool);

impl Spinlock {
    /// Runs `work` with the lock.
    #[inline]
    pub fn with<R>(&self, work: impl FnOnce() -> R) -> R {
        while self.0.swap(true, Acquire) {
            spin_until(|| !self.0.load(Relaxed));
        }
        let result = work();
        self.0.store(false, Release);
        result
    }
}
