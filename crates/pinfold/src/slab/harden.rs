//! Hardened caches: caches that find faults of the program.
//!
//! A double free and a free to the wrong cache are found at that free. A write after the free is
//! found when the object is allocated again. What a program left in an object is erased when the
//! object is freed.
//!
//! * **Keys.** A free zeroes the object and writes its *key*, a keyed hash of its address
//!   (`key.rs`). An allocation that does not find the key reports a write after the free. A free
//!   that finds the key reports a double free. In a cache with a constructor, a free keeps the
//!   object's bytes, and the key lies behind them. A key is lost when the page of an object that is
//!   free in its slab goes back to the system. So once a cache has given pages back, a free of an
//!   object without a key also asks the slab.
//! * **Addresses.** Each free asks the page map which cache owns the address, and checks that an
//!   object begins there.
//! * **Quarantine.** Frees and allocations use two different sheaves of the CPU. A freed object
//!   passes through the barn, which gives out its oldest full sheaf first and always holds
//!   [`QUARANTINE`] of them back.
//! * **Order.** The objects of a fresh slab are given out in an order that cannot be predicted.
//! * **Guard pages.** The last page of a slab cannot be touched, as long as these pages take no
//!   more than half of the mappings that the kernel allows (`guard.rs`).
//!
//! No object holds a pointer to another, with one exception: the links between objects that were
//! set aside ([`Node::set_aside`](super::node::Node)). Those links are encoded.
//!
//! A hardened cache has no main sheaf, so the fast paths fail on their own. Caches that are not
//! hardened pay nothing.

use super::cache::{Cache, by_slot};
use super::debug::{DebugFlags, Kind, Report, Track, raise};
use super::key::{Hardening, shuffle};
use super::percpu::{self, HELD, SPARE, UNITS, load};
use super::sheaf::{Sheaf, word_is_empty, word_is_full};
use super::slabs::Slab;
use crate::page::{self, Ask};
use crate::segment::SlabEvent;
use core::ptr::null_mut;
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::Relaxed;

/// The environment variable that hardens all caches if its value is 1.
const NAME: &str = "PINFOLD_HARDENED";
/// Number of full sheaves that a barn holds back.
pub(super) const QUARANTINE: usize = 2;

/// Returns whether the environment asks for hardening. Only the value 1 does. Values other than 0
/// and 1 are reported when a program starts, not here.
pub(super) fn wanted() -> bool {
    static ANSWER: AtomicU8 = AtomicU8::new(UNREAD);
    const UNREAD: u8 = 2;
    let answer = ANSWER.load(Relaxed);
    if answer != UNREAD {
        return answer == 1;
    }
    let mut buffer = [0; 2];
    let answer = pinfold_rseq::env::read(NAME, &mut buffer) == Some(b"1");
    ANSWER.store(u8::from(answer), Relaxed);
    answer
}

impl Cache {
    /// Gives keys to objects that were just taken from their slabs. Reports and drops the objects
    /// that were written to while they were free. Moves the rest to the slice's beginning and
    /// returns their number.
    pub(super) fn arm(&self, hardening: &Hardening, objects: &mut [*mut u8]) -> usize {
        shuffle(objects);
        let mut kept = 0;
        for at in 0..objects.len() {
            let object = objects[at];
            // SAFETY: the caller took the objects from their slabs, so this thread owns them.
            if unsafe { hardening.arm(object) } {
                objects[kept] = object;
                kept += 1;
            } else {
                self.accuse(object, Kind::WrittenAfterFree, None);
            }
        }
        kept
    }

    /// Returns whether the cache is debugged or hardened.
    #[inline]
    pub(super) fn checks(&self) -> bool {
        self.hardening.is_some() || self.plan().is_some()
    }

    /// Allocates an object from a cache that checks. Returns null when the system has no memory.
    #[cold]
    #[inline(never)]
    pub(super) fn alloc_checked(&self) -> *mut u8 {
        if let Some(hardening) = &self.hardening {
            return self.alloc_hardened(hardening);
        }
        let debugged = |plan| self.alloc_debugged_here(plan, usize::MAX);
        self.plan().map_or(null_mut(), debugged)
    }

