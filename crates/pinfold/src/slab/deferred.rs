//! Deferred frees: objects that readers may still use are collected in sheaves, and the sheaves
//! wait for a grace period.
//!
//! ```text
//!  free_deferred ──► CPU's deferred sheaf ──► sealed ──► pending ── a grace period ──► barn
//!                         no lock            one CAS    its lock                    node's lock
//! ```
//!
//! A sheaf of deferred objects passes through these places:
//!
//! 1. **The deferred sheaf.** Each CPU's unit has one, beside the main and the spare sheaf. The
//!    critical section of `free` fills it. Nothing pops from it. It is sealed when it is full, or
//!    when it has not changed for some of the shepherd's ticks.
//! 2. **The sealed list.** Its sheaves are linked through their blocks. Any thread or signal
//!    handler may add a sheaf, by one compare-exchange. Only the holder of `pending` takes sheaves
//!    off, all at once.
//! 3. **Pending.** These sheaves wait for one grace period. Its ticket is drawn after the sheaves
//!    were taken off the sealed list, and so after the last of their objects went out of sight.
//! 4. **In hand.** A thread that seals a sheaf, and the shepherd at each tick, take some sheaves
//!    whose grace period is over, and free them without the lock. A full sheaf goes to the barn
//!    whole.
//!
//! A sheaf is in exactly one place at every moment. A deferred free costs one critical section, and
//! one 125th of the work on a full sheaf.
//!
//! Only threads that wait for deferred frees wait for the lock of `pending`; all others try it, and
//! leave the work to the next thread if they fail. Slow paths that seal a sheaf advance the grace
//! period by a step, and so does the shepherd.

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

/// A grace period is advanced once in this many seals, because each step may cost a fence, and a
/// sheaf holds at most 125 objects.
const SEALS_A_STEP: u32 = 4;
/// Number of waiting sheaves that a thread frees when it seals one. More than one, so that freeing
/// keeps up with sealing. Few, so that no deferred free takes long.
const FREED_A_SEAL: usize = 4;
/// A free without memory for a sheaf checks this often whether its readers have left, and sleeps
/// this many microseconds between checks.
const LOOKS: u32 = 100;
pub(super) const BETWEEN_LOOKS: u32 = 100;

/// The part of a cache's state that deferred frees need.
pub(super) struct Deferred {
    /// The word of the sheaf that was sealed last. Slot 0 of each sheaf's block holds the word of
    /// the sheaf sealed before it.
    sealed: AtomicU64,
    pending: Lock<Pending>,
    /// Whether an object was ever deferred.
    used: AtomicBool,
}

struct Pending {
    sheaves: SheafList,
    /// The grace period that the sheaves wait for.
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
    /// The caller has already taken the object out of sight: a reader that enters from now on
    /// cannot find it.
    ///
    /// Costs as much as [`free`](Self::free), and a fence for every few hundred objects. Does not
    /// wait, so readers and signal handlers may call it. There is one exception: if the system has
    /// no memory for a sheaf, the call checks a hundred times, for about 20 ms in all, whether the
    /// readers have left. If they stay, the object is lost, and [`statistics`](Self::statistics)
    /// counts it.
    ///
    /// A cache that checks examines the object when it becomes free. That may happen in another
    /// thread, and a report names that thread.
    ///
    /// Later deferred frees, slow paths and the shepherd free the waiting objects.
    ///
    /// # Safety
    ///
    /// The object came from this cache, and is freed only once. Only readers that entered before
    /// the call still use it.
    #[doc(alias = "kfree_rcu")]
    #[inline]
    pub unsafe fn free_deferred(&self, object: NonNull<u8>) {
        let offset = self.descriptor.main() + DEFERRED;
        // SAFETY: every unit has a word for this cache's deferred sheaf at this offset. The caller
        // gave the object up.
        if !unsafe { UNITS.push(offset, object.as_ptr()) } {
            // SAFETY: the caller promises that the object is of this cache and out of sight, and
            // gives it up.
            unsafe { self.descriptor.defer_slow(object.as_ptr()) };
        }
    }

    /// Waits until every object that was deferred to this cache before the call is free.
    ///
    /// Waits for the readers that are inside now. Interrupts the CPUs that run threads of this
    /// process, once or twice, unless nothing was ever deferred to this cache. A reader must not
    /// call this, because it would wait for itself; nor must a signal handler.
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
        // A cache that checks took the deferred objects back one by one, so they are in a CPU's
        // sheaf again.
        if self.descriptor.checks() {
            drain()?;
        }
        Ok(())
    }
}

