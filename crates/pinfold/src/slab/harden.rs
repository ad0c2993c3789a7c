//! Hardened caches: objects that are freed twice, freed to the wrong cache, or written to after they were freed are found at once, and
//! what a program left in an object is gone when it is freed.
//!
//! * A freed object is zeroed, but for its *key*: a keyed hash of its address (`key.rs`). An
//!   allocation that does not find the key reports a write after the free. A free that finds the
//!   key reports a double free. Objects with a constructor keep their bytes, and have the key
//!   behind them. A key is lost when its page goes back to the system, while the object is free in
//!   its slab: once a cache has given pages back, frees of objects without a key ask the slab too.
//! * Each free asks the page map whose the address is, and whether an object begins there.
//! * Frees and allocations use two sheaves of the CPU that do not meet: a freed object goes through a *quarantine*, the barn's first
//!   [`QUARANTINE`] full sheaves, oldest first, before it is given out again.
//! * A fresh slab's objects come in no order that could be foretold.
//! * The last page of a slab cannot be touched, as long as such pages take no more than half of the
//!   mappings that the kernel allows (`guard.rs`).
//!
//! Nothing in an object points to another: there is nothing to encode but the links of objects that were set aside
//! ([`Node::set_aside`](super::node::Node)).
//!
//! The words of fast paths stay empty in hardened caches, so that those fail on their own: caches that are not hardened pay nothing.

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

/// The environment variable that hardens all caches: 1, or 0 for none.
const NAME: &str = "PINFOLD_HARDENED";
/// Full sheaves in a barn that are not given out yet.
pub(super) const QUARANTINE: usize = 2;