    /// Frees an object of a cache that checks.
    ///
    /// # Safety
    ///
    /// If `object` is an object in use, the caller owns it and gives it up. Any other address is
    /// reported.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn free_checked(&self, object: *mut u8) {
        if let Some(hardening) = &self.hardening {
            // SAFETY: the caller gives the object up, and `free_hardened` checks the address.
            return unsafe { self.free_hardened(hardening, object) };
        }
        self.here().count(SlabEvent::FreeLockless, 1);
        percpu::tick();
        if let Some(plan) = self.plan() {
            // SAFETY: the caller gives the object up, and `free_debugged` checks the address.
            unsafe { self.free_debugged(plan, object) };
        }
    }

    /// Makes an object ready for a memory pool's reserve, as [`free`](super::KmemCache::free) makes
    /// it ready for the cache. Returns false and does nothing when the object is not this cache's,
    /// or is free.
    ///
    /// # Safety
    ///
    /// The caller owns the object, if it is an object of this cache.
    #[cold]
    pub(super) unsafe fn enter_reserve(&self, object: *mut u8) -> bool {
        match &self.hardening {
            Some(hardening) => {
                // SAFETY: `objection` found that an object of this cache begins here, and the
                // caller owns it.
                self.objection(object).is_none() && unsafe { hardening.scrub(object) }
            }
            // To a debugged cache, an object in a reserve is in use, and its red zones are checked.
            None => page::entry(object as usize) == self.slot,
        }
    }

    /// Makes an object of a reserve ready for its user. Returns false and reports a fault when the
    /// object was written to in the reserve.
    ///
    /// # Safety
    ///
    /// The caller took the object, which is of this cache, out of a reserve.
    #[cold]
    pub(super) unsafe fn leave_reserve(&self, object: *mut u8) -> bool {
        // An object that came to the reserve straight from the cache has no key; `release` accepts
        // that.
        // SAFETY: the caller took the object out of the reserve, so this thread owns it.
        let written_to = |hardening: &Hardening| unsafe { !hardening.release(object) };
        let wrong = self.hardening.as_ref().is_some_and(written_to);
        if wrong {
            // The stray writer may write again, so the object is never used again.
            self.accuse(object, Kind::WrittenAfterFree, None);
        }
        !wrong
    }

    /// Allocates an object of a hardened cache. Returns null when the system has no memory.
    #[inline(always)]
    fn alloc_hardened(&self, hardening: &Hardening) -> *mut u8 {
        // SAFETY: every unit has a word for this cache's spare sheaf at this offset.
        let object = unsafe { UNITS.pop_fast(self.main() + SPARE) };
        // SAFETY: `pop_fast` took the object off the sheaf, so this thread owns it.
        if !object.is_null() && unsafe { hardening.disarm(object) } {
            return object;
        }
        self.alloc_hardened_slow(hardening, object)
    }

    /// Allocates when the sheaf gave no object (`object` is null), or one that was written to.
    #[cold]
    #[inline(never)]
    fn alloc_hardened_slow(&self, hardening: &Hardening, mut object: *mut u8) -> *mut u8 {
        loop {
            if !object.is_null() {
                // The stray writer may write again, so the object is never used again.
                self.accuse(object, Kind::WrittenAfterFree, None);
            }
            // On the atomic backend, this is the common path.
            // SAFETY: every unit has a word for this cache's spare sheaf at this offset.
            object = unsafe { UNITS.pop(self.main() + SPARE) };
            if object.is_null() {
                object = self.refill_hardened(hardening);
            }
            // SAFETY: `pop` or `refill_hardened` took the object out, so this thread owns it.
            if object.is_null() || unsafe { hardening.disarm(object) } {
                return object;
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn refill_hardened(&self, hardening: &Hardening) -> *mut u8 {
        let ask = self.ask();
        let node = &self.nodes()[ask.node];
        percpu::tick();
        let at = self.main() + SPARE;
        // Takes the empty sheaf out of the unit, if there is one.
        let empty = load(at).filter(|&word| {
            // SAFETY: `at` is the offset of the spare sheaf's word, which every unit has.
            word != 0 && word_is_empty(word) && unsafe { UNITS.store_if_equal(at, word, 0) }
        });
        // SAFETY: `store_if_equal` above removed the word from the unit, so this thread owns the
        // sheaf.
        let empty = empty.and_then(|word| unsafe { Sheaf::from_word(word) });
        let (fresh, sheaf) = match node.exchange_quarantined(empty) {
            Ok(sheaf) => (false, Ok(sheaf)),
            Err(empty) => (true, node.exchange_for_full(self, ask, empty)),
        };
        match sheaf {
            Ok(mut sheaf) => {
                if fresh {
                    let kept = self.arm(hardening, sheaf.objects());
                    sheaf.set_len(kept);
                }
                let object = sheaf.pop();
                // SAFETY: every unit has the spare sheaf's word at `at`. Once the word is stored,
                // the unit owns the sheaf, and this thread uses it only if the store failed.
                if !unsafe { UNITS.store_if_equal(at, 0, sheaf.word()) } {
                    self.put(node, sheaf);
                }
                if object.is_null() {
                    // All objects of the sheaf had been written to.
                    return self.refill_hardened(hardening);
                }
                object
            }
            Err(sheaf) => {
                if let Some(sheaf) = sheaf {
                    self.put(node, sheaf);
                }
                let mut object = [null_mut()];
                match self.alloc_from(ask, &mut object) {
                    0 => return null_mut(),
                    // The callers expect the key that an object from a sheaf has.
                    // SAFETY: `alloc_from` took the object from its slab, so this thread owns it.
                    _ => unsafe { hardening.rearm(object[0]) },
                }
                object[0]
            }
        }
    }

    /// Takes objects straight from the slabs of the asked node, not from sheaves. Returns their
    /// number.
    pub(super) fn alloc_hardened_from(
        &self,
        hardening: &Hardening,
        ask: Ask,
        objects: &mut [*mut u8],
    ) -> usize {
        let mut got = 0;
        while got < objects.len() {
            let rest = &mut objects[got..];
            let taken = self.nodes()[ask.node].take_objects(self, ask, rest);
            // The next turn replaces the objects that were written to.
            let kept = self.arm(hardening, &mut rest[..taken]);
            // SAFETY: `take_objects` took the objects from their slabs, so this thread owns them.
            rest[..kept]
                .iter()
                .for_each(|&object| unsafe { _ = hardening.disarm(object) });
            rest[kept..taken].fill(null_mut());
            got += kept;
            if taken == 0 {
                break;
            }
        }
        got
    }

    /// Frees an object of a hardened cache.
    ///
    /// # Safety
    ///
    /// If `object` is an object in use, the caller owns it and gives it up. Any other address is
    /// reported.
    #[inline(always)]
    unsafe fn free_hardened(&self, hardening: &Hardening, object: *mut u8) {
        if let Some(kind) = self.objection(object) {
            return self.accuse_free(object, kind);
        }
        // SAFETY: `objection` found that an object of this cache begins here, and the caller gives
        // it up.
        if !unsafe { hardening.scrub(object) } {
            return self.accuse_free(object, Kind::DoubleFree);
        }
        // SAFETY: every unit has a word for this cache's held sheaf at this offset. The caller gave
        // the object up.
        if !unsafe { UNITS.push_fast(self.main() + HELD, object) } {
            self.free_hardened_slow(object);
        }
    }

    /// Makes freed objects ready for a sheaf. Reports and leaves out those that cannot be freed.
    /// Moves the rest to the slice's beginning and returns their number.
    ///
    /// # Safety
    ///
    /// The caller gives up each address that is an object in use. Any other address is reported.
    pub(super) unsafe fn scrub(&self, hardening: &Hardening, objects: &mut [*mut u8]) -> usize {
        let mut kept = 0;
        for at in 0..objects.len() {
            let object = objects[at];
            if let Some(kind) = self.objection(object) {
                self.accuse_free(object, kind);
            // SAFETY: `objection` found that an object of this cache begins here, and the caller
            // gives it up.
            } else if !unsafe { hardening.scrub(object) } {
                self.accuse_free(object, Kind::DoubleFree);
            } else {
                objects[kept] = object;
                kept += 1;
            }
        }
        kept
    }

    #[cold]
    #[inline(never)]
    fn free_hardened_slow(&self, object: *mut u8) {
        // On the atomic backend, this is the common path.
        // SAFETY: every unit has a word for this cache's held sheaf at this offset. The caller gave
        // the object up.
        if unsafe { UNITS.push(self.main() + HELD, object) } {
            return;
        }
        let node = self.here();
        percpu::tick();
        let at = self.main() + HELD;
        let full = load(at).filter(|&word| {
            // SAFETY: `at` is the offset of the held sheaf's word, which every unit has.
            word != 0 && word_is_full(word) && unsafe { UNITS.store_if_equal(at, word, 0) }
        });
        // SAFETY: `store_if_equal` above removed the word from the unit, so this thread owns the
        // sheaf.
        let mut full = full.and_then(|word| unsafe { Sheaf::from_word(word) });
        if let Some(full) = &mut full {
            self.send_home(node, full);
        }
        let sheaf = match full {
            // `send_home` took other nodes' objects out, which made room.
            Some(sheaf) if !sheaf.is_full() => {
                node.count(SlabEvent::FreeLockless, 1);
                Ok(sheaf)
            }
            full => node.exchange_for_empty(self, full),
        };
        match sheaf {
            Ok(mut sheaf) if !sheaf.is_full() => {
                sheaf.push(object);
                // SAFETY: every unit has the held sheaf's word at `at`. Once the word is stored,
                // the unit owns the sheaf, and this thread uses it only if the store failed.
                if !unsafe { UNITS.store_if_equal(at, 0, sheaf.word()) } {
                    self.put(node, sheaf);
                }
            }
            other => {
                if let Ok(sheaf) | Err(Some(sheaf)) = other {
                    self.put(node, sheaf);
                }
                let home = page::node_of(object as usize).min(self.nodes().len() - 1);
                // SAFETY: the user gave the object up and no sheaf took it, so this thread owns it;
                // `home` is its node.
                unsafe { self.nodes()[home].give_objects(self, &[object]) };
            }
        }
    }

    /// Returns whether an object is free in its slab although it has no key: the key was lost when
    /// its page went back to the system (`purge`).
    #[cold]
    fn is_free_without_key(&self, object: *mut u8) -> bool {
        let keyless = |hardening: &Hardening| {
            // SAFETY: the caller checked that an object of this cache begins here, and its key lies
            // in it.
            unsafe { *hardening.word(object) == 0 }
        };
        // SAFETY: the caller checked that an object of this cache begins here.
        self.hardening.as_ref().is_some_and(keyless) && unsafe { Slab::is_free_now(self, object) }
    }

    /// Returns why the address cannot be freed to this cache, or `None` if it can.
    #[inline(always)]
    pub(super) fn objection(&self, object: *mut u8) -> Option<Kind> {
        if page::entry(object as usize) != self.slot {
            return Some(Kind::WrongCache);
        }
        // Hardened slabs have no color: the first object begins where the run does.
        let start = page::start_of_run(object as usize);
        let offset = (object as usize).wrapping_sub(start as usize);
        let begins = offset < self.slab_bytes && self.nth(offset) * self.size == offset;
        if !begins {
            return Some(Kind::NotAnObject);
        }
        let purged = self.purged.load(Relaxed) && self.is_free_without_key(object);
        purged.then_some(Kind::DoubleFree)
    }

    #[cold]
    #[inline(never)]
    fn accuse_free(&self, object: *mut u8, kind: Kind) {
        let other = by_slot(usize::from(page::entry(object as usize)));
        let other = other.filter(|_| kind == Kind::WrongCache);
        self.accuse(object, kind, other.map(Cache::name));
    }

    #[cold]
    #[inline(never)]
    pub(super) fn accuse(&self, object: *mut u8, kind: Kind, other: Option<&str>) {
        let free = matches!(kind, Kind::DoubleFree | Kind::WrittenAfterFree);
        raise(&Report {
            kind,
            cache: self.name(),
            other,
            flags: DebugFlags::NONE,
            object,
            size: self.size,
            slab: (core::ptr::null(), 0, 0),
            in_use: !free,
            tracks: [Track::NOBODY; 2],
            bytes: None,
        });
    }
}
