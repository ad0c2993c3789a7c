//! The events that the slow paths of a cache count on a node.
//!
//! | event | who writes its word |
//! |---|---|
//! | [is locked](SlabEvent::is_locked) | the holder of the node's lock, with a load and a store |
//! | other | any thread, with an atomic add |
//!
//! At first, the words are the node's own. Where the process has a statistics segment, the cache
//! counts there instead ([`Descriptor::show`]). Other processes can read that segment.

use crate::arena::GRANULE;
use crate::segment::{self, EVENTS, NodeEvents, SlabEvent};
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::cache::registry;
use crate::slab::node::part::{Node, Stock};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Shows all caches in the statistics segment. Call it once, after the segment was installed. A
/// cache that is made later shows itself.
pub fn show_all() {
    registry::for_each(Descriptor::show);
}

impl Descriptor {
    /// Fills in the cache's row of the statistics segment. From then on, the cache's slow paths
    /// count there. Does nothing if there is no segment, or no row for the cache.
    pub(crate) fn show(&self) {
        let Some((row, events)) = segment::row(self.id.position()) else {
            return;
        };
        let state = row.state.load(Relaxed);
        // Release, for a reader that compares the states before and after it has read the row.
        row.state.store(state | 1, Release);
        row.set_name(self.name());
        row.object.store(self.object as u32, Relaxed);
        row.size.store(self.geometry.size as u32, Relaxed);
        row.per_slab.store(self.geometry.per_slab as u32, Relaxed);
        row.slab
            .store((self.geometry.granules * GRANULE) as u32, Relaxed);
        let capacity = self.slot_layout.is_none().then(|| self.capacity());
        row.sheaf_capacity
            .store(capacity.unwrap_or(0) as u32, Relaxed);
        for (node, words) in self.nodes().iter().zip(events) {
            node.count_in(words);
        }
        self.show_more();
        row.state.store((state & !3) | 2, Release);
    }

    /// Empties the cache's row of the statistics segment. The caller has seen that no object is in
    /// use, and holds the registry's lock.
    pub(crate) fn hide(&self) {
        if let Some((row, events)) = segment::row(self.id.position()) {
            let state = row.state.load(Relaxed);
            row.state.store((state & !3).wrapping_add(4), Release);
            events.iter().for_each(NodeEvents::clear);
            let more = self.more().iter();
            more.for_each(|part| _ = part.count_in(part.own_events));
            segment::give_split_rows(self.id.position());
        }
    }

    /// Makes the parts of a split cache count in the statistics segment, if it has rows for them.
    pub(crate) fn show_more(&self) {
        if !self.is_split() || self.id.position() >= segment::CACHES {
            return;
        }
        let mut next = 0;
        for part in self.more() {
            // A part that counts elsewhere has a row.
            if !core::ptr::eq(part.events(), part.own_events) {
                continue;
            }
            let node = part.number() % self.nodes().len();
            let Some((row, at)) = segment::claim_split_row(self.id.position(), node, next) else {
                return;
            };
            next = at + 1;
            if !part.count_in(&row.events) {
                row.cache.store(0, Relaxed);
            }
        }
    }
}

impl Node {
    /// Adds `n` to the count of an event that is counted without the node's lock.
    pub(crate) fn count(&self, event: SlabEvent, n: usize) {
        debug_assert!(!event.is_locked());
        self.events().add(event, n);
    }

    fn events(&self) -> &NodeEvents {
        // SAFETY: `new` and `count_in` store addresses of words that are never freed. Acquire pairs
        // with the release in `count_in`: a thread that sees the new address also sees the moved
        // counts there.
        unsafe { &*self.events.load(Acquire) }
    }

    /// Adds the node's counts to `counts`. Takes no lock.
    pub(crate) fn add_events(&self, counts: &mut [u64; EVENTS]) {
        self.events().add_to(counts);
        // A thread may have loaded the address of the node's own words before `count_in` moved the
        // counts, and may have added to these words afterwards.
        if !core::ptr::eq(self.events(), self.own_events) {
            self.own_events.add_to(counts);
        }
    }

