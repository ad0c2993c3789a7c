//! The locks of the counters' slow paths.
//!
//! A shard has no lock of its own. Its CPU and its counter's block choose one of the locks in
//! [`ALL`]: the CPU chooses the cache line, and the block chooses the lock in that line.
//!
//! * An add takes no lock, and neither does the fold after it. Only the first add on a CPU tries
//!   one, to activate the shard. If the lock is taken, the add goes to the shared base.
//! * A fold from afar tries the lock of the first CPU, to store the estimate. If the lock is taken,
//!   it leaves the counter out.
//! * `read`, `bounds` and `sum` take no lock.
//! * `limited_add` waits for the locks of all the counter's shards, but for each lock for a tenth
//!   of a second only. It does not wait at all if its thread holds such a lock or one of a later
//!   rank. If it cannot take the locks, it refuses.
//! * `swap`, `set`, `set_batch` and the drop of a counter wait for the locks of all the counter's
//!   shards.
//!
//! So a signal handler may add, read, sum, fold and add within a limit, whatever it interrupted.
//! The operations in the last item must not run in a signal handler. The handler would wait for the
//! frame that it interrupted, if that frame holds one of the locks.
//!
//! A lock's word is 0, or the thread pointer of the holder. A holder writes a few words, or keeps a
//! counter frozen for some microseconds, or until the folds that are under way have ended: for at
//! most a second each.

use super::shards::SIZE;
use crate::lock::{Patience, Rank, is_any_held};
use crate::topology::bits;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pinfold_rseq::{possible, thread_pointer};

/// The number of cache lines, and so of CPUs that do not share one.
const LINES: usize = 64;
/// Locks in a line, for the blocks of different counters.
const LOCKS: usize = 8;
/// A waiting thread spins between its first `SPINS` tries at the lock. Then it yields the CPU
/// between two tries. After `YIELDS` tries it sleeps. So a preempted holder gets the CPU.
const SPINS: u32 = 100;
const YIELDS: u32 = 200;

#[repr(align(64))]
struct Line([AtomicU64; LOCKS]);

static ALL: [Line; LINES] = [const { Line([const { AtomicU64::new(0) }; LOCKS]) }; LINES];

/// Returns the lock of the shard of `unit` in the block at `offset`.
fn lock_of(unit: usize, offset: usize) -> &'static AtomicU64 {
    &ALL[unit % LINES].0[offset / SIZE % LOCKS]
}

/// Returns the number of lines that are in use.
fn lines() -> usize {
    possible().min(LINES)
}

/// Takes the lock if it is free. Otherwise returns the holder's thread pointer.
fn try_lock(lock: &AtomicU64) -> Result<(), u64> {
    let me = thread_pointer() as u64;
    // Acquire pairs with the release of the previous holder: this thread sees that holder's writes.
    lock.compare_exchange(0, me, Acquire, Relaxed).map(|_| ())
}

