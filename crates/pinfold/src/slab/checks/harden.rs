//! Hardened caches: caches that find faults of the program.
//!
//! A hardened cache finds a double free, and a free to the wrong cache, at that free. It finds a
//! write after the free when it allocates the object again. When it frees an object, it erases what
//! the program left there.
//!
//! * **Keys.** A free zeroes the object and writes the object's *key* into it, a keyed hash of the
//!   object's address (`key.rs`). An allocation that does not find the key reports a write after
//!   the free. A free that finds the key reports a double free. In a cache with a constructor, a
//!   free keeps the object's bytes, and the key lies behind them. A key is lost when the page of an
//!   object that is free in its slab goes back to the system (`purge.rs`). So once a cache has
//!   given pages back, a free of an object without a key also checks the object's bit in the slab.
//! * **Addresses.** Each free reads in the page map which cache owns the address, and checks that
//!   an object begins there.
//! * **Quarantine.** Frees and allocations use two different sheaves of the CPU. So a freed object
//!   passes through the barn before it is allocated again. The barn gives out its oldest full sheaf
//!   first, and always keeps the [`QUARANTINE`] newest ones.
//! * **Order.** The objects of a fresh slab are given out in an order that cannot be predicted.
//! * **Guard pages.** Any access to the last page of a slab ends the process. New slabs get no such
//!   page while guard pages take half of the mappings that the kernel allows (`guard.rs`).
//!
//! Free objects hold no pointers to other objects, with one exception: the links between objects
//! that were set aside (`handler_frees`). Those links are encoded.
//!
//! A hardened cache has no main sheaf, so the fast paths fail on their own. Caches that are not
//! hardened pay nothing.

use super::debug::Kind;
use super::key::{Hardening, shuffle};
use crate::arena::{self, NodeRequest};
use crate::cache_units::{HELD, SPARE};
use crate::segment::SlabEvent;
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::cache::registry::pin_by_entry;
use crate::slab::cpu::sheaf::{word_is_empty, word_is_full};
use crate::slab::cpu::sheaf_units;
use crate::slab::node::slabs::Slab;
use core::ptr::null_mut;

impl Descriptor {
    /// Gives keys to objects that were just taken from their slabs. Reports the objects that were
    /// written to while they were free, and leaves them out: they are never used again. Moves the
    /// rest to the slice's beginning and returns their number.
    pub(crate) fn arm(&self, hardening: &Hardening, objects: &mut [*mut u8]) -> usize {
        shuffle(objects);
        let mut kept = 0;
        for at in 0..objects.len() {
            let object = objects[at];
            // SAFETY: the caller took the objects from their slabs, so this thread owns this one.
            if unsafe { hardening.arm(object) } {
                objects[kept] = object;
                kept += 1;
            } else {
                self.accuse(object, Kind::WrittenAfterFree, None);
            }
        }
        kept
    }

    /// Allocates an object from a cache that checks. Returns null when the system has no memory.
    #[cold]
    #[inline(never)]
    pub(crate) fn alloc_checked(&self) -> *mut u8 {
        if let Some(hardening) = &self.hardening {
            return self.alloc_hardened(hardening);
        }
        let debugged = |slot_layout| self.alloc_debugged_here(slot_layout, usize::MAX);
        self.slot_layout.as_ref().map_or(null_mut(), debugged)
    }

    /// Frees an object to a cache that checks.
    ///
    /// # Safety
    ///
    /// If `object` is an object in use, the caller owns it and gives it up. Any other address is
    /// reported.
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn free_checked(&self, object: *mut u8) {
        if let Some(hardening) = &self.hardening {
            // SAFETY: the caller passes ownership of `object` if it is an object in use.
            // `free_hardened` reports any other address.
            return unsafe { self.free_hardened(hardening, object) };
        }
        self.here().count(SlabEvent::FreeLockless, 1);
        sheaf_units::tick();
        if let Some(slot_layout) = self.slot_layout.as_ref() {
            // SAFETY: the caller passes ownership of `object` if it is an object in use.
            // `free_debugged` reports any other address.
            unsafe { self.free_debugged(slot_layout, object) };
        }
    }

    /// Returns why the caller cannot be using an object at `object`, an address in a slab of this
    /// cache. Returns `None` if an object in use begins there, or if the cache does not check.
    fn misuse(&self, object: *mut u8) -> Option<Kind> {
        let is_free = match (&self.hardening, &self.slot_layout) {
            (Some(hardening), _) => match self.objection(object) {
                Some(Kind::DoubleFree) => true,
                None => {
                    // SAFETY: `objection` found that an object of this cache begins here.
                    unsafe { hardening.is_armed(object) || Slab::is_free_now(self, object) }
                }
                other => return other,
            },
            (None, Some(slot_layout)) => {
                if self.number_of(slot_layout, object).is_none() {
                    return Some(Kind::NotAnObject);
                }
                // SAFETY: `number_of` found that an object of this cache begins here.
                unsafe { Slab::is_free_now(self, slot_layout.slot_of(object)) }
            }
            (None, None) => false,
        };
        is_free.then_some(Kind::UsedAfterFree)
    }