impl Cache {
    /// Defers an object when the CPU's deferred sheaf has no room: puts it into a new sheaf, and
    /// seals the full one.
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
            // SAFETY: every unit has the deferred sheaf's word at `offset`. Once the word is
            // stored, the unit owns the sheaf.
            word_is_full(word) && unsafe { UNITS.store_if_equal(offset, word, sheaf.word()) }
        };
        // Announces the sheaf while it is in neither the unit nor the sealed list, so that
        // `await_deferred` waits for it.
        let hand = hands::begin(self.slot);
        let old = match load(offset) {
            // SAFETY: the exchange removed the word from the unit, so this thread owns the sheaf.
            Some(word) if exchange(word) => unsafe { Sheaf::from_word(word) },
            // The word changed meanwhile, or there is no unit. The new sheaf is sealed with its one
            // object.
            _ => Some(sheaf),
        };
        if let Some(full) = old {
            static SEALS: AtomicU32 = AtomicU32::new(0);
            self.seal(full);
            drop(hand);
            self.advance(FREED_A_SEAL);
            if SEALS.fetch_add(1, Relaxed) % SEALS_A_STEP == SEALS_A_STEP - 1 {
                // If the fence fails, the sheaves keep waiting.
                let _ = grace::poll();
            }
        }
    }

    /// Returns the CPU's spare sheaf, after its objects went back to their slabs. The last resort
    /// for a sheaf: there is no memory for a new one, or the interrupted frame holds the locks on
    /// the way to one.
    fn emptied_spare(&self) -> Option<Sheaf> {
        let mut sheaf = self.take_spare()?;
        let node = self.here();
        self.send_home(node, &mut sheaf);
        // SAFETY: the objects in a sheaf are free, this thread owns the sheaf, and `send_home` left
        // only this node's objects in it.
        unsafe { node.give_objects(self, sheaf.objects()) };
        sheaf.set_len(0);
        Some(sheaf)
    }

    /// Puts a sheaf of deferred objects on the sealed list.
    pub(super) fn seal(&self, sheaf: Sheaf) {
        self.here().count(SlabEvent::FreeRcuSheaf, sheaf.len());
        let mut next = self.deferred.sealed.load(Relaxed);
        loop {
            // SAFETY: this thread owns the sheaf, and slot 0 of its block is for links.
            unsafe { *sheaf.below() = next };
            // Release pairs with the acquire in `take_sealed`: the thread that takes the sheaf sees
            // its objects and its link, and that the objects are out of sight.
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

    /// Frees up to `most` sheaves whose grace period is over, and lets the sealed sheaves wait for
    /// the next one. Does nothing if another thread holds the lock of `pending`.
    fn advance(&self, most: usize) {
        if let Some(pending) = self.deferred.pending.try_lock() {
            self.advance_held(pending, most);
        }
    }

    /// Does the work of `advance`. Frees the sheaves after it has dropped the lock, so that several
    /// threads can free at once.
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
        // SAFETY: `swap` took the whole list, so this thread owns every sheaf that is linked in it.
        while let Some(sheaf) = unsafe { Sheaf::from_word(word) } {
            // SAFETY: this thread owns the sheaf, and `seal` stored a link in slot 0 of its block.
            word = unsafe { *sheaf.below() };
            pending.sheaves.put(sheaf);
        }
        // Drawn only now, when all the objects have been out of sight since before they were
        // sealed.
        pending.ticket = grace::ticket();
    }

    /// Gives back a sheaf that no reader uses any more. It goes past the CPUs' units, which the
    /// caller may have drained: a thread that waits for these objects wants them back at their
    /// node.
    fn give_back(&self, mut sheaf: Sheaf) {
        let objects = sheaf.objects();
        if let Some(hardening) = &self.hardening {
            // SAFETY: the users gave the objects up when they deferred them, and the grace period
            // is over.
            let kept = unsafe { self.scrub(hardening, objects) };
            sheaf.set_len(kept);
        } else if let Some(plan) = self.plan() {
            for &mut object in objects {
                // SAFETY: the users gave the objects up when they deferred them, and the grace
                // period is over.
                unsafe { self.free_debugged(plan, object) };
            }
            sheaf.set_len(0);
        }
        self.put(self.here(), sheaf);
    }

    /// Frees an object for which there is no sheaf: checks for a while whether the readers have
    /// left. If they stay, or the caller is one of them, the object is lost and counted.
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

    /// Waits until everything that had left the CPUs' units before the call is free. Waits for
    /// readers, and for other threads that have sheaves in hand.
    pub(super) fn await_deferred(&self) -> Result<(), FenceError> {
        // When this returns, the sheaves that were on their way out of the units are sealed.
        hands::await_others(self.slot);
        // The first turn waits for the pending sheaves, the second one for those that were sealed
        // by then. Sheaves that are sealed later do not matter to this call.
        for _ in 0..2 {
            // `None` if nothing waits, or if this is a signal handler that interrupted the lock's
            // holder.
            let Some(ticket) = self.free_ready() else {
                break;
            };
            grace::wait(ticket)?;
        }
        self.free_ready();
        hands::await_others(self.slot);
        Ok(())
    }

    /// Frees all sheaves whose grace period is over. Returns the ticket of those that still wait,
    /// if there are any.
    fn free_ready(&self) -> Option<u64> {
        self.advance_held(self.deferred.pending.lock()?, usize::MAX);
        let pending = self.deferred.pending.lock()?;
        (pending.sheaves.length > 0).then_some(pending.ticket)
    }
}

/// The shepherd's part: makes one step of the grace period if a sheaf of any cache waits, and frees
/// what has waited long enough.
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
    // If the fence fails, the sheaves keep waiting.
    let _ = grace::poll();
    advance_all();
}

pub(super) fn lock_for_fork(cache: &Cache) {
    cache.deferred.pending.lock_for_fork();
}

pub(super) fn unlock_after_fork(cache: &Cache) {
    cache.deferred.pending.unlock_after_fork();
}
