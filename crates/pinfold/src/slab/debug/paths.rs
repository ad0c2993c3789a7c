//! How a debugged cache allocates, frees and looks itself over.

use super::report::StandardError;
use super::{DebugFlags, Kind, Plan, Report, Track, raise, silently};
use crate::page::{self, Ask};
use crate::segment::SlabEvent;
use crate::slab::cache::{Cache, by_slot};
use crate::slab::node::Node;
use core::fmt::Write;
use core::ptr::null_mut;

/// A fault, as it is noted under a node's lock.
#[derive(Clone, Copy)]
pub(in crate::slab) struct Fault {
    pub(in crate::slab) kind: Kind,
    /// The object's slot, or the address that is in no slot.
    pub(in crate::slab) slot: *mut u8,
    /// The slab's start, the object's number, and whether it is in use.
    pub(in crate::slab) place: (*const u8, usize, bool),
    /// The bytes around it as they were found.
    pub(in crate::slab) bytes: Option<(*const u8, [u8; 16])>,
    /// Who allocated and who freed it last.
    pub(in crate::slab) tracks: [Track; 2],
}

/// Faults that were found in one look, the first of them in full.
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
    /// Checks a slot; with `mend` the bytes are put right.
    ///
    /// # Safety
    ///
    /// The slot is of this plan, and the caller keeps others from it.
    pub(in crate::slab) unsafe fn fault(
        &self,
        slot: *mut u8,
        place: (*const u8, usize, bool),
        mend: bool,
    ) -> Option<Fault> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.check(slot, place.2, false) }?;
        let wrong = self.object_at(slot).wrapping_offset(found.offset);
        // Of the slot's bytes, which are whole words.
        let last = slot.wrapping_add(self.stride.saturating_sub(16));
        let from = ((wrong as usize & !7).min(last as usize)).max(slot as usize) as *const u8;
        let mut bytes = [0; 16];
        let room = (slot as usize + self.stride - from as usize).min(16);
        // SAFETY: so many bytes from there on lie in the slot.
        bytes[..room].copy_from_slice(unsafe { core::slice::from_raw_parts(from, room) });
        if mend {
            // SAFETY: the caller's promise.
            unsafe { self.check(slot, place.2, true) };
        }
        Some(Fault {
            kind: Kind::Overwritten(found),
            slot,
            place,
            bytes: Some((from, bytes)),
            // SAFETY: the caller's promise.
            tracks: unsafe { self.tracks(slot) },
        })
    }
}

impl Cache {
    /// The plan of a debugged cache.
    pub(in crate::slab) fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// A fault with all that is known of it.
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

    /// An object with the first `requested` bytes of it asked for. Null when the system has no memory.
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
                // Who wrote there may write again: it is never used any more.
                Err(fault) => self.tell(plan, &fault),
            }
        }
    }

    /// Takes an object back.
    ///
    /// # Safety
    ///
    /// As for [`KmemCache::free`](crate::slab::KmemCache::free), but that wrong addresses and second frees are found.
    #[cold]
    #[inline(never)]
    pub(in crate::slab) unsafe fn free_debugged(&self, plan: &Plan, object: *mut u8) {
        let Some(node) = self.home_of(plan, object) else {
            return;
        };
        let slot = plan.slot_of(object);
        self.trace(plan, "free", object);
        let track = plan.flags.contains(DebugFlags::USER).then(Track::here);
        // SAFETY: the slot is one of this cache's slabs'.
        if let Err(fault) = unsafe { node.free_debugged(self, plan, slot, track) } {
            self.tell(plan, &fault);
        }
    }

    /// Reports a fault. The report is too large for the frames of allocating and freeing.
    #[cold]
    #[inline(never)]
    fn tell(&self, plan: &Plan, fault: &Fault) {
        raise(&self.report(plan, fault));
    }

    /// The node of an object's slab; none, and a report, when the address is no object of this cache.
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

    /// Which object of its slab begins at an address in one.
    fn number_of(&self, plan: &Plan, object: *mut u8) -> Option<usize> {
        // SAFETY: the address lies in a slab of this cache.
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

    /// How many bytes of an object were asked for.
    ///
    /// # Safety
    ///
    /// Here and below: the object is the caller's, of this cache.
    pub(in crate::slab) unsafe fn requested(&self, object: *mut u8) -> Option<usize> {
        let plan = self.plan()?;
        // SAFETY: the caller's promise.
        Some(unsafe { plan.requested(plan.slot_of(object)) })
    }

    /// Notes that an object is now used for `requested` bytes of it.
    pub(in crate::slab) unsafe fn set_requested(&self, object: *mut u8, requested: usize) {
        let Some(plan) = self.plan() else {
            return;
        };
        let home = page::node_of(object as usize).min(self.nodes().len() - 1);
        // With the lock held, so that nobody looks the slot over meanwhile.
        // SAFETY: the caller's promise.
        self.nodes()[home]
            .locked(|| unsafe { plan.set_requested(plan.slot_of(object), requested) });
    }

    /// Looks over all objects; with `leaks` those in use are the faults, else what is wrong with any. What is wrong is put right.
    pub(in crate::slab) fn faults(&self, plan: &Plan, leaks: bool) -> Faults {
        let mut faults = Faults::new();
        for node in self.nodes() {
            node.look_over(self, plan, leaks, &mut faults);
        }
        faults
    }

    /// An object in a debugged cache on the thread's node.
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
        // The node has no memory: others may.
        self.others(ask, |other| {
            object = self.alloc_debugged(plan, other, requested);
            !object.is_null()
        });
        node.count(SlabEvent::AllocNodeMismatch, usize::from(!object.is_null()));
        object
    }
}
