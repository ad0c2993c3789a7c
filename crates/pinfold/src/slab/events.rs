//! What the slow paths of a cache count on a node.
//!
//! The words are the node's own at first. `PINFOLD_STATS` has the caches of the size classes count
//! in the statistics segment instead, which other processes can read.

use super::node::{Node, Stock};
use crate::segment::{EVENTS, NodeEvents, SlabEvent};
use core::sync::atomic::Ordering::{Acquire, Release};

impl Node {
    /// Counts an event that needs no lock.
    pub(super) fn count(&self, event: SlabEvent, n: usize) {
        debug_assert!(!event.is_locked());
        self.events().add(event, n);
    }

    fn events(&self) -> &NodeEvents {
        // SAFETY: `new` and `count_in` store addresses of words that stay. Acquire pairs with the
        // release in `count_in`.
        unsafe { &*self.events.load(Acquire) }
    }

    /// Adds what has been counted here to `counts`. Takes no lock.
    pub(super) fn add_events(&self, counts: &mut [u64; EVENTS]) {
        self.events().add_to(counts);
        // A thread that was about to count while `count_in` moved the counts adds to the old words.
        if !core::ptr::eq(self.events(), self.own_events) {
            self.own_events.add_to(counts);
        }
    }

    /// Counts in `words` from now on, and moves there what was counted before. Does nothing in a
    /// signal handler that interrupted the holder of the lock.
    pub(super) fn count_in(&self, words: &'static NodeEvents) {
        let Some(mut stock) = self.stock_after_fork() else {
            return;
        };
        if core::ptr::eq(self.events(), words) {
            return;
        }
        self.events().move_to(words);
        stock.slabs.events = words;
        // Release pairs with the acquire in `events`.
        self.events
            .store(core::ptr::from_ref(words).cast_mut(), Release);
    }
}

impl Stock {
    /// Counts an event that needs the lock.
    pub(super) fn count(&self, event: SlabEvent, n: usize) {
        debug_assert!(event.is_locked());
        self.slabs.events.add(event, n);
    }
}

#[cfg(test)]
mod tests {
    use super::super::KmemCache;
    use super::*;
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
            // SAFETY: each came from this cache and is not used afterwards.
            objects
                .into_iter()
                .for_each(|object| unsafe { cache.free(object) });
        };
        let [node] = cache.descriptor.nodes() else {
            // The thread may count on one node and then on another.
            return;
        };
        use_it();
        let mut before = cache.statistics();
        assert!(before.alloc_slowpath > 0 && before.refilled > 0 && before.slab_alloc > 0);
        // To the first words, to the others, and to where they are already.
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
        // A thread that had loaded the address of the old words counts there.
        node.own_events.add(SlabEvent::FreeRemote, 3);
        assert_eq!(cache.statistics().free_remote, 3);
    }
}
