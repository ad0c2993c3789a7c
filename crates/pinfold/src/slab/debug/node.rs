//! How a debugged cache's slots change hands at a node. Everything here happens under the node's
//! lock, so a slot and its marks (free or in use, bytes requested, tracks) change together.

#![allow(
    clippy::result_large_err,
    reason = "faults are rare, and nothing may be allocated for them here"
)]

use super::{Fault, Faults, Kind, Plan, Track};
use crate::page::Ask;
use crate::segment::SlabEvent;
use crate::slab::cache::Cache;
use crate::slab::node::Node;
use crate::slab::slabs::slab_of;
use core::ptr::{NonNull, null_mut};

impl Node {
    /// Takes a free slot of a debugged cache, and marks it as in use with the bytes that were
    /// requested and the caller's track. Returns `Ok(None)` when the system has no memory. If the
    /// slot was written to while it was free, returns that fault, and the slot is never used again.
    pub(in crate::slab) fn alloc_debugged(
        &self,
        cache: &Cache,
        plan: &Plan,
        ask: Ask,
        (requested, track): (usize, Option<Track>),
    ) -> Result<Option<NonNull<u8>>, Fault> {
        let Some(mut stock) = self.stock_of(cache) else {
            return Ok(None);
        };
        self.take_back(cache, &mut stock);
        let mut slot = [null_mut()];
        if stock.slabs.take(cache, ask, &mut slot) == 0 {
            return Ok(None);
        }
        stock.count(SlabEvent::Refilled, 1);
        let slot = slot[0];
        // SAFETY: `take` removed the slot from its slab's free objects under the lock, so this
        // thread owns it.
        unsafe {
            let (start, nth, _) = (*slab_of(slot)).state(cache, slot);
            if let Some(fault) = plan.fault(slot, (start, nth, false), true) {
                return Err(fault);
            }
            plan.set_used(slot, requested);
            plan.set_track(slot, 0, || track.unwrap_or(Track::NOBODY));
        }
        Ok(NonNull::new(slot))
    }

    /// Calls `f` under the lock. If this is a signal handler that interrupted the lock's holder,
    /// calls `f` without the lock.
    pub(in crate::slab) fn locked(&self, f: impl FnOnce()) {
        let _stock = self.stock_after_fork();
        f();
    }

    /// Frees a debugged cache's object if it is in use and the bytes around it are intact.
    /// Otherwise returns the fault. If the lock cannot be had, sets the object aside.
    ///
    /// # Safety
    ///
    /// `slot` begins a slot of one of this node's slabs of the cache. The caller gives the object
    /// up, if it is in use.
    pub(in crate::slab) unsafe fn free_debugged(
        &self,
        cache: &Cache,
        plan: &Plan,
        slot: *mut u8,
        track: Option<Track>,
    ) -> Result<(), Fault> {
        let Some(mut stock) = self.stock() else {
            self.set_aside(cache, slot);
            return Ok(());
        };
        self.take_back(cache, &mut stock);
        // SAFETY: the caller promises that the slot is in one of this node's slabs, and the lock
        // keeps the slab's state from changing.
        let (start, nth, free) = unsafe { (*slab_of(slot)).state(cache, slot) };
        if free {
            return Err(Fault {
                kind: Kind::DoubleFree,
                slot,
                place: (start, nth, false),
                bytes: None,
                // SAFETY: the slot is in one of the cache's slabs, and the lock keeps other threads
                // from writing its tracks.
                tracks: unsafe { plan.tracks(slot) },
            });
        }
        // SAFETY: the slot was found in use above, and its user gave it up, so this thread owns it.
        unsafe {
            if let Some(fault) = plan.fault(slot, (start, nth, true), true) {
                return Err(fault);
            }
            plan.set_free(slot);
            plan.set_track(slot, 1, || track.unwrap_or(Track::NOBODY));
            stock.count(SlabEvent::Flushed, 1);
            stock.slabs.give(cache, &[slot]);
        }
        Ok(())
    }

    /// Adds this node's faults of a debugged cache to `faults`: with `leaks` the objects in use,
    /// else the slots whose bytes are wrong.
    pub(in crate::slab) fn look_over(
        &self,
        cache: &Cache,
        plan: &Plan,
        leaks: bool,
        faults: &mut Faults,
    ) {
        let Some(mut stock) = self.stock_after_fork() else {
            return;
        };
        self.take_back(cache, &mut stock);
        stock.slabs.for_each_slot(cache, |slot, place| {
            if leaks && place.2 {
                faults.add(Fault {
                    kind: Kind::Leaked,
                    slot,
                    place,
                    bytes: None,
                    // SAFETY: `for_each_slot` passes slots of this cache's slabs, and the lock
                    // keeps other threads from writing their tracks.
                    tracks: unsafe { plan.tracks(slot) },
                });
            } else if !leaks
                // SAFETY: the holder of the lock owns the free slots. Of a slot in use, `fault`
                // touches only the bytes that the user may not touch.
                && let Some(fault) = unsafe { plan.fault(slot, place, true) }
            {
                faults.add(fault);
            }
        });
    }
}