/// Whether the environment asks for hardening. Anything but 1 is no; what starts a program tells of
/// values other than 0 and 1.
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
    /// Prepares objects that have been taken from their slabs; those that somebody wrote to are dropped. Returns how many are left, at
    /// the slice's beginning.
    pub(super) fn arm(&self, hardening: &Hardening, objects: &mut [*mut u8]) -> usize {
        shuffle(objects);
        let mut kept = 0;
        for at in 0..objects.len() {
            let object = objects[at];
            // SAFETY: taken from the slab just now.
            if unsafe { hardening.arm(object) } {
                objects[kept] = object;
                kept += 1;
            } else {
                self.accuse(object, Kind::WrittenAfterFree, None);
            }
        }
        kept
    }

    /// Whether it is debugged or hardened.
    #[inline]
    pub(super) fn checks(&self) -> bool {
        self.hardening.is_some() || self.plan().is_some()
    }

    /// An object of a cache that checks; null when the system has no memory.
    #[cold]
    #[inline(never)]
    pub(super) fn alloc_checked(&self) -> *mut u8 {
        if let Some(hardening) = &self.hardening {
            return self.alloc_hardened(hardening);
        }
        let debugged = |plan| self.alloc_debugged_here(plan, usize::MAX);
        self.plan().map_or(null_mut(), debugged)
    }

    /// Takes an object of a cache that checks back.
    ///
    /// # Safety
    ///
    /// As for [`KmemCache::free`](super::KmemCache::free), but that what is wrong is found.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn free_checked(&self, object: *mut u8) {
        if let Some(hardening) = &self.hardening {
            // SAFETY: the caller's promise.
            return unsafe { self.free_hardened(hardening, object) };
        }
        self.here().count(SlabEvent::FreeLockless, 1);
        percpu::tick();
        if let Some(plan) = self.plan() {
            // SAFETY: the caller's promise.
            unsafe { self.free_debugged(plan, object) };
        }
    }

    /// Makes an object ready for a memory pool's reserve, as [`free`](super::KmemCache::free) does for the cache. False, and nothing done,
    /// when it is not this cache's, or free.
    ///
    /// # Safety
    ///
    /// Here and below: the object is the caller's, if it is one of this cache's.
    #[cold]
    pub(super) unsafe fn enter_reserve(&self, object: *mut u8) -> bool {
        match &self.hardening {
            Some(hardening) => {
                // SAFETY: an object of this cache.
                self.objection(object).is_none() && unsafe { hardening.scrub(object) }
            }
            // Debugging has it in use, and looks at the bytes around it.
            None => page::entry(object as usize) == self.slot,
        }
    }

    /// Makes an object of a reserve one that is given out. False, and a report, when somebody wrote to it.
    #[cold]
    pub(super) unsafe fn leave_reserve(&self, object: *mut u8) -> bool {
        // Those that came there from the cache have no key.
        // SAFETY: an object of this cache.
        let written_to = |hardening: &Hardening| unsafe { !hardening.release(object) };
        let wrong = self.hardening.as_ref().is_some_and(written_to);
        if wrong {
            // Who wrote there may write again: it is never used any more.
            self.accuse(object, Kind::WrittenAfterFree, None);
        }
        !wrong
    }

    /// An object of a hardened cache; null when the system has no memory.
    #[inline(always)]
    fn alloc_hardened(&self, hardening: &Hardening) -> *mut u8 {
        // SAFETY: the offset lies in the unit.
        let object = unsafe { UNITS.pop_fast(self.main() + SPARE) };
        // SAFETY: the object is ours.
        if !object.is_null() && unsafe { hardening.disarm(object) } {
            return object;
        }
        self.alloc_hardened_slow(hardening, object)
    }

    /// As above, when `object`, which came from the sheaf, cannot be trusted or is none.
    #[cold]
    #[inline(never)]
    fn alloc_hardened_slow(&self, hardening: &Hardening, mut object: *mut u8) -> *mut u8 {
        loop {
            if !object.is_null() {
                // Who wrote there may write again: it is never used any more.
                self.accuse(object, Kind::WrittenAfterFree, None);
            }
            // The common path on atomics.
            // SAFETY: the offset lies in the unit.
            object = unsafe { UNITS.pop(self.main() + SPARE) };
            if object.is_null() {
                object = self.refill_hardened(hardening);
            }
            // SAFETY: the object is ours.
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
        // The empty sheaf that is there, if it still is.
        let empty = load(at).filter(|&word| {
            // SAFETY: the offset lies in the unit.
            word != 0 && word_is_empty(word) && unsafe { UNITS.store_if_equal(at, word, 0) }
        });
        // SAFETY: taken out just now.
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
                // SAFETY: the offset lies in the unit; the sheaf is the unit's once it is stored.
                if !unsafe { UNITS.store_if_equal(at, 0, sheaf.word()) } {
                    self.put(node, sheaf);
                }
                if object.is_null() {
                    // None of them could be trusted.
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
                    // As it would come out of a sheaf.
                    // SAFETY: the object is ours.
                    _ => unsafe { hardening.rearm(object[0]) },
                }
                object[0]
            }
        }
    }

    /// Takes objects past the sheaves, from the asked node's slabs; returns how many.
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
            // Those that cannot be trusted are made up for.
            let kept = self.arm(hardening, &mut rest[..taken]);
            // SAFETY: taken from their slabs, and armed just now.
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

    /// Takes an object of a hardened cache back.
    ///
    /// # Safety
    ///
    /// Nobody uses the object any more. That it is one, is this cache's, and was not freed before is checked.
    #[inline(always)]
    unsafe fn free_hardened(&self, hardening: &Hardening, object: *mut u8) {
        if let Some(kind) = self.objection(object) {
            return self.accuse_free(object, kind);
        }
        // SAFETY: an object of this cache.
        if !unsafe { hardening.scrub(object) } {
            return self.accuse_free(object, Kind::DoubleFree);
        }
        // SAFETY: the offset lies in the unit; the object is given up.
        if !unsafe { UNITS.push_fast(self.main() + HELD, object) } {
            self.free_hardened_slow(object);
        }
    }

    /// Makes objects that were freed ready for a sheaf; what is wrong with some is said, and they are left out. Returns how many are left,
    /// at the slice's beginning.
    ///
    /// # Safety
    ///
    /// As for [`free_hardened`](Self::free_hardened), for each of them.
    pub(super) unsafe fn scrub(&self, hardening: &Hardening, objects: &mut [*mut u8]) -> usize {
        let mut kept = 0;
        for at in 0..objects.len() {
            let object = objects[at];
            if let Some(kind) = self.objection(object) {
                self.accuse_free(object, kind);
            // SAFETY: an object of this cache.
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
        // The common path on atomics.
        // SAFETY: the offset lies in the unit; the object is given up.
        if unsafe { UNITS.push(self.main() + HELD, object) } {
            return;
        }
        let node = self.here();
        percpu::tick();
        let at = self.main() + HELD;
        let full = load(at).filter(|&word| {
            // SAFETY: the offset lies in the unit.
            word != 0 && word_is_full(word) && unsafe { UNITS.store_if_equal(at, word, 0) }
        });
        // SAFETY: taken out just now.
        let mut full = full.and_then(|word| unsafe { Sheaf::from_word(word) });
        if let Some(full) = &mut full {
            self.send_home(node, full);
        }
        let sheaf = match full {
            // What was other nodes' has gone home, so that there is room.
            Some(sheaf) if !sheaf.is_full() => {
                node.count(SlabEvent::FreeLockless, 1);
                Ok(sheaf)
            }
            full => node.exchange_for_empty(self, full),
        };
        match sheaf {
            Ok(mut sheaf) if !sheaf.is_full() => {
                sheaf.push(object);
                // SAFETY: the offset lies in the unit; the sheaf is the unit's once it is stored.
                if !unsafe { UNITS.store_if_equal(at, 0, sheaf.word()) } {
                    self.put(node, sheaf);
                }
            }
            other => {
                if let Ok(sheaf) | Err(Some(sheaf)) = other {
                    self.put(node, sheaf);
                }
                let home = page::node_of(object as usize).min(self.nodes().len() - 1);
                // SAFETY: the object is the caller's to give.
                unsafe { self.nodes()[home].give_objects(self, &[object]) };
            }
        }
    }

    /// Whether an object of this cache is free though it has no key: that has gone with its page (`purge`).
    #[cold]
    fn is_free_without_key(&self, object: *mut u8) -> bool {
        let keyless = |hardening: &Hardening| {
            // SAFETY: the key lies in the object.
            unsafe { *hardening.word(object) == 0 }
        };
        // SAFETY: an object of this cache.
        self.hardening.as_ref().is_some_and(keyless) && unsafe { Slab::is_free_now(self, object) }
    }

    /// Why the address is no object of this cache, or none that can be freed.
    #[inline(always)]
    pub(super) fn objection(&self, object: *mut u8) -> Option<Kind> {
        if page::entry(object as usize) != self.slot {
            return Some(Kind::WrongCache);
        }
        // Hardened slabs have no color: the objects begin where the run does.
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
