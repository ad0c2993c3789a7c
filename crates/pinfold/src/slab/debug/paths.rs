//! How a debugged cache allocates, frees and checks all its objects.

use super::report::StandardError;
use super::{DebugFlags, Kind, Plan, Report, Track, raise, silently};
use crate::page::{self, Ask};
use crate::segment::SlabEvent;
use crate::slab::cache::{Cache, by_slot};
use crate::slab::node::Node;
use core::fmt::Write;
use core::ptr::null_mut;

/// A fault, as recorded under a node's lock.
#[derive(Clone, Copy)]
pub(in crate::slab) struct Fault {
    pub(in crate::slab) kind: Kind,
    /// The object's slot, or the freed address if it is in no slot.
    pub(in crate::slab) slot: *mut u8,
    /// The slab's start, the object's number in the slab, and whether the object is in use.
    pub(in crate::slab) place: (*const u8, usize, bool),
    /// The bytes around the fault, as the check found them, and their address.
    pub(in crate::slab) bytes: Option<(*const u8, [u8; 16])>,
    /// The tracks of the object's last allocation and last free.
    pub(in crate::slab) tracks: [Track; 2],
}

/// The faults that one check of a cache found. Counts all faults, and keeps the first 16.
pub(in crate::slab) struct Faults {
    kept: [Option<Fault>; 16],
    pub(in crate::slab) count: usize,
}

impl Faults {
    pub(in crate::slab) const fn new() -> Faults {
        Faults {
            kept: [None; 16],
            count: 0,
        }
    }

    pub(in crate::slab) fn add(&mut self, fault: Fault) {
        if let Some(place) = self.kept.get_mut(self.count) {
            *place = Some(fault);
        }
        self.count += 1;
    }

    pub(in crate::slab) fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.kept.iter().flatten()
    }
}

impl Plan {
    /// Checks the bytes of a slot, and returns the first fault. With `mend`, repairs the wrong
    /// bytes.
    ///
    /// # Safety
    ///
    /// The slot is one of this plan's slots. No other thread writes to the bytes of the slot that
    /// this function checks.
    pub(in crate::slab) unsafe fn fault(
        &self,
        slot: *mut u8,
        place: (*const u8, usize, bool),
        mend: bool,
    ) -> Option<Fault> {
        // SAFETY: the caller promises that the slot is of this plan, and that no other thread
        // writes to the bytes that this function checks.
        let found = unsafe { self.check(slot, place.2, false) }?;
        let wrong = self.object_at(slot).wrapping_offset(found.offset);
        // The report shows 16 bytes of the slot, from the word that holds the wrong byte. It shows
        // fewer if the slot is smaller.
        let last = slot.wrapping_add(self.stride.saturating_sub(16));
        let from = ((wrong as usize & !7).min(last as usize)).max(slot as usize) as *const u8;
        let mut bytes = [0; 16];
        let room = (slot as usize + self.stride - from as usize).min(16);
        // SAFETY: `room` ends at the slot's end at the latest, so the bytes lie in the slot.
        bytes[..room].copy_from_slice(unsafe { core::slice::from_raw_parts(from, room) });
        if mend {
            // SAFETY: the caller promises that the slot is of this plan, and that no other thread
            // writes to the bytes that this function checks.
            unsafe { self.check(slot, place.2, true) };
        }
        Some(Fault {
            kind: Kind::Overwritten(found),
            slot,
            place,
            bytes: Some((from, bytes)),
            // SAFETY: the caller promises that the slot is of this plan, and that no other thread
            // writes to the bytes that this function checks.
            tracks: unsafe { self.tracks(slot) },
        })
    }
}