    /// Makes the slow paths count in `words` from now on, and moves the counts so far into `words`.
    /// Does nothing, and returns false, in a signal handler that may not wait for the node's lock.
    pub(crate) fn count_in(&self, words: &'static NodeEvents) -> bool {
        let Some(mut stock) = self.stock_after_fork() else {
            return false;
        };
        if core::ptr::eq(self.events(), words) {
            return true;
        }
        self.events().move_to(words);
        stock.slabs.events = words;
        // Release pairs with the acquire in `events`: a thread that sees the new address also sees
        // the moved counts there.
        self.events
            .store(core::ptr::from_ref(words).cast_mut(), Release);
        true
    }
}

impl Stock {
    /// Adds `n` to the count of an event that is counted under the node's lock. The caller holds
    /// the lock, without which it cannot reach `self`.
    pub(crate) fn count(&self, event: SlabEvent, n: usize) {
        debug_assert!(event.is_locked());
        self.slabs.events.add(event, n);
    }

    /// Subtracts `n`, which was added before, from a level.
    pub(crate) fn discount(&self, level: SlabEvent, n: usize) {
        debug_assert!(level.is_locked());
        self.slabs.events.sub(level, n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::KmemCache;
    use core::alloc::Layout;
    use std::boxed::Box;
    use std::vec::Vec;

    #[test]
    fn counts_move_to_other_words_and_none_is_lost() {
        let cache = KmemCache::new("moving", Layout::new::<[u64; 8]>()).unwrap();
        let words: &[NodeEvents] = Box::leak(Box::new([const { NodeEvents::new() }; 2]));
        let there = |words: &NodeEvents| {
            let mut counts = [0; EVENTS];
            words.add_to(&mut counts);
            counts
        };
        let use_it = || {
            let objects: Vec<_> = (0..2000).map(|_| cache.alloc().unwrap()).collect();
            // SAFETY: each object came from this cache and is not used afterwards.
            objects
                .into_iter()
                .for_each(|object| unsafe { cache.free(object) });
        };
        let [node] = cache.descriptor.nodes() else {
            // With several nodes, the thread may count on one node and then on another.
            return;
        };
        use_it();
        let mut before = cache.statistics();
        assert!(before.alloc_slowpath > 0 && before.refilled > 0 && before.slab_alloc > 0);
        // Moves the counts to the first words, then to the second words, then to the second words
        // again.
        for at in [0, 1, 1] {
            node.count_in(&words[at]);
            assert_eq!(cache.statistics(), before);
            use_it();
            let now = cache.statistics();
            assert!(now.alloc_slowpath > before.alloc_slowpath);
            let counts = there(&words[at]);
            let slow = [SlabEvent::AllocSlowpath, SlabEvent::AllocLockless];
            let slow = slow.map(|event| counts[event as usize]);
            assert_eq!(slow[0] + slow[1], now.alloc_slowpath);
            assert_eq!(counts[SlabEvent::Refilled as usize], now.refilled);
            assert_eq!(counts[SlabEvent::SlabAlloc as usize], now.slab_alloc);
            before = now;
        }
        assert_eq!(there(&words[0]), [0; EVENTS]);
        // Counts in the old words, as a thread does if it loaded their address before the move.
        node.own_events.add(SlabEvent::FreeRemote, 3);
        assert_eq!(cache.statistics().free_remote, 3);
    }

    #[test]
    fn the_level_of_the_barns_follows_every_way_in_and_out() {
        let cache = KmemCache::new("level", Layout::new::<[u64; 8]>()).unwrap();
        let check = || {
            let info = cache.info();
            let usage = info.usage();
            let level = info.counts()[SlabEvent::BarnObjects as usize];
            assert_eq!(level, usage.barn_objects as u64);
            usage.barn_objects
        };
        let mut largest = 0;
        for count in [2000, 300, 40] {
            let objects: Vec<_> = (0..count).map(|_| cache.alloc().unwrap()).collect();
            largest = largest.max(check());
            for object in objects {
                // SAFETY: the object came from this cache and is not used afterwards.
                unsafe { cache.free(object) };
            }
            largest = largest.max(check());
            // Twice, because the first call only notes what is idle.
            for now in [1000, 2000] {
                for part in cache.descriptor.parts() {
                    while part.release_idle(cache.descriptor, now + count as u32) {}
                }
                check();
            }
        }
        assert!(largest > 0);
        cache.shrink().unwrap();
        assert_eq!(check(), 0);
    }
}
