//! The protections of the designs that the kernel used, as a program can have them.

use crate::spin_until;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// A spinlock. All zero bytes mean unlocked.
///
/// The acquiring swap pairs with the releasing store of the previous holder.
#[derive(Default)]
pub struct Spinlock(AtomicBool);

impl Spinlock {
    /// Runs `work` while holding the lock.
    #[inline(always)]
    pub fn with<R>(&self, work: impl FnOnce() -> R) -> R {
        while self.0.swap(true, Acquire) {
            spin_until(|| !self.0.load(Relaxed));
        }
        let result = work();
        self.0.store(false, Release);
        result
    }

    /// Runs `work` while holding the lock, unless the lock is taken.
    #[inline(always)]
    pub fn try_with<R>(&self, work: impl FnOnce() -> R) -> Option<R> {
        if self.0.swap(true, Acquire) {
            return None;
        }
        let result = work();
        self.0.store(false, Release);
        Some(result)
    }
}

/// Runs `work` while all signals are masked. To a thread, masked signals are what disabled
/// interrupts are to a CPU. They cost two system calls.
#[inline(always)]
pub fn masked<R>(work: impl FnOnce() -> R) -> R {
    static ALL: LazyLock<libc::sigset_t> = LazyLock::new(|| {
        let mut all = MaybeUninit::uninit();
        // SAFETY: `sigfillset` writes the whole set, and its only argument is valid for that.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            all.assume_init()
        }
    });
    let mut before = MaybeUninit::uninit();
    // SAFETY: `ALL` is initialised, and `before` is a live variable that the call may write to.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const *ALL, before.as_mut_ptr()) };
    let result = work();
    // SAFETY: the first `pthread_sigmask` initialised `before`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut()) };
    result
}
