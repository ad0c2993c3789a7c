//! The lock of the slow paths: a futex that knows its holder and its place in the lock order.
//!
//! Three situations would deadlock an ordinary mutex. In each of them [`Lock`] refuses instead of
//! waiting, and the caller takes another way: it serves the allocation from a separate mapping, or
//! sets the freed object aside for the next holder, in a [`Llist`].
//!
//! * **A signal handler allocates while it interrupts a holder.** The handler would wait for its
//!   own thread. [`Lock::lock`] refuses a thread that holds the lock already.
//! * **Two signal handlers wait for each other.** Handler A interrupted a holder of L1 and waits
//!   for L2, handler B the reverse. So each lock knows its [`Rank`], its place in the lock order.
//!   `lock` also refuses a thread that would have to wait while it holds a lock of the same rank
//!   or of a rank below. The test reads the words of all these locks, which are on many cache lines
//!   that other CPUs write. Therefore a thread makes the test only after it has waited for the same
//!   holder for 10 ms.
//! * **A thread waits for a forking thread that waits for it.** [`Lock::lock_or_divert`] also
//!   refuses a thread that would have to wait for the forking thread. [`word`] has the protocol.
//!
//! # Why no thread waits without end
//!
//! A thread that sleeps for more than some milliseconds until a lock is free holds only locks of
//! ranks above that lock's, because `lock` refuses it otherwise. If the lock's holder sleeps too,
//! the same is true of the holder, so it sleeps for a lock of a rank further below. The ranks end,
//! so the last thread of such a chain runs and gives its lock back.
//!
//! A signal handler runs on the thread that it interrupted. A lock's word names the thread and not
//! the frame, so the locks of the interrupted frames count as held, and the rule holds for the
//! handler too.
//!
//! A forking thread is an exception: it waits for locks of all ranks, whatever locks its
//! interrupted frames hold. If they hold one, it does not wait without end. Module `fork` has its
//! rules, and those of the child.

mod llist;
mod rank;
mod word;

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::AtomicU64;
pub(crate) use llist::{Llist, chain};
pub use rank::{Hooks, Rank};
pub(crate) use rank::{Taken, count_held, enter, is_any_held, modules};
pub(crate) use word::{Patience, Word};

/// Data that one thread at a time may access.
pub(crate) struct Lock<T> {
    word: Word,
    rank: Rank,
    data: UnsafeCell<T>,
}

// SAFETY: the data is reached only through a [`Guard`], and one thread at a time has one.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Returns the calling thread's thread pointer.
pub(crate) fn me() -> u64 {
    pinfold_rseq::thread_pointer() as u64
}

impl<T> Lock<T> {
    /// Returns a free lock. The module that makes it registers hooks for `rank`, which visit it.
    pub(crate) const fn new(rank: Rank, data: T) -> Self {
        Lock {
            word: Word::new(AtomicU64::new(0)),
            rank,
            data: UnsafeCell::new(data),
        }
    }

    /// Takes the lock. Returns `None` if the calling thread holds it already. Also returns `None`
    /// if the thread would have to wait long while it holds a lock of the same rank or of a rank
    /// below.
    /// Both happen only in a signal handler that interrupted a holder: the handler *may not wait*.
    #[inline]
    pub(crate) fn lock(&self) -> Option<Guard<'_, T>> {
        self.take(Patience::Endless)
    }

    /// Takes the lock as [`lock`](Self::lock) does. Also returns `None` if the thread would have to
    /// wait for a forking thread.
    #[inline]
    pub(crate) fn lock_or_divert(&self) -> Option<Guard<'_, T>> {
        self.take(Patience::UntilFork)
    }

    /// Takes the lock as [`lock`](Self::lock) does. Also returns `None` if the thread would have to
    /// wait for a frame that a forking handler interrupted.
    ///
    /// For a lock that malloc takes while it holds another one which forks take earlier. No other
    /// fork can hold the lock then.
    #[inline]
    pub(crate) fn lock_or_divert_inside(&self) -> Option<Guard<'_, T>> {
        self.take(Patience::UntilForkAbove)
    }

    #[inline]
    fn take(&self, patience: Patience) -> Option<Guard<'_, T>> {
        let me = me();
        let taken = match self.word.try_lock(me) {
            Ok(()) => true,
            Err(holder) if holder == me => false,
            Err(_) => {
                let may_wait = || !is_any_held(self.rank);
                self.word.spin(me) || self.word.wait(me, patience, may_wait)
            }
        };
        taken.then(|| Guard { lock: self })
    }

    /// Returns whether the calling thread holds the lock, also in a frame that a signal
    /// interrupted. No other thread can change the answer.
    pub(crate) fn is_held(&self) -> bool {
        self.word.holder() == me()
    }

    /// Takes the lock if it is free.
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        let taken = self.word.try_lock(me()).is_ok();
        taken.then(|| Guard { lock: self })
    }

    /// Returns the lock's word, through which a fork takes the lock.
    pub(crate) fn word(&self) -> &Word {
        &self.word
    }

    /// Gives the lock back after `core::mem::forget` of its guard.
    ///
    /// # Safety
    ///
    /// The calling thread holds the lock, or is the only thread of a forked child.
    pub(crate) unsafe fn unlock(&self) {
        self.word.unlock();
    }
}

