//! Who keeps a gate closed without any lock, for the sake of forks.
//!
//! A gate that another thread keeps would stay closed in the child for ever. So a sum enters itself here before it closes one, and a
//! fork waits until nobody else is here, and keeps others out. A handler's sum in a thread that is here already comes in by that:
//! the fork waits for the frame below it anyhow. The fork takes its other locks first, so that none of those who wait for it
//! here is a handler above a frame that has one.

use super::stripe::pause;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use pinfold_rseq::thread_pointer;

/// Threads with a gate of their own at a time; others go on collecting meanwhile.
const SLOTS: usize = 64;
/// The thread pointers of those who are here.
static HERE: [AtomicU64; SLOTS] = [const { AtomicU64::new(0) }; SLOTS];
/// The thread pointer of who forks, or 0.
static FORKING: AtomicU64 = AtomicU64::new(0);

/// Leave to close gates, until dropped.
pub(super) struct Pass(Option<&'static AtomicU64>);

/// Leave to close gates; `None` while the process forks, or when too many have it.
pub(super) fn enter() -> Option<Pass> {
    let me = thread_pointer() as u64;
    if FORKING.load(Relaxed) == me || HERE.iter().any(|slot| slot.load(Relaxed) == me) {
        return Some(Pass(None));
    }
    if FORKING.load(Relaxed) != 0 {
        return None;
    }
    let free = |slot: &&AtomicU64| slot.compare_exchange(0, me, SeqCst, Relaxed).is_ok();
    let pass = Pass(HERE.iter().find(free));
    // Sequentially consistent, as in `fork_prepare`: either that sees the slot, or this the fork.
    (pass.0.is_some() && FORKING.load(SeqCst) == 0).then_some(pass)
}

impl Drop for Pass {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            // Release pairs with the fork's load: it sees the gate open.
            slot.store(0, Release);
        }
    }
}

/// Waits until no other thread keeps a gate, and keeps them from it; with all locks of [`stripe`](super::stripe) held, so that it is one
/// fork at a time.
pub(super) fn fork_prepare() {
    let me = thread_pointer() as u64;
    FORKING.store(me, SeqCst);
    for slot in &HERE {
        let mut looks = 0;
        while ![0, me].contains(&slot.load(SeqCst)) {
            pause(&mut looks);
        }
    }
}

/// In the child: those who came in while the process forked, and left at once, did so in the parent only.
pub(super) fn fork_child() {
    let me = thread_pointer() as u64;
    for slot in HERE.iter().filter(|slot| slot.load(Relaxed) != me) {
        slot.store(0, Relaxed);
    }
}

/// Lets others close gates again, on either side.
pub(super) fn fork_done() {
    FORKING.store(0, Release);
}
