//! The word of a lock: its holder, its waiters, and what a fork changes.
//!
//! # States
//!
//! | bits | meaning |
//! |---|---|
//! | all 0 | free |
//! | the thread pointer t | held by the thread with that thread pointer |
//! | [`WAITED_FOR`] | a thread may sleep until the lock is free |
//! | [`FOR_FORK`] | the holder took the lock for a fork, and gives it back after the fork |
//! | [`BELOW_FORK`] | the holder is an interrupted frame of the forking thread |
//!
//! Thread pointers are aligned to at least 8 bytes, so their lowest three bits are free. Holder and
//! state share one word and change in one step. So a signal handler that interrupts the change
//! finds the lock either not yet taken, or held by its own thread. Waiters sleep on the low half of
//! the word.
//!
//! # While a process forks
//!
//! The forking thread holds every lock, and then waits for locks of the C library and of the
//! program. Another thread may hold a lock of the program, and sleep on a lock of Pinfold. Then
//! neither thread would ever go on. So a waiter whose caller can do without the lock *diverts*: it
//! gives up as soon as the holder is the forking thread. No waiter may miss the fork:
//!
//! 1. The forking thread stores its thread pointer in [`Forks::thread`].
//! 2. It takes each lock that it does not hold, and sets [`FOR_FORK`] or [`BELOW_FORK`] in each
//!    word, with release order.
//! 3. A waiter counts itself in [`Forks::waiters`], marks the word with [`WAITED_FOR`], loads
//!    [`Forks::thread`], and sleeps if the word still has the marked value.
//!    * If the mark comes after step 2, the waiter has read the fork's bit with acquire order. So
//!      it sees the forking thread and diverts.
//!    * If the mark comes before step 2, the fork's bit makes the word differ from the marked
//!      value. So the waiter does not sleep, and looks again.
//! 4. The forking thread wakes all threads that sleep on the word if the word is marked or the
//!    count is not 0. The count is needed because [`Word::unlock`] clears the mark and wakes one
//!    thread only. The forking thread sees the count of a thread that sleeps: the thread set its
//!    mark with release order after it had counted itself. Every later change of the word is a
//!    read-modify-write, so step 2 acquires from the mark.

use super::primitive::{AtomicU64, fence, futex_wait, futex_wake, spin_loop};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

/// A thread may sleep until the lock is free.
pub(crate) const WAITED_FOR: u64 = 1;
/// The holder took the lock for a fork.
pub(crate) const FOR_FORK: u64 = 2;
/// The holder is an interrupted frame of the forking thread.
pub(crate) const BELOW_FORK: u64 = 4;
const FLAGS: u64 = WAITED_FOR | FOR_FORK | BELOW_FORK;

/// How often a waiter looks again before it sleeps. A running holder is done within about a
/// microsecond.
const SPINS: u32 = if cfg!(loom) { 1 } else { 100 };

/// The state of the process's forks that all locks share.
pub(crate) struct Forks {
    /// The thread pointer of the forking thread, or 0.
    pub(crate) thread: AtomicU64,
    /// The number of threads that wait for a lock.
    pub(crate) waiters: AtomicU64,
}

/// A lock without the data that it protects.
pub(crate) struct Word(AtomicU64);

impl Word {
    /// Returns a free lock. `word` is 0.
    pub(crate) const fn new(word: AtomicU64) -> Self {
        Word(word)
    }

    /// Returns the thread pointer of the holder, or 0.
    pub(crate) fn holder(&self) -> u64 {
        self.0.load(Relaxed) & !FLAGS
    }

    /// Takes the lock if it is free. Otherwise returns the holder.
    #[inline]
    pub(crate) fn try_lock(&self, me: u64) -> Result<(), u64> {
        // Acquire pairs with the release in `unlock`: this thread sees the last holder's writes.
        match self.0.compare_exchange(0, me, Acquire, Relaxed) {
            Ok(_) => Ok(()),
            Err(word) => Err(word & !FLAGS),
        }
    }

