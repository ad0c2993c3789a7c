//! The lock of the designs that the kernel used.

use crate::spin_until;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// A spinlock. All zero bytes mean unlocked.
///
/// The acquiring swap pairs with the releasing store of the previous holder.
#[derive(Default)]
pub struct Spinlock(AtomicBool);

impl Spinlock {
    /// Runs `work` while holding the lock.
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
