//! Deferred frees: frees of objects that other threads may still read. A thread that may read them
//! is a *reader* ([`grace`]). The objects are collected in sheaves, and each sheaf waits until all
//! readers that could know its objects have left: for a *grace period*.
//!
//! ```text
//!  free_deferred ──► CPU's deferred sheaf ──► sealed ──► pending ── a grace period ──► barn
//!                         no lock            one CAS    its lock                    node's lock
//! ```
//!
//! A sheaf of deferred objects passes through these places:
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
//! At every moment, a sheaf is in exactly one of these places. A deferred free costs one critical
//! section, and with sheaves of 125 objects one 125th of the work on a full sheaf.
//!
//! Only a thread that waits for deferred frees waits for the lock `pending`. Every other thread
//! tries it once, and leaves the work to a later thread if that fails. The shepherd advances the
//! grace period by one step at each tick. Every fourth slow path that seals a sheaf does so too.

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

/// Slow paths advance the grace period once in this many seals. Not at every seal, because each
/// step may cost a fence, and a sheaf has at most 125 objects to share that cost.
const SEALS_A_STEP: u32 = 4;
/// The largest number of pending sheaves that a thread frees when it seals one. More than one, so
/// that freeing keeps up with sealing. Few, so that no deferred free takes long.
const FREED_A_SEAL: usize = 4;
/// If there is no memory for a sheaf, a deferred free checks at most this many times whether the
/// readers have left. It sleeps `BETWEEN_LOOKS` microseconds between two checks.
const LOOKS: u32 = 100;
pub(super) const BETWEEN_LOOKS: u32 = 100;

/// A cache's state of deferred frees.
pub(super) struct Deferred {
    /// The head of the sealed list: the word of the sheaf that was sealed last. Slot 0 of each
    /// sheaf's block holds the word of the sheaf that was sealed before it.
    sealed: AtomicU64,
    pending: Lock<Pending>,
    /// Whether an object was ever deferred.
    used: AtomicBool,
}

struct Pending {
    sheaves: SheafList,
    /// The number of the grace period that the sheaves wait for.
    ticket: u64,
}

/// Whether an object of any cache was ever deferred.
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
    /// Frees an object once every [reader](grace::enter) that is inside now has left.
    ///
    /// Before the call, the caller takes the object out of sight, so that a reader that enters from
    /// now on cannot find it.
    ///
    /// Costs as much as [`free`](Self::free), and a fence for every few hundred objects. Usually
    /// does not wait, so that readers and signal handlers may call this function. There is one
    /// exception. If the system has no memory for a sheaf, the call checks a hundred
    /// times, for about 20 ms in all, whether the readers have left. If they stay, the object is
    /// lost, and [`statistics`](Self::statistics) counts the loss.
    ///
    /// A debugged or hardened cache checks the object when it becomes free. That may happen in
    /// another thread, and a report then names that thread.
    ///
    /// Later deferred frees, slow paths and the shepherd free the waiting objects.
    ///
    /// # Safety
    ///
    /// The object came from this cache, and the caller frees it only once. Only readers that
    /// entered before the call still use it.
    #[doc(alias = "kfree_rcu")]
    #[inline]
    pub unsafe fn free_deferred(&self, object: NonNull<u8>) {
        let offset = self.descriptor.main() + DEFERRED;
        // SAFETY: every unit has a word for this cache's deferred sheaf at this offset. The caller
        // gives the object up.
        if !unsafe { UNITS.push(offset, object.as_ptr()) } {
            // SAFETY: the caller promises that the object is of this cache and out of sight, and
            // gives it up.
            unsafe { self.descriptor.defer_slow(object.as_ptr()) };
        }
    }

    /// Waits until every object that was deferred to this cache before the call is free.
    ///
    /// Does nothing if no object was ever deferred to this cache. Otherwise waits until the readers
    /// that are inside now have left. Interrupts each CPU that runs a thread of this process a few
    /// times. While readers stay, interrupts these CPUs up to about a thousand times a second. A
    /// reader must not call this, because it would wait for itself. A signal handler must not call
    /// this either.
    ///
    /// # Errors
    ///
    /// [`FenceError`] when the kernel cannot fence. The objects then keep waiting.
    #[doc(alias = "kvfree_rcu_barrier")]
    pub fn flush_deferred(&self) -> Result<(), FenceError> {
        if !self.descriptor.deferred.is_used() {
            return Ok(());
        }
        self.drain()
    }

    /// Takes this cache's sheaves from all CPUs, and waits for the readers of its deferred objects.
    pub(super) fn drain(&self) -> Result<(), FenceError> {
        let drain = || percpu::drain(|cache| core::ptr::eq(cache, self.descriptor));
        drain()?;
        if !self.descriptor.deferred.is_used() {
            return Ok(());
        }
        self.descriptor.await_deferred()?;
        // When a cache that checks frees deferred objects, it may call the program's report
        // handler. That handler may have freed objects into a CPU's sheaf of this cache.
        if self.descriptor.checks() {
            drain()?;
        }
        Ok(())
    }
}

