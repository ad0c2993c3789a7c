//! What a debugged cache does at its node, with the lock held: slots change hands whole, marked as what they are from then on.

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
    /// Takes a slot of a debugged cache, and marks its object as in use for so many bytes and by whom; none when the system has no
    /// memory. A slot that was written to while it was free is taken and is the fault.
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
        // SAFETY: the slot was free and is ours now.
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

    /// Calls `f` with the lock held, or without where a handler interrupted its holder.
    pub(in crate::slab) fn locked(&self, f: impl FnOnce()) {
        let _stock = self.stock_after_fork();
        f();
    }

    /// Takes a debugged cache's object back, if it is in use and nobody wrote around it.
    ///
    /// # Safety
    ///
    /// The slot is one of this node's slabs of the cache.
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
        // SAFETY: the caller's promise; the lock is held.
        let (start, nth, free) = unsafe { (*slab_of(slot)).state(cache, slot) };
        if free {
            return Err(Fault {
                kind: Kind::DoubleFree,
                slot,
                place: (start, nth, false),
                bytes: None,
                // SAFETY: the slot is one of the cache's; the lock is held.
                tracks: unsafe { plan.tracks(slot) },
            });
        }
        // SAFETY: the object is in use, and its user has given it up.
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

    /// Notes the faults of a debugged cache's objects here, or (`leaks`) which are in use.
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
                    // SAFETY: as below.
                    tracks: unsafe { plan.tracks(slot) },
                });
            } else if !leaks
                // SAFETY: free slots are the lock holder's; of those in use only the bytes around the object are touched.
                && let Some(fault) = unsafe { plan.fault(slot, place, true) }
            {
                faults.add(fault);
            }
        });
    }
}
