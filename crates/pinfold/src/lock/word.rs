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
//!
//! Thread pointers are aligned, so their last two bits are free. Owner and state are one word and
//! change in one step: a signal that arrives around the change finds the lock either not yet taken,
//! or its own thread's. Waiters sleep on the word's low half.
//!
//! # While a process forks
//!
//! The forking thread holds every lock, and then waits for locks of the C library and of the
//! program. A thread that holds one of those and sleeps on a lock of ours would never wake up. So a
//! waiter that has another way *diverts*: it gives up as soon as the holder is the forking thread.
//!
//! 1. The forking thread stores its thread pointer to `forking`, then takes each lock.
//! 2. A waiter marks the word with [`WAITED_FOR`], then loads `forking`, then sleeps. Between its
//!    mark and its load, and between the forking thread's store and its look at the mark, stands a
//!    sequentially consistent fence: either the waiter sees the fork, or the forking thread sees
//!    the mark and wakes all sleepers.
//! 3. [`Word::unlock`] wakes one sleeper. When that one finds that the forking thread was faster,
//!    it wakes all others before it sleeps again or diverts: they cannot see the fork in their
//!    sleep.

use super::primitive::{AtomicU64, fence, futex_wait, futex_wake, spin_loop};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// A thread may sleep until the lock is free.
pub(crate) const WAITED_FOR: u64 = 1;
/// The holder took the lock for a fork.
pub(crate) const FOR_FORK: u64 = 2;
const FLAGS: u64 = WAITED_FOR | FOR_FORK;

/// How often a waiter looks again before it sleeps: a holder that runs is done within about a
/// microsecond.
const SPINS: u32 = if cfg!(loom) { 1 } else { 100 };

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
    /// as the holder is the forking thread, whose thread pointer is in `forking`.
    #[cold]
    pub(crate) fn wait(&self, me: u64, forking: &AtomicU64, diverts: bool) -> bool {
        let mut woke_others = false;
        loop {
            let word = self.0.load(Relaxed);
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
            let is_marked = word == marked
                || self
                    .0
                    .compare_exchange(word, marked, Relaxed, Relaxed)
                    .is_ok();
            if !is_marked {
                continue;
            }
            // Pairs with the fence in `lock_for_fork`.
            fence(SeqCst);
            if forking.load(Relaxed) == word & !FLAGS {
                if !woke_others {
                    futex_wake(&self.0, i32::MAX);
                    woke_others = true;
                }
                if diverts {
                    return false;
                }
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

    /// Takes the lock for the fork that this thread has announced in `forking`, and wakes the
    /// sleepers, which may divert. A lock that an interrupted frame of this thread holds stays with
    /// that frame.
    pub(crate) fn lock_for_fork(&self, me: u64, forking: &AtomicU64) {
        let taken = match self.try_lock(me) {
            Ok(()) => true,
            Err(holder) if holder == me => false,
            Err(_) => self.spin(me) || self.wait(me, forking, false),
        };
        if taken {
            // Only the holder changes this bit.
            self.0.fetch_or(FOR_FORK, Relaxed);
        }
        // Pairs with the fence in `wait`.
        fence(SeqCst);
        if self.0.load(Relaxed) & WAITED_FOR != 0 {
            futex_wake(&self.0, i32::MAX);
        }
    }

    /// Gives the lock back if [`lock_for_fork`](Self::lock_for_fork) took it, in the parent and in
    /// the child.
    pub(crate) fn unlock_after_fork(&self) {
        if self.0.load(Relaxed) & FOR_FORK != 0 {
            self.unlock();
        }
    }
}
