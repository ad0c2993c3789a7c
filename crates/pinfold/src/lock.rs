//! The lock of the slow paths: a futex that knows its owner.
//!
//! A signal handler may allocate while it interrupts a frame that holds a lock; waiting would then never end. So
//! [`Lock::lock`] refuses a thread that holds the lock already, and each caller has a way round: the allocation
//! is served from a mapping of its own, the freed object is set aside for the next holder.
//!
//! # States
//!
//! | word | meaning |
//! |---|---|
//! | 0 | free |
//! | t | held by the thread with thread pointer t, nobody waits |
//! | t + 1 | held by t, somebody may wait |
//!
//! Thread pointers are aligned, so that their last bit is free. Owner and state are one word, changed at once: a signal
//! that arrives around the change finds the lock either not yet taken, or its own. Waiters sleep on the word's low half.
//!
//! A handler that waits for another lock than those that it has interrupted could wait for ever too: for a thread whose own handler waits
//! the other way round. So locks that handlers come to are taken by [`Lock::lock_unless`]: who would have to wait, and holds a
//! lock of that kind or of one further in, is refused as well. That is asked only before a thread goes to sleep, of the locks' words:
//! holding a lock costs nothing more.
//!
//! # Lock order
//!
//! Outermost first: a memory pool's, the one for stopping CPUs, the registry of caches, what a cache has pending, its node, the sheaf
//! pool, the arena of a node, the metadata, that of shared policies. That of grace periods is only tried, and held alone. Never two of a kind, but in `fork`, which takes all in that order.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// How often a waiter looks again before it sleeps: a holder that runs is done within about a microsecond.
const SPINS: u32 = 100;

/// Says that somebody may wait.
const WAITED_FOR: u64 = 1;

/// Data that one thread at a time may touch.
pub(crate) struct Lock<T> {
    word: AtomicU64,
    data: UnsafeCell<T>,
}

// SAFETY: the lock hands the data to one thread at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(crate) const fn new(data: T) -> Self {
        Lock {
            word: AtomicU64::new(0),
            data: UnsafeCell::new(data),
        }
    }

    /// Takes the lock; `None` when the calling thread holds it already, in a frame that a signal interrupted.
    #[inline]
    pub(crate) fn lock(&self) -> Option<Guard<'_, T>> {
        self.lock_unless(|_| false)
    }

    /// As [`lock`](Self::lock), but `None` too when it would have to wait and `holds` says that the thread whose pointer it is given
    /// holds a lock that comes after this one, or one of its kind.
    #[inline]
    pub(crate) fn lock_unless(&self, holds: impl Fn(u64) -> bool) -> Option<Guard<'_, T>> {
        let me = pinfold_rseq::thread_pointer() as u64;
        // Acquire pairs with the release in `unlock`.
        match self.word.compare_exchange(0, me, Acquire, Relaxed) {
            Ok(_) => {}
            Err(word) if word & !WAITED_FOR == me => return None,
            Err(_) if self.spin(me) => {}
            Err(_) if holds(me) => return None,
            Err(_) => self.wait(me),
        }
        Some(Guard { lock: self })
    }

    /// Whether the thread with pointer `thread` holds it; of the calling thread, and of its interrupted frames, the answer stays true.
    pub(crate) fn is_held_by(&self, thread: u64) -> bool {
        self.word.load(Relaxed) & !WAITED_FOR == thread
    }

    /// Takes the lock if it is free.
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        let me = pinfold_rseq::thread_pointer() as u64;
        // Acquire pairs with the release in `unlock`.
        let taken = self.word.compare_exchange(0, me, Acquire, Relaxed);
        taken.is_ok().then(|| Guard { lock: self })
    }

    /// Takes it if it becomes free soon.
    #[cold]
    fn spin(&self, me: u64) -> bool {
        (0..SPINS).any(|_| {
            core::hint::spin_loop();
            self.word.load(Relaxed) == 0
                && self.word.compare_exchange(0, me, Acquire, Relaxed).is_ok()
        })
    }

    #[cold]
    fn wait(&self, me: u64) {
        loop {
            let word = self.word.load(Relaxed);
            if word == 0 {
                // Others may still sleep: who wakes one leaves no mark of the rest.
                let mine = me | WAITED_FOR;
                if self
                    .word
                    .compare_exchange(0, mine, Acquire, Relaxed)
                    .is_ok()
                {
                    return;
                }
                continue;
            }
            let marked = word | WAITED_FOR;
            if word == marked
                || self
                    .word
                    .compare_exchange(word, marked, Relaxed, Relaxed)
                    .is_ok()
            {
                futex(
                    &self.word,
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    marked as u32,
                );
            }
        }
    }

    fn unlock(&self) {
        if self.word.swap(0, Release) & WAITED_FOR != 0 {
            futex(&self.word, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1);
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

/// Waits on or wakes the low half of `word`; errors (interrupted, value changed) mean that the caller looks again. Keeps errno.
fn futex(word: &AtomicU64, operation: libc::c_int, value: u32) {
    crate::sys::keep_errno(|| {
        let low = word.as_ptr().cast::<u32>();
        let low = if cfg!(target_endian = "big") {
            low.wrapping_add(1)
        } else {
            low
        };
        // SAFETY: the word is valid for the call; without a timeout.
        unsafe {
            libc::syscall(libc::SYS_futex, low, operation, value, 0usize);
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
