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
//! | [`BELOW_FORK`] | a signal handler interrupted the holder, and forks |
//!
//! Thread pointers are aligned to at least 8 bytes, so their lowest three bits are free. Holder and
//! state share one word and change in one step. So a signal handler that interrupts the change
//! finds the lock either not yet taken, or held by its own thread. Waiters sleep on the low half of
//! the word.
//!
//! # Why a sleeper looks again after a while
//!
//! A signal handler may interrupt a thread in [`Word::unlock`], after the lock is free and before
//! the sleeper is woken. If the handler then waits for a lock that the sleeper holds, the wake
//! would never come. So a sleeper looks at the word again after [`SLEEP`], woken or not.
//!
//! # While a process forks
//!
//! The forking thread holds every lock, and then waits for locks of the C library and of the
//! program. Another thread may hold a lock of the program, and sleep on a lock of Pinfold. Then
//! neither thread would ever go on. So a waiter whose caller can do without the lock *diverts*: it
//! gives up when it finds [`FOR_FORK`] or [`BELOW_FORK`] in the word. A thread that was asleep when
//! the bit was set finds it when it looks again.
//!
//! It loads the word with acquire order, and the bits are set with release order, or after a fence.
//! So a thread that diverts also sees what the forking thread wrote before, by which module `fork`
//! tells that a fork is under way.

use super::primitive::{AtomicU64, futex_wait, futex_wake, milliseconds, spin_loop};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::time::Duration;

/// A thread may sleep until the lock is free.
const WAITED_FOR: u64 = 1;
/// The holder took the lock for a fork.
const FOR_FORK: u64 = 2;
/// The holder is an interrupted frame of a thread that forks.
const BELOW_FORK: u64 = 4;
const FLAGS: u64 = WAITED_FOR | FOR_FORK | BELOW_FORK;

/// How often a waiter looks again before it sleeps. A running holder is done within about a
/// microsecond.
const SPINS: u32 = if cfg!(loom) { 1 } else { 100 };

/// The longest sleep between two looks at the word.
const SLEEP: Duration = Duration::from_millis(10);
/// After so many milliseconds with the same holder, a waiter makes sure that it may wait.
const LONG: u64 = 10;
/// How many milliseconds a thread with [`Patience::Short`] waits for the same holder.
const SHORT: u64 = 100;

/// How long a thread waits for a lock.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Patience {
    /// Until the lock is free.
    Endless,
    /// Until the lock is free or a fork has it.
    UntilFork,
    /// Until the lock is free or its holder is a frame that a forking handler interrupted.
    UntilForkAbove,
    /// Until the lock is free, or the same thread was the holder at each look for [`SHORT`].
    Short,
}

// A handler that may not wait is refused before a fork that waits for it gives up.
const _: () = assert!(LONG + SLEEP.as_millis() as u64 * 2 < SHORT);

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

    /// Takes the lock if it is free. Otherwise returns the holder. `me` may have [`FOR_FORK`] set.
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

    /// Sleeps until the lock is free, and takes it. Returns false if `patience` ends first. Also
    /// returns false if `may_wait` does. This function calls `may_wait` once, after the same thread
    /// was the holder for [`LONG`].
    #[cold]
    pub(crate) fn wait(
        &self,
        me: u64,
        patience: Patience,
        may_wait: impl FnOnce() -> bool,
    ) -> bool {
        let mut may_wait = Some(may_wait);
        let (mut holder, mut since) = (0, 0);
        loop {
            // Acquire pairs with the releases of the forks' bits.
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
            // Also marks the word before it gives up: `unlock` may have woken this thread alone.
            let marked = word | WAITED_FOR;
            let mark = || self.0.compare_exchange(word, marked, Relaxed, Relaxed);
            if word != marked && mark().is_err() {
                continue;
            }
            let now = milliseconds();
            if holder != word & !FLAGS {
                (holder, since) = (word & !FLAGS, now);
            }
            let waited = now.saturating_sub(since);
            let is_over = match patience {
                Patience::Endless => false,
                Patience::UntilFork => word & (FOR_FORK | BELOW_FORK) != 0,
                Patience::UntilForkAbove => word & BELOW_FORK != 0,
                Patience::Short => waited >= SHORT,
            };
            if is_over || waited >= LONG && may_wait.take().is_some_and(|may_wait| !may_wait()) {
                return false;
            }
            futex_wait(&self.0, marked, SLEEP);
        }
    }

    /// Gives the lock back and wakes a sleeping thread.
    #[inline]
    pub(crate) fn unlock(&self) {
        // Release pairs with the acquires in `try_lock` and `wait`: the next holder sees this
        // holder's writes.
        if self.0.swap(0, Release) & WAITED_FOR != 0 {
            futex_wake(&self.0);
        }
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn is_waited_for(&self) -> bool {
        self.0.load(Relaxed) & WAITED_FOR != 0
    }

    /// Gives the lock back without the wake, as a thread does that is interrupted in `unlock`.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn unlock_without_wake(&self) {
        self.0.store(0, Release);
    }

    /// Notes that the calling thread forks, in a handler that interrupted the holder.
    pub(crate) fn mark_below_fork(&self) {
        // Release pairs with the acquire in `wait`.
        self.0.fetch_or(BELOW_FORK, Release);
    }

    /// Takes the lock for a fork. A lock that an interrupted frame of this thread holds stays with
    /// that frame. Returns false if `patience` ends before the lock is free.
    ///
    /// The caller has told other threads of the fork, and has executed a fence after that.
    pub(crate) fn lock_for_fork(&self, me: u64, patience: Patience) -> bool {
        // Takes the lock and sets the bit in one step, because a handler may interrupt this thread
        // and fork too. The caller's fence pairs with the acquire in `wait`.
        let mine = me | FOR_FORK;
        match self.try_lock(mine) {
            Ok(()) => true,
            Err(holder) if holder == me => true,
            Err(_) => self.spin(mine) || self.wait(mine, patience, || true),
        }
    }

    /// Gives the lock back if [`lock_for_fork`](Self::lock_for_fork) took it. For the parent and
    /// the child.
    pub(crate) fn unlock_after_fork(&self) {
        if self.0.load(Relaxed) & FOR_FORK != 0 {
            self.unlock();
        }
    }

    /// Takes back what [`mark_below_fork`](Self::mark_below_fork) noted.
    pub(crate) fn unmark_below_fork(&self) {
        self.0.fetch_and(!BELOW_FORK, Relaxed);
    }
}
