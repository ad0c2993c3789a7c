//! Deferred frees: frees of objects that other threads may still read. A thread that may read them
//! is a *reader* ([`grace`]). The objects are collected in sheaves, and each sheaf waits until all
//! readers that could know its objects have left: for a *grace period*.
//!
//! ```text
//!  free_deferred ──► CPU's deferred sheaf ──► sealed ──► pending ── a grace period ──► barn
//!                         no lock            one CAS    its lock                    node's lock
//! ```
//!
//! A sheaf of deferred objects passes through these states:
//!
//! 1. **The deferred sheaf.** Each CPU's unit has one, beside the main and the spare sheaf. A
//!    deferred free pushes the object on it, by the same critical section as `free`. Nothing pops
//!    from it. It is sealed, which means put on the sealed list, when it is full, or when it has
//!    been idle for a while (`idle`).
//! 2. **The sealed list.** Its sheaves are linked through their blocks. Any thread or signal
//!    handler may add a sheaf, by one compare-exchange. Only the holder of the cache's lock
//!    `pending` takes sheaves off, all at once.
//! 3. **Pending.** These sheaves wait for one grace period. Its number is called a *ticket*. The
//!    thread that took the sheaves off the sealed list draws the ticket afterwards. By then, all
//!    objects of the sheaves are out of sight: later readers cannot find them.
//! 4. **In hand.** A thread that seals a sheaf, and the shepherd (the library's background thread)
//!    at each tick, take some sheaves whose grace period is over, and free their objects without
//!    holding `pending`. A full sheaf goes to the barn whole.
//!
//! At every moment, a sheaf is in exactly one of these states. A deferred free costs one critical
//! section, and with sheaves of 125 objects one 125th of the work on a full sheaf.
//!
//! Only a thread that waits for deferred frees waits for the lock `pending`. Every other thread
//! tries it once, and leaves the work to a later thread if that fails. The shepherd advances the
//! grace period by one step at each tick. Every fourth slow path that seals a sheaf does so too.

use super::in_flight;
use super::sheaf::{Sheaf, SheafList, word_is_full};
use super::sheaf_units;
use crate::cache_units::DEFERRED;
use crate::fork;
use crate::lock::Guard;
use crate::segment::SlabEvent;
use crate::slab::cache::descriptor::{Descriptor, Pending};
use crate::slab::cache::registry;
use crate::slab::grace;
use crate::sys;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU32};
use pinfold_rseq::FenceError;

/// Slow paths advance the grace period once in this many seals. Not at every seal, because each
/// step may cost a fence, and a sheaf has at most 125 objects to share that cost.
const SEALS_A_STEP: u32 = 4;
/// The largest number of pending sheaves that a thread frees when it seals one. More than one, so
/// that freeing keeps up with sealing. Few, so that no deferred free takes long.
const FREED_A_SEAL: usize = 4;
/// If there is no memory for a sheaf, a deferred free checks at most this many times whether the
/// readers have left. It sleeps `BETWEEN_LOOKS` microseconds between two checks.
const LOOKS: u32 = 100;
const BETWEEN_LOOKS: u32 = 100;

/// Whether an object of any cache was ever deferred.
static ANY_USED: AtomicBool = AtomicBool::new(false);

impl Descriptor {
    /// Takes this cache's sheaves from all CPUs, and waits for the readers of its deferred objects.
    pub(crate) fn drain(&self) -> Result<(), FenceError> {
        let drain = || sheaf_units::drain(|cache| core::ptr::eq(cache, self));
        drain()?;
        if !self.deferred.is_used() {
            return Ok(());
        }
        self.await_deferred()?;
        // When a cache that checks frees deferred objects, it may call the program's report
        // handler. That handler may have freed objects into a CPU's sheaf of this cache.
        if self.checks() {
            drain()?;
        }
        Ok(())
    }

    /// Defers an object when the CPU's deferred sheaf has no room. Puts the object into a new
    /// sheaf, and seals the full one.
    ///
    /// # Safety
    ///
    /// The caller owns `object`, which is of this cache and out of sight, and gives it up.
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn defer_slow(&self, object: *mut u8) {
        self.deferred.used.store(true, Relaxed);
        ANY_USED.store(true, Relaxed);
        let node = self.here();
        let fresh = fork::retry(|| {
            let fresh = node.empty_sheaf(self);
            let fresh = fresh.or_else(|| Sheaf::new(self.capacity()));
            fresh.or_else(|| self.emptied_spare())
        });
        let Some(mut sheaf) = fresh else {
            return self.free_when_unseen(object);
        };
        // SAFETY: the sheaf is empty, and has room for at least one object.
        unsafe { sheaf.push(object) };
        // From here until it is sealed, the sheaf may be in no unit and on no list. Meanwhile, the
        // entry in `in_flight` tells `await_deferred` about the sheaf.
        let hand = in_flight::begin(self.id);
        // If another operation has changed the word since it was loaded, or if there is no unit,
        // this thread seals the new sheaf, with its one object.
        let left = self.place(DEFERRED).exchange(sheaf, word_is_full);
        if let Some(full) = left {
            static SEALS: AtomicU32 = AtomicU32::new(0);
            self.seal(full);
            drop(hand);
            self.advance(FREED_A_SEAL);
            if SEALS.fetch_add(1, Relaxed) % SEALS_A_STEP == SEALS_A_STEP - 1 {
                // If the fence fails, the sheaves keep waiting for a later step.
                let _ = grace::poll();
            }
        }
    }

