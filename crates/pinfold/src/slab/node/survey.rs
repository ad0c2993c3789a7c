//! Counts and checks the slabs, sheaves and objects that a node holds for a cache.

use super::look::Reading;
use super::part::Node;
use super::slabs::slab_of;
use crate::segment::{EVENTS, SlabEvent};
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::cpu::sheaf::SheafList;

impl Node {
    /// Returns how many objects are not free in their slab: those that callers, CPUs' sheaves or
    /// the barn hold.
    pub(crate) fn in_use(&self, cache: &Descriptor) -> usize {
        self.stock_after_fork()
            .map_or(0, |stock| stock.slabs.in_use(cache))
    }

    /// Returns how many slabs the node has, and how many of their objects are not free in their
    /// slab.
    pub(crate) fn count_and_in_use(&self, cache: &Descriptor) -> (usize, usize) {
        self.stock_after_fork().map_or((0, 0), |stock| {
            (stock.slabs.count, stock.slabs.in_use(cache))
        })
    }

    /// Returns how many slabs the part has, and how many of their objects are not free in their
    /// slab, from the counts of events. Takes no lock, so the numbers are approximate while other
    /// threads use the part.
    pub(crate) fn count_and_in_use_now(&self) -> (usize, usize) {
        let mut counts = [0; EVENTS];
        self.add_events(&mut counts);
        let apart = |more: SlabEvent, less: SlabEvent| {
            counts[more as usize].saturating_sub(counts[less as usize]) as usize
        };
        (
            apart(SlabEvent::SlabAlloc, SlabEvent::SlabFree),
            apart(SlabEvent::Refilled, SlabEvent::Flushed),
        )
    }

    /// Returns whether the node has no slab, no full sheaf and no object that is set aside. Returns
    /// false if the lock cannot be taken.
    pub(crate) fn is_bare(&self) -> bool {
        self.stock_after_fork().is_some_and(|stock| {
            let has_none = stock.slabs.count == 0 && stock.full.length == 0;
            has_none && self.set_aside.is_empty()
        })
    }

    /// Adds to `reading` how many slabs this node has, how many full sheaves its barn has, how many
    /// objects are in both, and the node's counts of events.
    pub(crate) fn tally(&self, cache: &Descriptor, reading: &mut Reading) {
        let Some(mut stock) = self.stock_after_fork() else {
            return;
        };
        // The objects set aside are free, but their slabs still count them as in use.
        self.take_back(cache, &mut stock);
        reading.usage.barn_sheaves += stock.full.length;
        reading.usage.barn_objects += stock.full.objects();
        self.add_events(&mut reading.counts);
        stock.slabs.tally(cache, &mut reading.usage);
    }

    /// Checks the slabs' invariants, and that no object in the barn is also free in its slab.
    pub(crate) fn validate(&self, cache: &Descriptor) -> Result<(), (&'static str, *const u8)> {
        let Some(mut stock) = self.stock_after_fork() else {
            return Ok(());
        };
        stock.slabs.validate(cache)?;
        let mut looked_at = SheafList::new();
        let mut answer = Ok(());
        while let Some(mut sheaf) = stock.full.take() {
            for &mut object in sheaf.objects() {
                // SAFETY: the page map says that the object lies in a slab of this cache. The slab,
                // which may be of another part, stays while the barn holds the object.
                let free =
                    !cache.contains(object) || unsafe { slab_of(object).is_free(cache, object) };
                if free {
                    answer = Err(("object in the barn is free or foreign", object.cast_const()));
                }
            }
            looked_at.put(sheaf);
        }
        while let Some(sheaf) = looked_at.take() {
            stock.full.put(sheaf);
        }
        answer
    }
}
