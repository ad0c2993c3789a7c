//! Tracks the threads that keep a counter frozen without a lock, so that `fork` never copies a
//! frozen counter.
//!
//! A counter that another thread has frozen at the moment of a fork would stay frozen in the child,
//! which does not have that thread. So threads that sum and threads that fork tell each other by
//! two kinds of words:
//!
//! 1. A thread that sums writes its thread pointer into a slot of [`HERE`] before it freezes a
//!    counter. It clears the slot after the freeze.
//! 2. A thread that forks writes its thread pointer into [`FORKING`]. Then it waits until no slot
//!    names another thread. A thread that sums and finds another thread's fork in [`FORKING`]
//!    freezes no counter.
//!
//! A handler may sum in a thread that is already in [`HERE`]. It may freeze a counter at once,
//! because the fork waits for the interrupted frame anyway.
//!
//! A forking thread takes all its other locks before it waits here. So it never waits here for a
//! handler that interrupted the holder of one of these locks.

use super::stripe::pause_within;
use crate::lock::Patience;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use pinfold_rseq::thread_pointer;

/// The maximum number of threads that keep a counter frozen at once. A sum in a further thread goes
/// on collecting until its thread can freeze its counter.
const SLOTS: usize = 64;
/// The thread pointers of the threads that may keep a counter frozen. A free slot is 0.
static HERE: [AtomicU64; SLOTS] = [const { AtomicU64::new(0) }; SLOTS];
/// The thread pointer of the forking thread, or 0.
static FORKING: AtomicU64 = AtomicU64::new(0);

/// Permission to freeze counters, until dropped. Holds the thread's slot, or `None` if the thread
/// had permission before.
pub(super) struct Pass(Option<&'static AtomicU64>);

/// Returns permission to freeze counters. Returns `None` while another thread forks, and when all
/// slots are taken.
pub(super) fn enter() -> Option<Pass> {
    let me = thread_pointer() as u64;
    if FORKING.load(Relaxed) == me || is_held_by(me) {
        return Some(Pass(None));
    }
    if FORKING.load(Relaxed) != 0 {
        return None;
    }
    let free = |slot: &&AtomicU64| slot.compare_exchange(0, me, SeqCst, Relaxed).is_ok();
    let pass = Pass(HERE.iter().find(free));
    // Sequentially consistent, as in `fork_prepare`: either the forking thread sees the slot, or
    // this thread sees the forking thread.
    (pass.0.is_some() && FORKING.load(SeqCst) == 0).then_some(pass)
}

/// Returns whether the thread with thread pointer `thread` may keep a counter frozen. A fork waits
/// for that thread, so a handler that interrupted it must not wait for the fork.
pub(super) fn is_held_by(thread: u64) -> bool {
    HERE.iter().any(|slot| slot.load(Relaxed) == thread)
}

impl Drop for Pass {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            // Release pairs with the load in `fork_prepare`: a forking thread that sees the slot
            // free also sees the end of the freeze.
            slot.store(0, Release);
        }
    }
}

/// Waits until no other thread keeps a counter frozen, and prevents other threads from freezing
/// one. Returns false if `patience` ends first.
///
/// One thread at a time calls this function, because a fork calls it under a lock of its own.
pub(super) fn fork_prepare(patience: Patience) -> bool {
    let me = thread_pointer() as u64;
    FORKING.store(me, SeqCst);
    HERE.iter().all(|slot| {
        let mut tries = 0;
        while ![0, me].contains(&slot.load(SeqCst)) {
            if !pause_within(patience, &mut tries) {
                return false;
            }
        }
        true
    })
}

/// Clears the slots of other threads, in the child.
///
/// Another thread may take a slot during the fork. It sees the fork and gives the slot back at
/// once, but only in the parent. The child has a copy of the slot without the thread.
pub(super) fn fork_child() {
    let me = thread_pointer() as u64;
    for slot in HERE.iter().filter(|slot| slot.load(Relaxed) != me) {
        slot.store(0, Relaxed);
    }
}

/// Lets other threads freeze counters again, in the parent and in the child.
pub(super) fn fork_done() {
    // Release pairs with the last load in `enter`: a thread that sees the end of the fork also sees
    // the slots that `fork_child` cleared.
    FORKING.store(0, Release);
}