impl Cache {
    /// Returns the plan of a debugged cache, or `None` if the cache is not debugged.
    pub(in crate::slab) fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// Returns the report that describes a fault.
    pub(in crate::slab) fn report(&self, plan: &Plan, fault: &Fault) -> Report<'_> {
        let (start, nth, in_use) = fault.place;
        let object = if start.is_null() {
            fault.slot
        } else {
            plan.object_at(fault.slot)
        };
        Report {
            kind: fault.kind,
            cache: self.name(),
            other: None,
            flags: plan.flags,
            object,
            size: plan.object,
            slab: (start, nth, self.per_slab),
            in_use,
            tracks: fault.tracks,
            bytes: fault.bytes,
        }
    }

    /// Allocates an object from the node that `ask` names. The caller asked for `requested` bytes
    /// of it. Returns null when the node has no memory.
    #[cold]
    #[inline(never)]
    pub(in crate::slab) fn alloc_debugged(
        &self,
        plan: &Plan,
        ask: Ask,
        requested: usize,
    ) -> *mut u8 {
        let track = plan.flags.contains(DebugFlags::USER).then(Track::here);
        loop {
            match self.nodes()[ask.node].alloc_debugged(self, plan, ask, (requested, track)) {
                Ok(None) => return null_mut(),
                Ok(Some(slot)) => {
                    let object = plan.object_at(slot.as_ptr());
                    self.trace(plan, "alloc", object);
                    return object;
                }
                // Whatever wrote to the free object may write again, so the slot stays taken and is
                // never used again.
                Err(fault) => self.tell(plan, &fault),
            }
        }
    }

    /// Frees an object, or reports why the address cannot be freed.
    ///
    /// # Safety
    ///
    /// If `object` is an object in use, the caller owns it and gives it up. Any other address is
    /// reported.
    #[cold]
    #[inline(never)]
    pub(in crate::slab) unsafe fn free_debugged(&self, plan: &Plan, object: *mut u8) {
        let Some(node) = self.home_of(plan, object) else {
            return;
        };
        let slot = plan.slot_of(object);
        self.trace(plan, "free", object);
        let track = plan.flags.contains(DebugFlags::USER).then(Track::here);
        // SAFETY: `home_of` found that an object of this cache begins at the address, and returned
        // the node of its slab. If the object is in use, the caller gives it up.
        if let Err(fault) = unsafe { node.free_debugged(self, plan, slot, track) } {
            self.tell(plan, &fault);
        }
    }

    /// Reports a fault. This is a function of its own because a report would make the stack frames
    /// of allocating and freeing too large.
    #[cold]
    #[inline(never)]
    fn tell(&self, plan: &Plan, fault: &Fault) {
        raise(&self.report(plan, fault));
    }

    /// Returns the node of the slab of `object`. If no object of this cache begins at that address,
    /// reports a fault and returns `None`.
    #[inline(never)]
    fn home_of(&self, plan: &Plan, object: *mut u8) -> Option<&Node> {
        let entry = page::entry(object as usize);
        let (kind, other) = if entry != self.slot {
            (
                Kind::WrongCache,
                by_slot(usize::from(entry)).map(Cache::name),
            )
        } else if self.number_of(plan, object).is_none() {
            (Kind::NotAnObject, None)
        } else {
            let home = page::node_of(object as usize).min(self.nodes().len() - 1);
            return Some(&self.nodes()[home]);
        };
        let fault = Fault {
            kind,
            slot: object,
            place: (core::ptr::null(), 0, true),
            bytes: None,
            tracks: [Track::NOBODY; 2],
        };
        let report = self.report(plan, &fault);
        raise(&Report { other, ..report });
        None
    }

    /// Returns the number, in its slab, of the object that begins at the address `object`. Returns
    /// `None` if no object begins there. The address lies in a slab of this cache.
    fn number_of(&self, plan: &Plan, object: *mut u8) -> Option<usize> {
        // SAFETY: the caller found in the page map that the address lies in a slab of this cache.
        let start = unsafe { (*crate::slab::slabs::slab_of(object)).start() };
        let offset = (object as usize).checked_sub(start as usize + plan.left)?;
        let nth = self.nth(offset);
        (nth * self.size == offset && nth < self.per_slab).then_some(nth)
    }

    fn trace(&self, plan: &Plan, what: &str, object: *mut u8) {
        if plan.flags.contains(DebugFlags::TRACE) && !silently() {
            let (name, size) = (self.name(), plan.object);
            let _ = writeln!(StandardError, "TRACE {name} {what} {object:p} size={size}");
        }
    }

    /// Returns how many bytes the user of an object asked for, or `None` if the cache is not
    /// debugged.
    ///
    /// # Safety
    ///
    /// The caller owns the object, which is of this cache.
    pub(in crate::slab) unsafe fn requested(&self, object: *mut u8) -> Option<usize> {
        let plan = self.plan()?;
        // SAFETY: the caller promises that it owns the object and that the object is of this cache.
        // So the object has a slot of this plan.
        Some(unsafe { plan.requested(plan.slot_of(object)) })
    }

    /// Records that the user of an object now uses `requested` bytes of it.
    ///
    /// # Safety
    ///
    /// The caller owns the object, which is of this cache.
    pub(in crate::slab) unsafe fn set_requested(&self, object: *mut u8, requested: usize) {
        let Some(plan) = self.plan() else {
            return;
        };
        let home = page::node_of(object as usize).min(self.nodes().len() - 1);
        // Writes under the lock, so that no other thread checks the slot meanwhile.
        // SAFETY: the caller promises that it owns the object and that the object is of this cache.
        // So the object has a slot of this plan.
        self.nodes()[home]
            .locked(|| unsafe { plan.set_requested(plan.slot_of(object), requested) });
    }

    /// Checks all slots, and returns the faults. With `leaks`, each object in use is a fault.
    /// Without `leaks`, each slot with wrong bytes is a fault, and its bytes are repaired.
    pub(in crate::slab) fn faults(&self, plan: &Plan, leaks: bool) -> Faults {
        let mut faults = Faults::new();
        for node in self.nodes() {
            node.look_over(self, plan, leaks, &mut faults);
        }
        faults
    }

    /// Allocates an object of a debugged cache from the node that the cache wants, or from another
    /// node if that one has no memory.
    #[cold]
    #[inline(never)]
    pub(in crate::slab) fn alloc_debugged_here(&self, plan: &Plan, requested: usize) -> *mut u8 {
        let ask = self.ask();
        let node = &self.nodes()[ask.node];
        node.count(SlabEvent::AllocLockless, 1);
        let mut object = self.alloc_debugged(plan, ask, requested);
        if !object.is_null() {
            return object;
        }
        // The node that was asked has no memory. Other nodes may have some.
        self.others(ask, |other| {
            object = self.alloc_debugged(plan, other, requested);
            !object.is_null()
        });
        node.count(SlabEvent::AllocNodeMismatch, usize::from(!object.is_null()));
        object
    }
}