impl Cache {
    /// Defers an object when the CPU's deferred sheaf has no room. Puts the object into a new
    /// sheaf, and seals the full one.
    ///
    /// # Safety
    ///
    /// The caller owns `object`, which is of this cache and out of sight, and gives it up.
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
            // SAFETY: every unit has the deferred sheaf's word at `offset`. This thread owns
            // `sheaf`, and does not use it after a successful store.
            word_is_full(word) && unsafe { UNITS.store_if_equal(offset, word, sheaf.word()) }
        };
        // From here until it is sealed, the sheaf may be in no unit and on no list. The entry lets
        // `await_deferred` know of the sheaf meanwhile.
        let hand = hands::begin(self.slot);
        let old = match load(offset) {
            // SAFETY: `exchange` removed the word from the unit, so this thread owns the sheaf.
            Some(word) if exchange(word) => unsafe { Sheaf::from_word(word) },
            // Another operation has changed the word meanwhile, or there is no unit. So this thread
            // seals the new sheaf, with its one object.
            _ => Some(sheaf),
        };
        if let Some(full) = old {
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

    /// Takes the CPU's spare sheaf, if there is one, gives its objects to their slabs, and returns
    /// it. The last resort: there is no memory for a new sheaf, or this is a signal handler that
    /// interrupted the holder of a lock that it needs for one.
    fn emptied_spare(&self) -> Option<Sheaf> {
        let mut sheaf = self.take_spare()?;
        let node = self.here();
        self.send_home(node, &mut sheaf);
        // SAFETY: `take_spare` gave the sheaf and its free objects to this thread. `send_home` left
        // only this node's objects in the sheaf.
        unsafe { node.give_objects(self, sheaf.objects()) };
        sheaf.set_len(0);
        Some(sheaf)
    }

    /// Puts a sheaf of deferred objects on the sealed list.
    pub(super) fn seal(&self, sheaf: Sheaf) {
        self.here().count(SlabEvent::FreeRcuSheaf, sheaf.len());
        let mut next = self.deferred.sealed.load(Relaxed);
        loop {
            // SAFETY: this value owns the sheaf's block, and slot 0 of a block is for links.
            unsafe { *sheaf.below() = next };
            // Release pairs with the acquire in `take_sealed`: the thread that takes the sheaf sees
            // its objects, its link, and the stores that took the objects out of sight.
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
        // SAFETY: `swap` took the whole list, so this thread owns every sheaf in it.
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
        if let Some(hardening) = &self.hardening {
            // SAFETY: the callers of `free_deferred` gave the objects up, and the grace period is
            // over.
            let kept = unsafe { self.scrub(hardening, objects) };
            sheaf.set_len(kept);
        } else if let Some(plan) = self.plan() {
            for &mut object in objects {
                // SAFETY: the callers of `free_deferred` gave the objects up, and the grace period
                // is over.
                unsafe { self.free_debugged(plan, object) };
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
                // SAFETY: the caller of `free_deferred` gave the object up, and the grace period is
                // over.
                return unsafe { self.free_slow(object) };
            }
            sys::sleep_microseconds(BETWEEN_LOOKS);
        }
        self.here().count(SlabEvent::FreeRcuSheafFail, 1);
    }

    /// Waits until all deferred objects that were in no CPU's unit at the call are free. Waits for
    /// readers, and for other threads that have sheaves in hand.
    pub(super) fn await_deferred(&self) -> Result<(), FenceError> {
        // When this returns, other threads have sealed the sheaves that they had taken out of the
        // units.
        hands::await_others(self.slot);
        // The first turn waits for the sheaves that are pending now. The second turn waits for
        // those that are on the sealed list now, and become pending after the first turn. Sheaves
        // that are sealed later do not matter to this call.
        for _ in 0..2 {
            // `free_ready` returns `None` if no sheaf waits, or in a signal handler that
            // interrupted the holder of the lock `pending`.
            let Some(ticket) = self.free_ready() else {
                break;
            };
            grace::wait(ticket)?;
        }
        self.free_ready();
        hands::await_others(self.slot);
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
    // If the fence fails, the sheaves keep waiting for a later step.
    let _ = grace::poll();
    advance_all();
}

pub(super) fn lock_for_fork(cache: &Cache) {
    cache.deferred.pending.lock_for_fork();
}

pub(super) fn unlock_after_fork(cache: &Cache) {
    cache.deferred.pending.unlock_after_fork();
}