    /// Takes the CPU's spare sheaf, if there is one, frees or sets aside its objects, and returns
    /// it empty. Used only if no new sheaf can be made: there is no memory, or this signal handler
    /// interrupted the holder of a lock that is needed to make one.
    fn emptied_spare(&self) -> Option<Sheaf> {
        let mut sheaf = self.take_spare()?;
        // SAFETY: `take_spare` gave the sheaf and its free objects to this thread.
        unsafe { self.give_home(sheaf.objects()) };
        sheaf.set_len(0);
        Some(sheaf)
    }

    /// Puts a sheaf of deferred objects on the sealed list.
    pub(crate) fn seal(&self, sheaf: Sheaf) {
        self.here().count(SlabEvent::FreeRcuSheaf, sheaf.len());
        // `add` is a release, so the thread that takes the sheaf also sees its objects, and the
        // stores that took the objects out of sight.
        // SAFETY: this value owns the sheaf's block, and slot 0 of a block is for links.
        let link = |next| unsafe { *sheaf.below() = next };
        self.deferred.sealed.add(sheaf.word(), link);
    }

    /// Frees up to `most` pending sheaves, if their grace period is over. If no sheaf is pending
    /// any more, makes the sealed sheaves pending. Does nothing if the lock `pending` is taken.
    fn advance(&self, most: usize) {
        if let Some(pending) = self.deferred.pending.try_lock() {
            self.advance_held(pending, most);
        }
    }

    /// Does the work of `advance`, for a caller that holds the lock. Frees the sheaves after it has
    /// dropped the lock, so that several threads can free at once.
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
        let _hand = (ready.length > 0).then(|| in_flight::begin(self.id));
        drop(pending);
        while let Some(sheaf) = ready.take() {
            self.give_back(sheaf);
        }
    }

    fn take_sealed(&self, pending: &mut Pending) {
        let mut word = self.deferred.sealed.del_all();
        if word == 0 {
            return;
        }
        // SAFETY: `del_all` took the whole list, so this thread owns every sheaf in it.
        while let Some(sheaf) = unsafe { Sheaf::from_word(word) } {
            // SAFETY: this thread owns the sheaf, and `seal` stored a link in slot 0 of its block.
            word = unsafe { *sheaf.below() };
            pending.sheaves.put(sheaf);
        }
        // The ticket must be drawn after all objects of these sheaves went out of sight. They went
        // out of sight before their sheaves were sealed.
        pending.ticket = grace::ticket();
    }

    /// Frees the objects in a sheaf. No reader uses these objects any more. Puts the sheaf into the
    /// barn, not into a CPU's unit: a thread that waits for these objects may have drained the
    /// units, and wants the objects back at their node.
    fn give_back(&self, mut sheaf: Sheaf) {
        let objects = sheaf.objects();
        self.forget_samples(objects);
        if let Some(hardening) = &self.hardening {
            // SAFETY: the callers of `free_deferred` passed ownership of the objects, and the grace
            // period is over.
            let kept = unsafe { self.scrub(hardening, objects) };
            sheaf.set_len(kept);
        } else if let Some(slot_layout) = self.slot_layout.as_ref() {
            for &mut object in objects {
                // SAFETY: the callers of `free_deferred` passed ownership of the objects, and the
                // grace period is over.
                unsafe { self.free_debugged(slot_layout, object) };
            }
            sheaf.set_len(0);
        }
        self.put(self.here(), sheaf);
    }

    /// Frees an object for which there is no sheaf. Checks for a while whether the readers have
    /// left. If they stay, for example because the caller is one of them, the object is lost and
    /// counted.
    fn free_when_unseen(&self, object: *mut u8) {
        let ticket = grace::ticket();
        for _ in 0..LOOKS {
            if grace::poll().is_err() {
                break;
            }
            if grace::passed(ticket) {
                // SAFETY: the caller of `free_deferred` passed ownership of the object, and the
                // grace period is over.
                return unsafe { self.free_watched(object) };
            }
            sys::sleep_microseconds(BETWEEN_LOOKS);
        }
        self.here().count(SlabEvent::FreeRcuSheafFail, 1);
    }

    /// Waits until all deferred objects that had left the CPUs' units before the call are free.
    /// Waits for readers, and for other threads that have sheaves in hand.
    pub(crate) fn await_deferred(&self) -> Result<(), FenceError> {
        // When this returns, other threads have sealed the sheaves that they had taken out of the
        // units.
        in_flight::await_others(self.id);
        // The first iteration waits for the sheaves that are pending now. The second one waits for
        // those that are on the sealed list now, which become pending after the first. Sheaves that
        // are sealed later do not matter to this call.
        for _ in 0..2 {
            // `free_ready` returns `None` if no sheaf waits, or in a signal handler that may not
            // wait for the lock `pending`.
            let Some(ticket) = self.free_ready() else {
                break;
            };
            grace::wait(ticket)?;
        }
        self.free_ready();
        in_flight::await_others(self.id);
        Ok(())
    }

    /// Frees the pending sheaves if their grace period is over. Returns the ticket of the sheaves
    /// that still wait, if there are any.
    fn free_ready(&self) -> Option<u64> {
        self.advance_held(self.deferred.pending.lock()?, usize::MAX);
        let pending = self.deferred.pending.lock()?;
        (pending.sheaves.length > 0).then_some(pending.ticket)
    }
}

/// Does the shepherd's part: makes one step of the grace period if a sheaf of any cache waits, and
/// frees the pending sheaves whose grace period is over.
pub(crate) fn progress() {
    if !ANY_USED.load(Relaxed) {
        return;
    }
    let advance_all = || {
        registry::for_each(|cache| {
            if cache.deferred.is_used() {
                cache.advance(usize::MAX);
            }
        });
    };
    advance_all();
    // If the fence fails, the sheaves keep waiting for a later step.
    let _ = grace::poll();
    advance_all();
}
