//! Deferred frees: objects that somebody may still look at, in sheaves that wait for a grace period.
//!
//! ```text
//!  free_deferred ──► CPU's third sheaf ──► sealed ──► pending ─── a grace period ───► barn
//!                      no lock            one CAS    its lock                      node's lock
//! ```
//!
//! * A CPU's **deferred sheaf** stands in its unit beside the main one and the spare, and is filled by the same critical section as the main
//!   one. Nobody pops from it. When it is full, or has stood still for some of the shepherd's ticks, it is sealed.
//! * **Sealed** sheaves are in a list linked through their blocks, which anybody, also a handler, puts a sheaf on; only who holds
//!   `pending` takes them off, all at once.
//! * **Pending** sheaves wait for the grace period whose ticket was drawn after they were taken off the list: after every object in them was
//!   out of sight. When it is over they go to the barn as they are, full sheaves of free objects.
//!
//! * Whoever seals a sheaf, or ticks, takes some of those that have waited **in hand**, and frees them without the lock.
//!
//! So a sheaf is in one place at every moment, and what it costs to free one of its objects is the critical section, plus a
//! 125th part of the rest. `pending` is only tried, but by those who want to wait. Slow paths that seal make the steps of grace periods,
//! and so does the shepherd; whoever is refused leaves the work to the next.

use super::cache::{self, Cache};
use super::percpu::{self, DEFERRED, UNITS, load};
use super::sheaf::{Sheaf, SheafList, word_is_full};
use super::{KmemCache, grace, hands};
use crate::lock::{Guard, Lock};
use crate::segment::SlabEvent;
use crate::sys;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use pinfold_rseq::FenceError;

/// Sheaves that are sealed before a grace period is moved on: a fence for each would be one for 125 objects at best.
const SEALS_A_STEP: u32 = 4;
/// Sheaves that whoever seals one frees of those that have waited: more than come in, so that however slow freeing is, it keeps up; and
/// so few that no deferred free takes long.
const FREED_A_SEAL: usize = 4;
/// How often, and every how many microseconds, a free without memory looks whether its readers have gone.
const LOOKS: u32 = 100;
pub(super) const BETWEEN_LOOKS: u32 = 100;

/// A cache's part.
pub(super) struct Deferred {
    /// The word of the sheaf sealed last; each block's first slot has the word of the one before.
    sealed: AtomicU64,
    pending: Lock<Pending>,
    /// Whether anything was ever deferred.
    used: AtomicBool,
}

struct Pending {
    sheaves: SheafList,
    /// The grace period that they wait for.
    ticket: u64,
}

/// Whether any cache was ever used so.
static ANY_USED: AtomicBool = AtomicBool::new(false);

impl Deferred {
    pub(super) const fn new() -> Deferred {
        Deferred {
            sealed: AtomicU64::new(0),
            pending: Lock::new(Pending {
                sheaves: SheafList::new(),
                ticket: 0,
            }),
            used: AtomicBool::new(false),
        }
    }

    pub(super) fn is_used(&self) -> bool {
        self.used.load(Relaxed)
    }
}

impl KmemCache {
    /// Takes an object back that readers may still look at: it is free when every [reader](grace::enter) of this moment has
    /// left. The caller has taken it out of sight: readers that enter from now on do not find it.
    ///
    /// Costs as [`free`](Self::free) does; each few hundred objects a fence. It waits for nobody, also in readers and signal handlers, but
    /// where the system has no memory for a list of what waits: then it looks a hundred times for readers, some 20 ms in all, and when
    /// these stay, the object is lost, which [`statistics`](Self::statistics) count.
    ///
    /// A cache that checks looks at the object when it becomes free, in whatever thread that happens: a report names that one.
    ///
    /// What waits is freed in passing, by other deferred frees, by slow paths, and by the shepherd.
    ///
    /// # Safety
    ///
    /// The object came from this cache, nobody frees it again, and nobody uses it but readers that had entered before.
    #[doc(alias = "kfree_rcu")]
    #[inline]
    pub unsafe fn free_deferred(&self, object: NonNull<u8>) {
        let offset = self.descriptor.main() + DEFERRED;
        // SAFETY: the offset is the cache's place in the units; the object is given up.
        if !unsafe { UNITS.push(offset, object.as_ptr()) } {
            // SAFETY: the caller's promise.
            unsafe { self.descriptor.defer_slow(object.as_ptr()) };
        }
    }

