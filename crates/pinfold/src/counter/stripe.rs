//! The locks of the counters' slow paths.
//!
//! A shard has no lock of its own: its CPU and its counter's block name one of [`ALL`], in a line that only that CPU (or one
//! 64 further) uses as long as nobody folds from afar. Whoever adds or folds only ever *tries*, and has a way round (the shared
//! base); sums take no lock. So none of these wait, and a signal handler may add, read, sum and fold wherever it strikes. Who resets a
//! counter or changes its batch takes the locks of all its shards, waits for them, and must not do so in a signal handler.
//!
//! The word is 0 or the holder's thread pointer. Holders fold a few words, or keep a gate for some microseconds.

use super::shards::SIZE;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pinfold_rseq::{possible, thread_pointer};

/// CPUs that have lines of their own.
const LINES: usize = 64;
/// Locks in a line, for different counters.
const LOCKS: usize = 8;
/// Looks before a waiter lets others run, and before it sleeps: a preempted holder needs the CPU.
const SPINS: u32 = 100;
const YIELDS: u32 = 200;

#[repr(align(64))]
struct Line([AtomicU64; LOCKS]);

static ALL: [Line; LINES] = [const { Line([const { AtomicU64::new(0) }; LOCKS]) }; LINES];

fn lock_of(unit: usize, offset: usize) -> &'static AtomicU64 {
    &ALL[unit % LINES].0[offset / SIZE % LOCKS]
}

/// How many lines are in use.
fn lines() -> usize {
    possible().min(LINES)
}

/// Takes the lock if it is free; else the thread pointer of who has it.
fn try_lock(lock: &AtomicU64) -> Result<(), u64> {
    let me = thread_pointer() as u64;
    // Acquire pairs with the release of the holder before.
    lock.compare_exchange(0, me, Acquire, Relaxed).map(|_| ())
}

/// The lock of one shard, held until dropped.
pub(super) struct Held(&'static AtomicU64);

/// The lock of the shard of `unit` in the block at `offset`, at once or not at all.
#[inline]
pub(super) fn try_hold(unit: usize, offset: usize) -> Option<Held> {
    let lock = lock_of(unit, offset);
    // Made only if it is held: dropping it unlocks.
    try_lock(lock).is_ok().then(|| Held(lock))
}

impl Drop for Held {
    #[inline]
    fn drop(&mut self) {
        // Release pairs with the acquire of the next holder.
        self.0.store(0, Release);
    }
}

/// The locks of all shards of a block, held until dropped.
pub(super) struct AllHeld {
    offset: usize,
    /// A bit for each line whose lock was taken here.
    taken: u64,
}

impl AllHeld {
    const fn none(offset: usize) -> Self {
        AllHeld { offset, taken: 0 }
    }

    /// Takes the lock in `line`; else the thread pointer of who has it.
    fn add(&mut self, line: usize) -> Result<(), u64> {
        try_lock(lock_of(line, self.offset)).map(|()| self.taken |= 1 << line)
    }
}

/// The locks of all shards of the block at `offset`, at once or not at all.
pub(super) fn try_hold_all(offset: usize) -> Option<AllHeld> {
    let mut held = AllHeld::none(offset);
    (0..lines())
        .all(|line| held.add(line).is_ok())
        .then_some(held)
}

/// The locks of all shards of the block at `offset`, however long it takes; not for signal handlers, which could wait for each
/// other, or for the frame that they interrupted.
pub(super) fn hold_all(offset: usize) -> AllHeld {
    hold_all_but(offset, 0)
}

/// As [`hold_all`], but leaves those alone that the thread with thread pointer `owner` has.
fn hold_all_but(offset: usize, owner: u64) -> AllHeld {
    let mut held = AllHeld::none(offset);
    for line in 0..lines() {
        let mut looks = 0;
        while held.add(line).is_err_and(|holder| holder != owner) {
            pause(&mut looks);
        }
    }
    held
}

/// Waits a little, longer the more often it was called.
pub(super) fn pause(looks: &mut u32) {
    *looks += 1;
    if *looks < SPINS {
        core::hint::spin_loop();
    } else if *looks < YIELDS {
        // SAFETY: no preconditions.
        unsafe { libc::sched_yield() };
    } else {
        // A real-time thread that only yields would never let the holder run.
        crate::sys::sleep_microseconds(50);
    }
}

impl Drop for AllHeld {
    fn drop(&mut self) {
        while self.taken != 0 {
            let line = self.taken.trailing_zeros() as usize;
            self.taken &= self.taken - 1;
            // Release pairs with the acquire of the next holder.
            lock_of(line, self.offset).store(0, Release);
        }
    }
}

/// For each lock of a line, the lines that a fork has taken.
static FORKING: [AtomicU64; LOCKS] = [const { AtomicU64::new(0) }; LOCKS];

/// Whether the thread with thread pointer `thread` holds a lock.
pub(super) fn is_held_by(thread: u64) -> bool {
    let held = |lock: &AtomicU64| lock.load(Relaxed) == thread;
    ALL.iter().take(lines()).any(|line| line.0.iter().any(held))
}

/// Takes every lock for a fork: no fold and no gate is then under way in the child. A lock of the very frame that the
/// forking signal handler interrupted stays with that frame, which goes on in both processes.
pub(super) fn fork_prepare() {
    for (at, taken) in FORKING.iter().enumerate() {
        let held = hold_all_but(at * SIZE, thread_pointer() as u64);
        taken.store(held.taken, Relaxed);
        core::mem::forget(held);
    }
}

/// Gives back what [`fork_prepare`] took, on either side.
pub(super) fn fork_done() {
    for (at, taken) in FORKING.iter().enumerate() {
        drop(AllHeld {
            offset: at * SIZE,
            taken: taken.swap(0, Relaxed),
        });
    }
}