/// The held lock. Dropping the guard gives the lock back.
pub(crate) struct Guard<'l, T> {
    lock: &'l Lock<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard exists, so its thread holds the lock and no other thread accesses the
        // data.
        unsafe { &*self.lock.data.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard exists, so its thread holds the lock. The guard is borrowed mutably, so
        // there is no other reference to the data.
        unsafe { &mut *self.lock.data.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.word.unlock();
    }
}

/// What [`word`] and [`llist`] need from the system. Their loom models replace these items.
mod primitive {
    pub(super) use core::hint::spin_loop;
    use core::sync::atomic::AtomicU32;
    pub(super) use core::sync::atomic::AtomicU64;
    use core::time::Duration;

    /// Sleeps until a thread calls `futex_wake` for `word`, or until `time` has passed. May return
    /// sooner. Returns at once if the low half of `word` differs from that of `value`.
    pub(super) fn futex_wait(word: &AtomicU64, value: u64, time: Duration) {
        crate::sys::wait_for_change(low_half(word), value as u32, time);
    }

    /// Returns the milliseconds of a monotonic clock.
    pub(super) fn milliseconds() -> u64 {
        crate::sys::coarse_milliseconds()
    }

    /// Wakes a thread that sleeps on `word`, if there is one.
    pub(super) fn futex_wake(word: &AtomicU64) {
        crate::sys::wake_one(low_half(word));
    }

    fn low_half(word: &AtomicU64) -> &AtomicU32 {
        let halves = word.as_ptr().cast::<AtomicU32>();
        let low = halves.wrapping_add(usize::from(cfg!(target_endian = "big")));
        // SAFETY: the half lies in `word` and is aligned. Only the kernel reads it through this
        // reference.
        unsafe { &*low }
    }
}

/// Takes the lock of `word` until the result is dropped.
#[cfg(test)]
pub(crate) fn hold(word: &Word) -> impl Drop {
    struct Held<'w>(&'w Word);
    impl Drop for Held<'_> {
        fn drop(&mut self) {
            self.0.unlock();
        }
    }
    while word.try_lock(me()).is_err() {
        std::thread::yield_now();
    }
    Held(word)
}

/// Calls `work` in another thread while this one holds the lock of `word`. Returns the result of
/// `work` if it comes within `patience`. Otherwise gives the lock back, so that `work` ends, and
/// returns `None`.
#[cfg(test)]
pub(crate) fn while_held<R: Send>(
    word: &Word,
    patience: core::time::Duration,
    work: impl FnOnce() -> R + Send,
) -> Option<R> {
    let held = hold(word);
    std::thread::scope(|scope| {
        let (sender, result) = std::sync::mpsc::channel();
        let worker = scope.spawn(move || _ = sender.send(work()));
        let soon = result.recv_timeout(patience);
        drop(held);
        worker.join().expect("`work` does not panic");
        soon.ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excludes_and_wakes() {
        static LOCK: Lock<u64> = Lock::new(Rank::Shown, 0);
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
    fn refuses_only_its_holder() {
        let lock = Lock::new(Rank::Shown, ());
        let held = lock.lock();
        assert!(lock.lock().is_none());
        drop(held);
        assert!(lock.lock().is_some());
        assert!(lock.word().lock_for_fork(me(), Patience::Endless));
        assert!(lock.lock().is_none());
        lock.word().unlock_after_fork();
        assert!(lock.lock().is_some());
    }

    #[test]
    fn a_sleeper_needs_no_wake() {
        let lock = Lock::new(Rank::Shown, ());
        let held = lock.lock();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| lock.lock().is_some());
            while !lock.word().is_waited_for() {
                std::thread::yield_now();
            }
            // Gives the sleeper time to fall asleep.
            std::thread::sleep(core::time::Duration::from_millis(5));
            core::mem::forget(held);
            lock.word().unlock_without_wake();
            assert!(sleeper.join().unwrap());
        });
    }

    #[test]
    fn a_fork_leaves_the_lock_of_an_interrupted_frame_alone() {
        let lock = Lock::new(Rank::Shown, ());
        let held = lock.lock();
        assert!(lock.word().lock_for_fork(me(), Patience::Endless));
        lock.word().unlock_after_fork();
        assert!(lock.is_held());
        drop(held);
        assert!(lock.lock().is_some());
    }
}