    /// Returns when everything freed deferred to this cache before the call is free.
    ///
    /// Waits for the readers of this moment; interrupts the CPUs that run threads of this process, once or twice, unless nothing was ever
    /// freed so. Not for readers, who would wait for themselves, nor for signal handlers.
    ///
    /// # Errors
    ///
    /// [`FenceError`] when the kernel cannot fence; what waits goes on waiting.
    #[doc(alias = "kvfree_rcu_barrier")]
    pub fn flush_deferred(&self) -> Result<(), FenceError> {
        if !self.descriptor.deferred.is_used() {
            return Ok(());
        }
        self.drain()
    }

    /// Takes what CPUs have of this cache, and waits for the readers of what is deferred.
    pub(super) fn drain(&self) -> Result<(), FenceError> {
        let drain = || percpu::drain(|cache| core::ptr::eq(cache, self.descriptor));
        drain()?;
        if !self.descriptor.deferred.is_used() {
            return Ok(());
        }
        self.descriptor.await_deferred()?;
        // What a cache that checks has taken back one by one is in a CPU's sheaf again.
        if self.descriptor.checks() {
            drain()?;
        }
        Ok(())
    }
}

impl Cache {
    /// Puts an object into the CPU's deferred sheaf when there was no room: into a new one, and seals the full one.
    ///
    /// # Safety
    ///
    /// `object` is the caller's, from this cache, and out of sight.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn defer_slow(&self, object: *mut u8) {
        self.deferred.used.store(true, Relaxed);
        ANY_USED.store(true, Relaxed);
        let node = self.here();
        let fresh = node.empty_sheaf(self);
        let fresh = fresh
            .or_else(|| Sheaf::new(self.capacity()))
            .or_else(|| self.emptied_spare());
        let Some(mut sheaf) = fresh else {
            return self.free_when_unseen(object);
        };
        sheaf.push(object);
        let offset = self.main() + DEFERRED;
        let exchange = |word: u64| {
            // SAFETY: the offset lies in the unit; the sheaf is the unit's once it is stored.
            word_is_full(word) && unsafe { UNITS.store_if_equal(offset, word, sheaf.word()) }
        };
        // Until it is sealed nobody would find it.
        let hand = hands::begin(self.slot);
        let old = match load(offset) {
            // SAFETY: taken out by the exchange.
            Some(word) if exchange(word) => unsafe { Sheaf::from_word(word) },
            // Somebody was faster, or there is no unit: one object waits in a sheaf of its own.
            _ => Some(sheaf),
        };
        if let Some(full) = old {
            static SEALS: AtomicU32 = AtomicU32::new(0);
            self.seal(full);
            drop(hand);
            self.advance(FREED_A_SEAL);
            if SEALS.fetch_add(1, Relaxed) % SEALS_A_STEP == SEALS_A_STEP - 1 {
                // Without a fence it waits on.
                let _ = grace::poll();
            }
        }
    }

    /// The CPU's spare sheaf, its objects given to their slabs: what is left when there is no memory, or when the locks on the way
    /// to it are the interrupted frame's.
    fn emptied_spare(&self) -> Option<Sheaf> {
        let mut sheaf = self.take_spare()?;
        let node = self.here();
        self.send_home(node, &mut sheaf);
        // SAFETY: objects in a sheaf were freed by their owners; those left are the node's.
        unsafe { node.give_objects(self, sheaf.objects()) };
        sheaf.set_len(0);
        Some(sheaf)
    }

    /// Puts a sheaf of deferred objects where it waits.
    pub(super) fn seal(&self, sheaf: Sheaf) {
        self.here().count(SlabEvent::FreeRcuSheaf, sheaf.len());
        let mut next = self.deferred.sealed.load(Relaxed);
        loop {
            // SAFETY: slot 0 is the block's link, and the sheaf is ours.
            unsafe { *sheaf.below() = next };
            // Release pairs with the acquire in `take_sealed`: the objects and the link are seen, and that they are out of sight.
            let put =
                self.deferred
                    .sealed
                    .compare_exchange_weak(next, sheaf.word(), Release, Relaxed);
            match put {
                Ok(_) => return,
                Err(other) => next = other,
            }
        }
    }

    /// Frees up to `most` sheaves that have waited long enough, and has what was sealed since wait, unless somebody is at the list. No
    /// waiting.
    fn advance(&self, most: usize) {
        if let Some(pending) = self.deferred.pending.try_lock() {
            self.advance_held(pending, most);
        }
    }

    /// The freeing itself goes on without the lock, so that others take part in it.
    fn advance_held(&self, mut pending: Guard<'_, Pending>, most: usize) {
        let mut ready = SheafList::new();
        if grace::passed(pending.ticket) {
            while ready.length < most
                && let Some(sheaf) = pending.sheaves.take()
            {
                ready.put(sheaf);
            }
        }
        if pending.sheaves.length == 0 {
            self.take_sealed(&mut pending);
        }
        let _hand = (ready.length > 0).then(|| hands::begin(self.slot));
        drop(pending);
        while let Some(sheaf) = ready.take() {
            self.give_back(sheaf);
        }
    }

    fn take_sealed(&self, pending: &mut Pending) {
        let mut word = self.deferred.sealed.swap(0, Acquire);
        if word == 0 {
            return;
        }
        // SAFETY: taken off the list with all that are linked behind it.
        while let Some(sheaf) = unsafe { Sheaf::from_word(word) } {
            // SAFETY: the block's link, set by `seal`.
            word = unsafe { *sheaf.below() };
            pending.sheaves.put(sheaf);
        }
        // Only now: every object's unlinking is behind it.
        pending.ticket = grace::ticket();
    }

    /// Nobody looks at the sheaf's objects any more. They do not go through the units' words, which were drained perhaps: who
    /// waits for them wants them back with their node.
    fn give_back(&self, mut sheaf: Sheaf) {
        let objects = sheaf.objects();
        if let Some(hardening) = &self.hardening {
            // SAFETY: who freed them deferred gave them up.
            let kept = unsafe { self.scrub(hardening, objects) };
            sheaf.set_len(kept);
        } else if let Some(plan) = self.plan() {
            for &mut object in objects {
                // SAFETY: as above.
                unsafe { self.free_debugged(plan, object) };
            }
            sheaf.set_len(0);
        }
        self.put(self.here(), sheaf);
    }

    /// The way without memory for a sheaf: looks for a while whether the readers go. When they do not, or they are the caller
    /// itself, the object is lost, and counted.
    fn free_when_unseen(&self, object: *mut u8) {
        let ticket = grace::ticket();
        for _ in 0..LOOKS {
            if grace::poll().is_err() {
                break;
            }
            if grace::passed(ticket) {
                // SAFETY: the object was given up, and nobody looks at it.
                return unsafe { self.free_slow(object) };
            }
            sys::sleep_microseconds(BETWEEN_LOOKS);
        }
        self.here().count(SlabEvent::FreeRcuSheafFail, 1);
    }

    /// Returns when everything that had left the CPUs' units before the call is free; waits for readers, and for other threads that have
    /// sheaves in hand.
    pub(super) fn await_deferred(&self) -> Result<(), FenceError> {
        // Sealed when they are through.
        hands::await_others(self.slot);
        // What is pending first, then what is sealed by then. What others seal meanwhile is their affair.
        for _ in 0..2 {
            // None: a handler that interrupted the holder.
            let Some(ticket) = self.free_ready() else {
                break;
            };
            grace::wait(ticket)?;
        }
        self.free_ready();
        hands::await_others(self.slot);
        Ok(())
    }

    /// Frees all that have waited long enough; the ticket of those that have not, if there are any.
    fn free_ready(&self) -> Option<u64> {
        self.advance_held(self.deferred.pending.lock()?, usize::MAX);
        let pending = self.deferred.pending.lock()?;
        (pending.sheaves.length > 0).then_some(pending.ticket)
    }
}

/// What the shepherd does for all caches: one step of a grace period if anything waits, and what follows from it.
pub(super) fn progress() {
    if !ANY_USED.load(Relaxed) {
        return;
    }
    let advance_all = || {
        cache::for_each(|cache| {
            if cache.deferred.is_used() {
                cache.advance(usize::MAX);
            }
        });
    };
    advance_all();
    // Without a fence it waits on.
    let _ = grace::poll();
    advance_all();
}

pub(super) fn lock_for_fork(cache: &Cache) {
    cache.deferred.pending.lock_for_fork();
}

pub(super) fn unlock_after_fork(cache: &Cache) {
    cache.deferred.pending.unlock_after_fork();
}