    /// Returns true if an object in use begins at `object`, an address in a slab of this cache, or
    /// if the cache does not check. Otherwise reports the fault.
    pub(crate) fn is_in_use(&self, object: *mut u8) -> bool {
        if !self.checks() {
            return true;
        }
        match self.misuse(object) {
            None => true,
            Some(kind) => {
                self.tell_misuse(object, kind);
                false
            }
        }
    }

    /// Returns false, after a report, if the object in use that begins at `object` cannot have been
    /// allocated for `size` bytes at a multiple of `align`. Returns true if no object in use begins
    /// there, because the free reports that, and if the cache does not check. `is_smaller` says
    /// that objects of `size` bytes come from a cache of smaller objects.
    pub(crate) fn fits(
        &self,
        object: *mut u8,
        (size, align): (usize, usize),
        is_smaller: bool,
    ) -> bool {
        if !self.checks() || self.misuse(object).is_some() {
            return true;
        }
        // SAFETY: `misuse` found that an object in use of this cache begins here.
        let asked = unsafe { self.requested(object) };
        let fits = match asked.filter(|&asked| asked < self.object) {
            // Aligned `new` rounds the size up, as `aligned_alloc` demands.
            Some(asked) => size == asked || size.checked_next_multiple_of(align) == Some(asked),
            // A block that was shrunk to at least half its size may have stayed at its address.
            None => size <= self.object && !(is_smaller && size < self.object / 2),
        };
        if !fits {
            self.tell_misuse(object, Kind::WrongSize(size));
        }
        fits
    }

    /// Reports what the caller did with `object`, an address in a slab of this cache.
    #[cold]
    #[inline(never)]
    fn tell_misuse(&self, object: *mut u8, kind: Kind) {
        match &self.slot_layout {
            None => self.accuse(object, kind, None),
            Some(slot_layout) => self.tell_debugged(slot_layout, object, kind),
        }
    }

    /// Makes an object ready for a memory pool's reserve, as a free makes an object ready for the
    /// cache. Returns false and does nothing if the object is not this cache's, or a hardened cache
    /// finds that it is free.
    ///
    /// # Safety
    ///
    /// If `object` is an object of this cache in use, the caller owns it.
    #[cold]
    pub(crate) unsafe fn enter_reserve(&self, object: *mut u8) -> bool {
        match &self.hardening {
            Some(hardening) => {
                // SAFETY: `objection` found that an object of this cache begins here. If it is in
                // use, the caller owns it.
                self.objection(object).is_none() && unsafe { hardening.scrub(object) }
            }
            // For a debugged cache, an object in a reserve is in use, so its red zones are checked.
            None => self.contains(object),
        }
    }

    /// Makes an object that was taken out of a reserve ready for its user. Returns false and
    /// reports a fault if the object was written to in the reserve.
    ///
    /// # Safety
    ///
    /// The caller took the object, which is of this cache, out of a reserve.
    #[cold]
    pub(crate) unsafe fn leave_reserve(&self, object: *mut u8) -> bool {
        // An object that came into the reserve straight from the cache has no key. `release`
        // accepts such an object.
        // SAFETY: the caller took the object out of the reserve, so this thread owns it.
        let written_to = |hardening: &Hardening| unsafe { !hardening.release(object) };
        let wrong = self.hardening.as_ref().is_some_and(written_to);
        if wrong {
            // Whatever wrote to the object may write again, so the object is never used again.
            self.accuse(object, Kind::WrittenAfterFree, None);
        }
        !wrong
    }

    /// Allocates an object of a hardened cache. Returns null when the system has no memory.
    #[inline(always)]
    fn alloc_hardened(&self, hardening: &Hardening) -> *mut u8 {
        let object = self.place(SPARE).pop_fast();
        // SAFETY: `pop_fast` took the object off the sheaf, so this thread owns it.
        if !object.is_null() && unsafe { hardening.disarm(object) } {
            return object;
        }
        self.alloc_hardened_slow(hardening, object)
    }

