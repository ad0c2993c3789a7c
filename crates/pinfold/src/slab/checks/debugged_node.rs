//! Takes a debugged cache's slots from a node, and gives them back. Both happen under the node's
//! lock, so a slot and its marks (free or in use, bytes requested, tracks) change together. A
//! signal handler that interrupted the lock's holder cannot take the lock. There, an allocation
//! gets no memory from the node, and a free sets the object aside.

#![allow(
    clippy::result_large_err,
    reason = "faults are rare, and nothing may be allocated for them here"
)]

use super::debug::{Fault, Faults, Kind, SlotLayout, Track};
use crate::arena::NodeRequest;
use crate::segment::SlabEvent;
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::node::part::Node;
use crate::slab::node::slabs::slab_of;
use core::ptr::{NonNull, null_mut};

/// Returns what is wrong with freeing the object of `slot` now. This is a function of its own
/// because a fault takes much of the stack, and freeing goes deep.
///
/// # Safety
///
/// `slot` begins a slot in a slab of the cache. The caller holds the lock of the slab's node.
#[inline(never)]
unsafe fn fault_of_free(
    cache: &Descriptor,
    slot_layout: &SlotLayout,
    slot: *mut u8,
) -> Option<Fault> {
    // SAFETY: the caller promises the slot, and the lock keeps the slab's state and the slot's
    // tracks from changing.
    unsafe {
        let (start, nth, free) = slab_of(slot).state(cache, slot);
        if free {
            return Some(Fault {
                kind: Kind::DoubleFree,
                slot,
                position: (start, nth, false),
                bytes: None,
                tracks: slot_layout.tracks(slot),
            });
        }
        slot_layout.fault(slot, (start, nth, true), true)
    }
}

impl Node {
    /// Takes a free slot of a debugged cache. Marks the slot as in use, and records the requested
    /// bytes and the caller's track. Returns `Ok(None)` if the node has no memory, or the lock
    /// cannot be taken. If the slot was written to while it was free, returns that fault, and the
    /// slot is never used again.
    pub(crate) fn alloc_debugged(
        &self,
        cache: &Descriptor,
        slot_layout: &SlotLayout,
        request: NodeRequest,
        (requested, track): (usize, Option<Track>),
    ) -> Result<Option<NonNull<u8>>, Fault> {
        let Some(mut stock) = self.stock_of(cache) else {
            return Ok(None);
        };
        self.take_back(cache, &mut stock);
        let mut slot = [null_mut()];
        if stock.slabs.take(cache, request, &mut slot, true) == 0 {
            return Ok(None);
        }
        stock.count(SlabEvent::Refilled, 1);
        let slot = slot[0];
        // SAFETY: `take` removed the slot from its slab's free objects under the lock, so this
        // thread owns it.
        unsafe {
            let (start, nth, _) = slab_of(slot).state(cache, slot);
            let fault = slot_layout.fault(slot, (start, nth, false), true);
            // A slot with a fault gets these marks too. It is never used again, but its slab counts
            // it as in use, and later checks expect the marks of such a slot.
            slot_layout.set_used(slot, requested);
            if let Some(fault) = fault {
                return Err(fault);
            }
            slot_layout.set_track(slot, 0, || track.unwrap_or(Track::NOBODY));
        }
        Ok(NonNull::new(slot))
    }

    /// Calls `f` under the node's lock. If a signal handler that interrupted the lock's holder
    /// calls this, calls `f` without the lock.
    pub(crate) fn locked(&self, f: impl FnOnce()) {
        let _stock = self.stock_after_fork();
        f();
    }

    /// Frees the object of `slot` if it is in use and the bytes around it are intact. Otherwise
    /// returns the fault. If the lock cannot be taken, sets the object aside.
    ///
    /// # Safety
    ///
    /// `slot` begins a slot in one of this node's slabs of the cache. If the object is in use, the
    /// caller gives it up.
    pub(crate) unsafe fn free_debugged(
        &self,
        cache: &Descriptor,
        slot_layout: &SlotLayout,
        slot: *mut u8,
        track: Option<&Track>,
    ) -> Option<Fault> {
        let Some(mut stock) = self.stock() else {
            self.set_aside(cache, slot);
            return None;
        };
        self.take_back(cache, &mut stock);
        // SAFETY: the caller promises that the slot is in one of this node's slabs, and the lock
        // keeps the slab's state from changing. If there is no fault, the object was in use, and
        // its user gave it up. So this thread owns the slot.
        unsafe {
            let fault = fault_of_free(cache, slot_layout, slot);
            if fault.is_some() {
                return fault;
            }
            slot_layout.set_free(slot);
            slot_layout.set_track(slot, 1, || *track.unwrap_or(&Track::NOBODY));
            stock.count(SlabEvent::Flushed, 1);
            stock.give(cache, &mut [slot]);
        }
        None
    }

    /// Checks all slots of a debugged cache on this node, and adds faults to `faults`. With
    /// `leaks`, each object in use is a fault. Without `leaks`, each slot with wrong bytes is a
    /// fault.
    pub(crate) fn look_over(
        &self,
        cache: &Descriptor,
        slot_layout: &SlotLayout,
        leaks: bool,
        faults: &mut Faults,
    ) {
        let Some(mut stock) = self.stock_after_fork() else {
            return;
        };
        self.take_back(cache, &mut stock);
        stock.slabs.for_each_slot(cache, |slot, position| {
            if leaks && position.2 {
                faults.add(Fault {
                    kind: Kind::Leaked,
                    slot,
                    position,
                    bytes: None,
                    // SAFETY: `for_each_slot` passes slots of this cache's slabs, and the lock
                    // keeps other threads from writing their tracks.
                    tracks: unsafe { slot_layout.tracks(slot) },
                });
            } else if !leaks
                // SAFETY: the holder of the lock owns the free slots. Of a slot in use, `fault`
                // writes only bytes that the user may not touch.
                && let Some(fault) = unsafe { slot_layout.fault(slot, position, true) }
            {
                faults.add(fault);
            }
        });
    }
}