    /// Takes the lock if it becomes free within [`SPINS`] looks.
    #[cold]
    pub(crate) fn spin(&self, me: u64) -> bool {
        (0..SPINS).any(|_| {
            spin_loop();
            self.0.load(Relaxed) == 0 && self.try_lock(me).is_ok()
        })
    }

    /// Sleeps until the lock is free, and takes it. With `diverts`, returns false as soon as the
    /// holder is the forking thread.
    #[cold]
    pub(crate) fn wait(&self, me: u64, forks: &Forks, diverts: bool) -> bool {
        // Sequentially consistent, to pair with the fence in `lock_for_fork`: either the forking
        // thread sees this count, or this thread sees the forking thread.
        forks.waiters.fetch_add(1, SeqCst);
        let taken = self.wait_counted(me, forks, diverts);
        forks.waiters.fetch_sub(1, Relaxed);
        taken
    }

    fn wait_counted(&self, me: u64, forks: &Forks, diverts: bool) -> bool {
        loop {
            // Acquire pairs with the release in `lock_for_fork`: a thread that sees the fork's bit
            // also sees `Forks::thread`.
            let word = self.0.load(Acquire);
            if word == 0 {
                // Takes the lock with the mark, because other threads may still sleep. `unlock`
                // cleared the mark but woke only one thread.
                let mine = me | WAITED_FOR;
                if self.0.compare_exchange(0, mine, Acquire, Relaxed).is_ok() {
                    return true;
                }
                continue;
            }
            let marked = word | WAITED_FOR;
            // Release: the forking thread that acquires the mark also sees the count. Acquire pairs
            // with the release in `lock_for_fork`: a thread that sees the fork's bit also sees
            // `Forks::thread`.
            let mark = || self.0.compare_exchange(word, marked, AcqRel, Relaxed);
            if word != marked && mark().is_err() {
                continue;
            }
            if diverts && forks.thread.load(SeqCst) == word & !FLAGS {
                return false;
            }
            futex_wait(&self.0, marked);
        }
    }

    /// Gives the lock back and wakes a sleeping thread.
    #[inline]
    pub(crate) fn unlock(&self) {
        // Release pairs with the acquires in `try_lock` and `wait_counted`: the next holder sees
        // this holder's writes.
        if self.0.swap(0, Release) & WAITED_FOR != 0 {
            futex_wake(&self.0, 1);
        }
    }

    /// Takes the lock for the fork that this thread has stored in `forks`, and wakes the sleeping
    /// threads, which may divert.
    ///
    /// A lock that an interrupted frame of this thread holds stays with that frame.
    pub(crate) fn lock_for_fork(&self, me: u64, forks: &Forks) {
        let bit = match self.try_lock(me) {
            Err(holder) if holder == me => BELOW_FORK,
            Ok(()) => FOR_FORK,
            Err(_) => {
                if !self.spin(me) {
                    self.wait(me, forks, false);
                }
                FOR_FORK
            }
        };
        // Release: a waiter that sees the bit also sees `Forks::thread`. Acquire pairs with the
        // waiters' marks: this thread sees that the marked waiters are counted.
        let before = self.0.fetch_or(bit, AcqRel);
        // Pairs with the count in `wait`: either this thread sees the count, or the waiter sees the
        // forking thread.
        fence(SeqCst);
        if before & WAITED_FOR != 0 || forks.waiters.load(SeqCst) != 0 {
            futex_wake(&self.0, i32::MAX);
        }
    }

    /// Gives the lock back if [`lock_for_fork`](Self::lock_for_fork) took it. For the parent and
    /// the child.
    pub(crate) fn unlock_after_fork(&self) {
        let word = self.0.load(Relaxed);
        if word & FOR_FORK != 0 {
            self.unlock();
        } else if word & BELOW_FORK != 0 {
            // An interrupted frame of this thread holds the lock, so no other thread clears the
            // bit.
            self.0.fetch_and(!BELOW_FORK, Relaxed);
        }
    }
}