/// The lock of one shard, held until this is dropped.
pub(super) struct Held(&'static AtomicU64);

/// Takes the lock of the shard of `unit` in the block at `offset`, if it is free.
#[inline]
pub(super) fn try_hold(unit: usize, offset: usize) -> Option<Held> {
    let lock = lock_of(unit, offset);
    // The load spares an add a failing compare-exchange while a preempted thread holds the lock.
    // Relaxed, because only the compare-exchange decides.
    let looks_free = lock.load(Relaxed) == 0;
    // Dropping a `Held` unlocks. So the closure makes one only if the lock was taken.
    (looks_free && try_lock(lock).is_ok()).then(|| Held(lock))
}

impl Drop for Held {
    #[inline]
    fn drop(&mut self) {
        // Release pairs with the acquire of the next holder: that holder sees this one's writes.
        self.0.store(0, Release);
    }
}

/// The locks of all shards of a block, held until this is dropped.
pub(super) struct AllHeld {
    offset: usize,
    /// A bit for each line whose lock this holds.
    taken: u64,
}

impl AllHeld {
    const fn none(offset: usize) -> Self {
        AllHeld { offset, taken: 0 }
    }

    /// Takes the lock in `line` if it is free. Otherwise returns the holder's thread pointer.
    fn add(&mut self, line: usize) -> Result<(), u64> {
        try_lock(lock_of(line, self.offset)).map(|()| self.taken |= 1 << line)
    }

    /// Takes the locks of all lines, except those that the thread with thread pointer `owner`
    /// holds. Waits for their holders. Returns false if `patience` ends first.
    fn add_all(&mut self, owner: u64, patience: Patience) -> bool {
        (0..lines()).all(|line| {
            let mut tries = 0;
            while self.add(line).is_err_and(|holder| holder != owner) {
                if !pause_within(patience, &mut tries) {
                    return false;
                }
            }
            true
        })
    }
}

/// Takes the locks of all shards of the block at `offset`, if all are free.
pub(super) fn try_hold_all(offset: usize) -> Option<AllHeld> {
    let mut held = AllHeld::none(offset);
    (0..lines())
        .all(|line| held.add(line).is_ok())
        .then_some(held)
}

/// Takes the locks of all shards of the block at `offset`, and waits for their holders.
///
/// Not for signal handlers: two of them could wait for each other, or one for the frame that it
/// interrupted.
pub(super) fn hold_all(offset: usize) -> AllHeld {
    let mut held = AllHeld::none(offset);
    held.add_all(0, Patience::Endless);
    held
}

/// Takes the locks, and waits for each for about a tenth of a second. Returns `None` after that, or
/// if the thread would have to wait while it holds a lock of a counter or of a rank below. A
/// handler may have interrupted a fold that the holder waits for.
pub(super) fn hold_all_or_refuse(offset: usize) -> Option<AllHeld> {
    try_hold_all(offset).or_else(|| {
        let mut held = AllHeld::none(offset);
        (!is_any_held(Rank::Shards) && held.add_all(0, Patience::Short)).then_some(held)
    })
}

/// Waits a little. The wait gets longer with each call for the same `tries`.
pub(super) fn pause(tries: &mut u32) {
    *tries += 1;
    if *tries < SPINS {
        core::hint::spin_loop();
    } else if *tries < YIELDS {
        pinfold_rseq::kernel::yield_now();
    } else {
        // A real-time thread that only yields would never let the holder run.
        crate::sys::sleep_microseconds(50);
    }
}

/// Waits as [`pause`] does. Returns false if `patience` is not endless and the thread has waited
/// for about a tenth of a second.
pub(super) fn pause_within(patience: Patience, tries: &mut u32) -> bool {
    /// Tries, of which most follow a sleep.
    const MOST: u32 = YIELDS + 1000;
    pause(tries);
    patience == Patience::Endless || *tries < MOST
}

/// Lets threads that wait for the caller's locks take them, after the caller has given up. A
/// waiting thread may sleep between its looks at the locks.
pub(super) fn give_way() {
    crate::sys::sleep_microseconds(300);
}

impl Drop for AllHeld {
    fn drop(&mut self) {
        for line in bits(self.taken) {
            // Release pairs with the acquire of the next holder: that holder sees this one's
            // writes.
            lock_of(line, self.offset).store(0, Release);
        }
    }
}

/// For each of a line's locks, one bit for each line in which a fork has taken this lock.
static FORKING: [AtomicU64; LOCKS] = [const { AtomicU64::new(0) }; LOCKS];

/// Returns whether the thread with thread pointer `thread` holds a lock.
pub(super) fn is_held_by(thread: u64) -> bool {
    let held = |lock: &AtomicU64| lock.load(Relaxed) == thread;
    ALL.iter().take(lines()).any(|line| line.0.iter().any(held))
}

/// Takes every lock for a fork, so that the child inherits no fold and no freeze that is under way.
/// Returns false if `patience` ends first.
///
/// A signal handler may fork. A lock that the interrupted frame holds stays with that frame, which
/// goes on in both processes.
pub(super) fn fork_prepare(patience: Patience) -> bool {
    FORKING.iter().enumerate().all(|(at, taken)| {
        let mut held = AllHeld::none(at * SIZE);
        let all = held.add_all(thread_pointer() as u64, patience);
        taken.store(held.taken, Relaxed);
        core::mem::forget(held);
        all
    })
}

/// Gives back the locks that [`fork_prepare`] took, in the parent and in the child.
pub(super) fn fork_done() {
    for (at, taken) in FORKING.iter().enumerate() {
        drop(AllHeld {
            offset: at * SIZE,
            taken: taken.swap(0, Relaxed),
        });
    }
}
