//! The lock of the slow paths: a futex that knows its owner.
//!
//! A signal handler may allocate while it interrupts a frame that holds a lock; waiting would then never end. So
//! [`Lock::lock`] refuses a thread that holds the lock already, and each caller has a way round: the allocation
//! is served from a mapping of its own, the freed object is set aside for the next holder.
//!
//! # States
//!
//! | `state` | meaning |
//! |---|---|
//! | 0 | free; `owner` is 0 |
//! | 1 | held, nobody waits |
//! | 2 | held, somebody may wait |
//!
//! `owner` is written by the holder only, after it took the lock and before it releases it. Others read it to compare
//! with themselves: a value that is not the reader's own, however stale, leads to the same answer.
//!
//! # Lock order
//!
//! Outermost first: the registry of caches, a cache's node, the sheaf pool, the arena of a node, the metadata. Never two
//! of a kind, but in `fork`, which takes all in that order.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicUsize};

/// How often a waiter looks again before it sleeps: a holder that runs is done within about a microsecond.
const SPINS: u32 = 100;

/// Data that one thread at a time may touch.
pub(crate) struct Lock<T> {
    state: AtomicU32,
    owner: AtomicUsize,
    data: UnsafeCell<T>,
}

// SAFETY: the lock hands the data to one thread at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(crate) const fn new(data: T) -> Self {
        Lock {
            state: AtomicU32::new(0),
            owner: AtomicUsize::new(0),
            data: UnsafeCell::new(data),
        }
    }

    /// Takes the lock; `None` when the calling thread holds it already, in a frame that a signal interrupted.
    #[inline]
    pub(crate) fn lock(&self) -> Option<Guard<'_, T>> {
        let me = pinfold_rseq::thread_pointer();
        // Acquire pairs with the release in `unlock`.
        if self.state.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            if self.owner.load(Relaxed) == me {
                return None;
            }
            self.lock_slow();
        }
        self.owner.store(me, Relaxed);
        Some(Guard { lock: self })
    }

    #[cold]
    fn lock_slow(&self) {
        for _ in 0..SPINS {
            if self.state.load(Relaxed) == 0
                && self.state.compare_exchange(0, 1, Acquire, Relaxed).is_ok()
            {
                return;
            }
            core::hint::spin_loop();
        }
        while self.state.swap(2, Acquire) != 0 {
            futex(&self.state, libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, 2);
        }
    }

    fn unlock(&self) {
        self.owner.store(0, Relaxed);
        if self.state.swap(0, Release) == 2 {
            futex(&self.state, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1);
        }
    }

    /// Takes the lock for `fork` and keeps it. A lock that this thread holds already, because the fork happens in a
    /// signal handler, stays with the interrupted frame.
    ///
    /// Returns whether [`unlock_after_fork`](Self::unlock_after_fork) has to give it back.
    pub(crate) fn lock_for_fork(&self) -> bool {
        self.lock().map(core::mem::forget).is_some()
    }

    /// Gives back what [`lock_for_fork`](Self::lock_for_fork) took, in the parent or in the child.
    ///
    /// # Safety
    ///
    /// `lock_for_fork` returned true, in this thread or in the parent's thread that forked.
    pub(crate) unsafe fn unlock_after_fork(&self) {
        self.unlock();
    }
}

/// The lock, held.
pub(crate) struct Guard<'l, T> {
    lock: &'l Lock<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard's thread holds the lock.
        unsafe { &*self.lock.data.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard's thread holds the lock, and the guard is borrowed mutably.
        unsafe { &mut *self.lock.data.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.unlock();
    }
}

/// Waits on or wakes `word`; errors (interrupted, value changed) mean that the caller looks again. Keeps errno.
fn futex(word: &AtomicU32, operation: libc::c_int, value: u32) {
    crate::sys::keep_errno(|| {
        // SAFETY: the word is valid for the call; without a timeout.
        unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, 0usize);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excludes_and_wakes() {
        static LOCK: Lock<u64> = Lock::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        *LOCK.lock().unwrap() += 1;
                    }
                });
            }
        });
        assert_eq!(*LOCK.lock().unwrap(), 160_000);
    }

    #[test]
    fn refuses_its_holder_only() {
        let lock = Lock::new(());
        let held = lock.lock();
        assert!(lock.lock().is_none());
        drop(held);
        assert!(lock.lock().is_some());
        assert!(lock.lock_for_fork());
        assert!(!lock.lock_for_fork());
        // SAFETY: the first call returned true.
        unsafe { lock.unlock_after_fork() };
        assert!(lock.lock().is_some());
    }
}
