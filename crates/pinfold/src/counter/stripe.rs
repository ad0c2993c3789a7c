//! The locks of the counters' slow paths.
//!
//! A counter has no lock of its own: its block's offset names one of [`STRIPES`]. Whoever adds only ever *tries*, and
//! has a way round (the shared base); so adders never wait, and a signal handler may add, read and sum wherever it strikes.
//! Who resets a counter or changes its batch waits, and must not do so in a signal handler.
//!
//! The word is 0 or the holder's thread pointer. Holders fold a few words, or keep a gate for some microseconds.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pinfold_rseq::thread_pointer;

const STRIPES: usize = 64;
/// Looks before a waiter lets others run, and before it sleeps: a preempted holder needs the CPU.
const SPINS: u32 = 100;
const YIELDS: u32 = 200;

#[repr(align(64))]
struct Stripe(AtomicU64);

static ALL: [Stripe; STRIPES] = [const { Stripe(AtomicU64::new(0)) }; STRIPES];

/// A stripe, held until dropped.
pub(super) struct Held {
    /// `None` in a frame that runs on top of the holder's own.
    stripe: Option<&'static Stripe>,
}

/// Why a stripe cannot be had at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Busy {
    /// Another thread has it.
    Other,
    /// The frame that this signal handler interrupted has it: it will not move before the handler is done.
    Own,
}

/// The stripe of the block at `offset`, at once or not at all.
#[inline]
pub(super) fn try_hold(offset: usize) -> Result<Held, Busy> {
    let stripe = &ALL[offset / super::shards::SIZE % STRIPES];
    let me = thread_pointer() as u64;
    // Acquire pairs with the release of the holder before.
    match stripe.0.compare_exchange(0, me, Acquire, Relaxed) {
        Ok(_) => Ok(Held {
            stripe: Some(stripe),
        }),
        Err(owner) if owner == me => Err(Busy::Own),
        Err(_) => Err(Busy::Other),
    }
}

/// The stripe of the block at `offset`, however long it takes; not for signal handlers, which could wait for each other. A
/// handler that does it all the same goes on as the holder when the frame it interrupted is the holder.
pub(super) fn hold(offset: usize) -> Held {
    let mut looks = 0;
    loop {
        match try_hold(offset) {
            Ok(held) => return held,
            Err(Busy::Own) => return Held { stripe: None },
            Err(Busy::Other) => pause(&mut looks),
        }
    }
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

impl Drop for Held {
    #[inline]
    fn drop(&mut self) {
        if let Some(stripe) = self.stripe {
            // Release pairs with the acquire of the next holder.
            stripe.0.store(0, Release);
        }
    }
}

/// A bit for each stripe that a fork has taken.
static FORKING: AtomicU64 = AtomicU64::new(0);

/// Takes every stripe for a fork: no fold and no gate is then under way in the child. A stripe of the very frame that the
/// forking signal handler interrupted stays with that frame, which goes on in both processes.
pub(super) fn fork_prepare() {
    let mut taken = 0;
    for at in 0..STRIPES {
        let held = hold(at * super::shards::SIZE);
        taken |= u64::from(held.stripe.is_some()) << at;
        core::mem::forget(held);
    }
    FORKING.store(taken, Relaxed);
}

/// Gives back what [`fork_prepare`] took, on either side.
pub(super) fn fork_done() {
    let taken = FORKING.swap(0, Relaxed);
    for (at, stripe) in ALL.iter().enumerate() {
        if taken & 1 << at != 0 {
            // Release pairs with the acquire of the next holder.
            stripe.0.store(0, Release);
        }
    }
}
