//! How a debugged cache allocates, frees and checks all its objects.

use super::debug::{
    DebugFlags, Fault, Faults, Kind, Report, SlotLayout, StandardError, Track, raise, silently,
};
use crate::arena::{self, NodeRequest};
use crate::segment::SlabEvent;
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::cache::registry::pin_by_entry;
use crate::slab::node::part::Node;
use crate::slab::node::slabs::slab_of;
use core::fmt::Write;
use core::ptr::null_mut;

impl Descriptor {
    /// Returns the report that describes a fault.
    pub(crate) fn report(&self, slot_layout: &SlotLayout, fault: &Fault) -> Report<'_> {
        let (start, nth, in_use) = fault.position;
        let object = if start.is_null() {
            fault.slot
        } else {
            slot_layout.object_at(fault.slot)
        };
        Report {
            kind: fault.kind,
            cache: self.name(),
            other: None,
            flags: slot_layout.flags,
            object,
            size: slot_layout.object,
            slab: (start, nth, self.geometry.per_slab),
            in_use,
            tracks: fault.tracks,
            bytes: fault.bytes,
        }
    }

    /// Allocates an object from the node that `request` names. The caller asked for `requested`
    /// bytes of it. Returns null when the node has no memory.
    #[cold]
    #[inline(never)]
    pub(crate) fn alloc_debugged(
        &self,
        slot_layout: &SlotLayout,
        request: NodeRequest,
        requested: usize,
    ) -> *mut u8 {
        let track = slot_layout
            .flags
            .contains(DebugFlags::USER)
            .then(Track::here);
        loop {
            match self.nodes()[request.node].alloc_debugged(
                self,
                slot_layout,
                request,
                (requested, track),
            ) {
                Ok(None) => return null_mut(),
                Ok(Some(slot)) => {
                    let object = slot_layout.object_at(slot.as_ptr());
                    self.trace(slot_layout, "alloc", object);
                    return object;
                }
                // Whatever wrote to the free object may write again, so the slot stays taken and is
                // never used again.
                Err(fault) => self.tell(slot_layout, &fault),
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
    pub(crate) unsafe fn free_debugged(&self, slot_layout: &SlotLayout, object: *mut u8) {
        let Some(node) = self.home_of(slot_layout, object) else {
            return;
        };
        let slot = slot_layout.slot_of(object);
        self.trace(slot_layout, "free", object);
        let track = slot_layout
            .flags
            .contains(DebugFlags::USER)
            .then(Track::here);
        // SAFETY: `home_of` found that an object of this cache begins at the address, and returned
        // the node of its slab. If the object is in use, the caller gives it up.
        let fault = unsafe { node.free_debugged(self, slot_layout, slot, track.as_ref()) };
        if let Some(fault) = fault {
            self.tell(slot_layout, &fault);
        }
    }

    /// Reports a fault. This is a function of its own because a report would make the stack frames
    /// of allocating and freeing too large.
    #[cold]
    #[inline(never)]
    fn tell(&self, slot_layout: &SlotLayout, fault: &Fault) {
        raise(&self.report(slot_layout, fault));
    }

    /// Reports that the program used `object`, an address in a slab of this cache, in a wrong way.
    #[cold]
    #[inline(never)]
    pub(crate) fn tell_debugged(&self, slot_layout: &SlotLayout, object: *mut u8, kind: Kind) {
        let nth = self.number_of(slot_layout, object);
        let slot = slot_layout.slot_of(object);
        let (position, tracks) = match nth {
            // SAFETY: `number_of` found that an object of this cache begins here. A report may show
            // tracks that another thread is changing.
            Some(nth) => unsafe {
                let start = slab_of(slot).start().cast_const();
                let in_use = kind != Kind::UsedAfterFree;
                ((start, nth, in_use), slot_layout.tracks(slot))
            },
            None => ((core::ptr::null(), 0, true), [Track::NOBODY; 2]),
        };
        let fault = Fault {
            kind,
            slot: if nth.is_some() { slot } else { object },
            position,
            bytes: None,
            tracks,
        };
        self.tell(slot_layout, &fault);
    }

    /// Returns the node of the slab of `object`. If no object of this cache begins at that address,
    /// reports a fault and returns `None`.
    #[inline(never)]
    fn home_of(&self, slot_layout: &SlotLayout, object: *mut u8) -> Option<&Node> {
        let entry = arena::entry(object as usize);
        let (kind, other) = if entry != self.id.entry() {
            (Kind::WrongCache, pin_by_entry(entry))
        } else if self.number_of(slot_layout, object).is_none() {
            (Kind::NotAnObject, None)
        } else {
            let home = arena::node_of(object as usize).min(self.nodes().len() - 1);
            return Some(&self.nodes()[home]);
        };
        let fault = Fault {
            kind,
            slot: object,
            position: (core::ptr::null(), 0, true),
            bytes: None,
            tracks: [Track::NOBODY; 2],
        };
        let report = self.report(slot_layout, &fault);
        let other = other.as_ref().map(|other| other.name());
        raise(&Report { other, ..report });
        None
    }

    /// Returns the number, in its slab, of the object that begins at the address `object`. Returns
    /// `None` if no object begins there. The address lies in a slab of this cache.
    pub(crate) fn number_of(&self, slot_layout: &SlotLayout, object: *mut u8) -> Option<usize> {
        // SAFETY: the caller found in the page map that the address lies in a slab of this cache.
        let start = unsafe { slab_of(object).start() };
        let offset = (object as usize).checked_sub(start as usize + slot_layout.left)?;
        let nth = self.geometry.nth(offset);
        (nth * self.geometry.size == offset && nth < self.geometry.per_slab).then_some(nth)
    }

    fn trace(&self, slot_layout: &SlotLayout, what: &str, object: *mut u8) {
        if slot_layout.flags.contains(DebugFlags::TRACE) && !silently() {
            let (name, size) = (self.name(), slot_layout.object);
            let _ = writeln!(StandardError, "TRACE {name} {what} {object:p} size={size}");
        }
    }

    /// Returns how many bytes the user of an object asked for, or `None` if the cache is not
    /// debugged.
    ///
    /// # Safety
    ///
    /// The caller owns the object, which is of this cache.
    pub(crate) unsafe fn requested(&self, object: *mut u8) -> Option<usize> {
        let slot_layout = self.slot_layout.as_ref()?;
        // SAFETY: the caller promises that it owns the object and that the object is of this cache.
        // So the object has a slot of this layout.
        Some(unsafe { slot_layout.requested(slot_layout.slot_of(object)) })
    }

    /// Records that the user of an object now uses `requested` bytes of it.
    ///
    /// # Safety
    ///
    /// The caller owns the object, which is of this cache.
    pub(crate) unsafe fn set_requested(&self, object: *mut u8, requested: usize) {
        let Some(slot_layout) = self.slot_layout.as_ref() else {
            return;
        };
        let home = arena::node_of(object as usize).min(self.nodes().len() - 1);
        // Holds the lock during the write, so that no other thread checks the slot at the same
        // time.
        // SAFETY: the caller promises that it owns the object and that the object is of this cache.
        // So the object has a slot of this layout.
        self.nodes()[home].locked(|| unsafe {
            slot_layout.set_requested(slot_layout.slot_of(object), requested);
        });
    }

    /// Checks all slots, and returns the faults. With `leaks`, each object in use is a fault.
    /// Without `leaks`, each slot with wrong bytes is a fault, and its bytes are repaired.
    pub(crate) fn faults(&self, slot_layout: &SlotLayout, leaks: bool) -> Faults {
        let mut faults = Faults::new();
        for node in self.nodes() {
            node.look_over(self, slot_layout, leaks, &mut faults);
        }
        faults
    }

    /// Checks all slots of a debugged cache, repairs wrong bytes, and reports the first sixteen
    /// faults.
    pub(crate) fn tell_faults(&self) {
        if let Some(slot_layout) = self.slot_layout.as_ref() {
            let faults = self.faults(slot_layout, false);
            faults
                .iter()
                .for_each(|fault| self.tell(slot_layout, fault));
        }
    }

    /// Allocates an object of a debugged cache from the node that the cache prefers now, or from
    /// another node if that one has no memory.
    #[cold]
    #[inline(never)]
    pub(crate) fn alloc_debugged_here(
        &self,
        slot_layout: &SlotLayout,
        requested: usize,
    ) -> *mut u8 {
        let request = self.request();
        let node = &self.nodes()[request.node];
        node.count(SlabEvent::AllocLockless, 1);
        let mut object = self.alloc_debugged(slot_layout, request, requested);
        if !object.is_null() {
            return object;
        }
        // The node that was asked has no memory. Other nodes may have some.
        self.others(request, |other| {
            object = self.alloc_debugged(slot_layout, other, requested);
            !object.is_null()
        });
        node.count(SlabEvent::AllocNodeMismatch, usize::from(!object.is_null()));
        object
    }
}