    /// Allocates when the sheaf had no object (`object` is null), or `object` from the sheaf had
    /// been written to.
    #[cold]
    #[inline(never)]
    fn alloc_hardened_slow(&self, hardening: &Hardening, mut object: *mut u8) -> *mut u8 {
        loop {
            if !object.is_null() {
                // Whatever wrote to the object may write again, so the object is never used again.
                self.accuse(object, Kind::WrittenAfterFree, None);
            }
            // On the atomic backend, this is the common path.
            object = self.place(SPARE).pop();
            if object.is_null() {
                object = self.refill_hardened(hardening);
            }
            // SAFETY: `pop` or `refill_hardened` took the object for this thread, so it owns it.
            if object.is_null() || unsafe { hardening.disarm(object) } {
                return object;
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn refill_hardened(&self, hardening: &Hardening) -> *mut u8 {
        let request = self.request();
        let node = self.part_here(request.node);
        sheaf_units::tick();
        // Takes the empty sheaf out of the unit, if there is one.
        let empty = self.place(SPARE).take_if(word_is_empty);
        let (fresh, sheaf) = match node.exchange_quarantined(self, empty) {
            Ok(sheaf) => (false, Ok(sheaf)),
            Err(empty) => (true, node.exchange_for_full(self, request, empty, true)),
        };
        match sheaf {
            Ok(mut sheaf) => {
                if fresh {
                    let kept = self.arm(hardening, sheaf.objects());
                    sheaf.set_len(kept);
                }
                let object = sheaf.pop();
                if let Some(sheaf) = self.place(SPARE).put(sheaf) {
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
                match self.alloc_from(request, &mut object) {
                    0 => return null_mut(),
                    // `alloc_from` returns an object without its key, but the callers expect one,
                    // as in an object from a sheaf.
                    // SAFETY: `alloc_from` took the object from its slab, so this thread owns it.
                    _ => unsafe { hardening.rearm(object[0]) },
                }
                object[0]
            }
        }
    }

    /// Fills `objects` from the slabs of the node that `request` names, without sheaves. Returns
    /// how many objects it took.
    pub(crate) fn alloc_hardened_from(
        &self,
        hardening: &Hardening,
        request: NodeRequest,
        objects: &mut [*mut u8],
    ) -> usize {
        let mut got = 0;
        while got < objects.len() {
            let rest = &mut objects[got..];
            let taken = self.nodes()[request.node].take_objects(self, request, rest, true);
            // `arm` leaves out objects that were written to. The next iteration takes others
            // instead.
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
        // SAFETY: `objection` found that an object of this cache begins here. If it is in use, the
        // caller gives it up.
        if !unsafe { hardening.scrub(object) } {
            return self.accuse_free(object, Kind::DoubleFree);
        }
        // SAFETY: the caller gives the object up.
        if !unsafe { self.place(HELD).push_fast(object) } {
            // SAFETY: the caller gives the object up.
            unsafe { self.free_hardened_slow(object) };
        }
    }

    /// Makes freed objects ready for a sheaf. Reports the addresses that cannot be freed, and
    /// leaves them out. Moves the rest to the slice's beginning and returns their number.
    ///
    /// # Safety
    ///
    /// The caller gives up each address that is an object in use. Any other address is reported.
    pub(crate) unsafe fn scrub(&self, hardening: &Hardening, objects: &mut [*mut u8]) -> usize {
        let mut kept = 0;
        for at in 0..objects.len() {
            let object = objects[at];
            if let Some(kind) = self.objection(object) {
                self.accuse_free(object, kind);
            // SAFETY: `objection` found that an object of this cache begins here. If it is in use,
            // the caller gives it up.
            } else if !unsafe { hardening.scrub(object) } {
                self.accuse_free(object, Kind::DoubleFree);
            } else {
                objects[kept] = object;
                kept += 1;
            }
        }
        kept
    }

    /// # Safety
    ///
    /// The caller owns `object`, which is scrubbed, and gives it up.
    #[cold]
    #[inline(never)]
    unsafe fn free_hardened_slow(&self, object: *mut u8) {
        // On the atomic backend, this is the common path.
        // SAFETY: the caller gives the object up.
        if unsafe { self.place(HELD).push(object) } {
            return;
        }
        let node = self.here();
        sheaf_units::tick();
        let full = self.place(HELD).take_if(word_is_full);
        let install = |sheaf| {
            if let Some(sheaf) = self.place(HELD).put(sheaf) {
                self.put(node, sheaf);
            }
        };
        // SAFETY: the caller gives the object up.
        unsafe { self.free_into(node, full, object, install) };
    }

    #[cold]
    #[inline(never)]
    fn accuse_free(&self, object: *mut u8, kind: Kind) {
        let other = pin_by_entry(arena::entry(object as usize));
        let other = other.filter(|_| kind == Kind::WrongCache);
        self.accuse(object, kind, other.as_ref().map(|other| other.name()));
    }
}
