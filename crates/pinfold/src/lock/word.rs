//! The word of a lock: who holds it, who waits, and what a fork changes about that.
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
//! Thread pointers are aligned to 8 at least, so their last three bits are free. Owner and state
//! are one word and change in one step: a signal that arrives around the change finds the lock
//! either not yet taken, or its own thread's. Waiters sleep on the word's low half.
//!
//! # While a process forks
//!
//! The forking thread holds every lock, and then waits for locks of the C library and of the
//! program. A thread that holds one of those and sleeps on a lock of ours would never wake up. So a
//! waiter that has another way *diverts*: it gives up as soon as the holder is the forking thread.
//!
//! 1. The forking thread stores its thread pointer to [`Forks::thread`]. Then it takes each lock
//!    that it does not hold, and sets [`FOR_FORK`] or [`BELOW_FORK`] in each word, with release
//!    order.
//! 2. A waiter counts itself in [`Forks::waiters`], marks the word with [`WAITED_FOR`], loads
//!    [`Forks::thread`], and sleeps if the word is still as it was marked. A mark that comes after
//!    the bit of step 1 has read the bit with acquire order, so that the waiter sees the fork. A
//!    mark that comes before the bit differs from the word by the bit, so that the waiter looks
//!    again.
//! 3. A waiter that slept already is counted, and its mark passed the count on: each later change
//!    of the word is one of read and write, so that the forking thread's lock has read from the
//!    mark. After it has set the bit, the forking thread sees the count and wakes all that sleep on
//!    the word, also those whose mark [`Word::unlock`] has cleared.

use super::primitive::{AtomicU64, fence, futex_wait, futex_wake, spin_loop};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

/// A thread may sleep until the lock is free.
pub(crate) const WAITED_FOR: u64 = 1;
/// The holder took the lock for a fork.
pub(crate) const FOR_FORK: u64 = 2;
/// The holder is an interrupted frame of the forking thread.
pub(crate) const BELOW_FORK: u64 = 4;
const FLAGS: u64 = WAITED_FOR | FOR_FORK | BELOW_FORK;

/// How often a waiter looks again before it sleeps: a holder that runs is done within about a
/// microsecond.
const SPINS: u32 = if cfg!(loom) { 1 } else { 100 };

/// What all locks of a process know of its forks.
pub(crate) struct Forks {
    /// The thread pointer of the forking thread, or 0.
    pub(crate) thread: AtomicU64,
    /// How many threads wait for a lock.
    pub(crate) waiters: AtomicU64,
}

/// A lock without the data that it protects.
pub(crate) struct Word(AtomicU64);

impl Word {
    /// A free lock; `word` is 0.
    pub(crate) const fn new(word: AtomicU64) -> Self {
        Word(word)
    }

    /// Returns the thread pointer of the holder, or 0.
    pub(crate) fn holder(&self) -> u64 {
        self.0.load(Relaxed) & !FLAGS
    }

    /// Takes the lock if it is free; otherwise returns the holder.
    #[inline]
    pub(crate) fn try_lock(&self, me: u64) -> Result<(), u64> {
        // Acquire pairs with the release in `unlock`.
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

    /// Sleeps until the lock is free, and takes it. With `diverts`, returns false instead as soon
    /// as the holder is the forking thread.
    #[cold]
    pub(crate) fn wait(&self, me: u64, forks: &Forks, diverts: bool) -> bool {
        // Sequentially consistent, as the fence in `lock_for_fork`: either that sees the count, or
        // this thread the fork.
        forks.waiters.fetch_add(1, SeqCst);
        let taken = self.wait_counted(me, forks, diverts);
        forks.waiters.fetch_sub(1, Relaxed);
        taken
    }

    fn wait_counted(&self, me: u64, forks: &Forks, diverts: bool) -> bool {
        loop {
            // Acquire pairs with the release in `lock_for_fork`: with its bit, the fork is seen.
            let word = self.0.load(Acquire);
            if word == 0 {
                // Other threads may still sleep: `unlock` wakes one, and leaves no mark of the
                // rest.
                let mine = me | WAITED_FOR;
                if self.0.compare_exchange(0, mine, Acquire, Relaxed).is_ok() {
                    return true;
                }
                continue;
            }
            let marked = word | WAITED_FOR;
            // Release: the forking thread that sees the mark sees the count. Acquire as above.
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

    /// Gives the lock back and wakes a sleeper.
    #[inline]
    pub(crate) fn unlock(&self) {
        // Release pairs with the acquire of the next holder.
        if self.0.swap(0, Release) & WAITED_FOR != 0 {
            futex_wake(&self.0, 1);
        }
    }

    /// Takes the lock for the fork that this thread has announced in `forks`, and wakes the
    /// sleepers, which may divert. A lock that an interrupted frame of this thread holds stays with
    /// that frame.
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
        // Release passes on what announced the fork; acquire pairs with the marks of waiters.
        let before = self.0.fetch_or(bit, AcqRel);
        // Pairs with the count in `wait`.
        fence(SeqCst);
        if before & WAITED_FOR != 0 || forks.waiters.load(SeqCst) != 0 {
            futex_wake(&self.0, i32::MAX);
        }
    }

    /// Gives the lock back if [`lock_for_fork`](Self::lock_for_fork) took it, in the parent and in
    /// the child.
    pub(crate) fn unlock_after_fork(&self) {
        let word = self.0.load(Relaxed);
        if word & FOR_FORK != 0 {
            self.unlock();
        } else if word & BELOW_FORK != 0 {
            // The interrupted frame of this thread holds the lock, so no other thread clears the
            // bit.
            self.0.fetch_and(!BELOW_FORK, Relaxed);
        }
    }
}
