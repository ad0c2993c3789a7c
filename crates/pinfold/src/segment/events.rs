//! The events that the slow paths of a cache count, and the words that hold the counts.

use crate::vmstat::Item;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

crate::vmstat_items! {
    /// An event in the slow paths of a cache, with the kernel's name.
    ///
    /// [`SlabEvent::is_locked`] tells whether the node's lock is held for it. The order of the
    /// events is by cache line: those without a lock, rare ones, and those that a holder of the
    /// lock counts together.
    pub enum SlabEvent {
        /// Allocations that found the sheaf empty, and took no lock.
        AllocLockless = "alloc_lockless",
        /// Frees that found the sheaf full, and took no lock.
        FreeLockless = "free_lockless",
        /// Objects allocated from another node's memory than the caller wanted.
        AllocNodeMismatch = "alloc_node_mismatch",
        /// Objects freed on another node than their own, and returned to their own.
        FreeRemote = "free_remote",
        /// Objects of deferred frees, in sheaves that wait for readers or have waited.
        FreeRcuSheaf = "free_rcu_sheaf",
        /// Objects lost because there was no memory for a sheaf in which they could wait.
        FreeRcuSheafFail = "free_rcu_sheaf_fail",
        /// Slabs made.
        SlabAlloc = "slab_alloc",
        /// Slabs given back to the arena.
        SlabFree = "slab_free",
        /// Allocations that found the sheaf empty, except those that
        /// [`AllocLockless`](Self::AllocLockless) counts.
        AllocSlowpath = "alloc_slowpath",
        /// Frees that found the sheaf full, except those that [`FreeLockless`](Self::FreeLockless)
        /// counts.
        FreeSlowpath = "free_slowpath",
        /// Full sheaves taken from the barn.
        BarnGet = "barn_get",
        /// How often the barn had no full sheaf to give.
        BarnGetFail = "barn_get_fail",
        /// Full sheaves put into the barn.
        BarnPut = "barn_put",
        /// How often a full sheaf was flushed because the barn had enough of them.
        BarnPutFail = "barn_put_fail",
        /// Objects taken from slabs, into sheaves or directly to a caller.
        Refilled = "refilled",
        /// Not a count of events, but a level: the objects in the barn's full sheaves now.
        BarnObjects = "barn_objects",
        /// Objects taken from slabs into sheaves.
        SheafRefill = "sheaf_refill",
        /// Objects given back to slabs, from sheaves or directly from a caller.
        Flushed = "flushed",
        /// Objects given back to slabs from sheaves.
        SheafFlush = "sheaf_flush",
        /// Slabs that were full until an object was given back.
        FreeAddPartial = "free_add_partial",
        /// Slabs whose last object was given back.
        FreeRemovePartial = "free_remove_partial",
    }
}

impl SlabEvent {
    /// Returns whether only the thread that holds the node's lock counts this event. Also returns
    /// true for the [level](Self::BarnObjects).
    pub const fn is_locked(self) -> bool {
        self as usize >= SlabEvent::SlabAlloc as usize
    }
}

/// The number of [`SlabEvent`]s.
pub const EVENTS: usize = SlabEvent::NAMES.len();

/// The events of one cache on one node: one word for each [`SlabEvent`], by number.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct NodeEvents([AtomicU64; EVENTS]);

impl NodeEvents {
    /// Returns a row with all words at 0.
    pub(crate) const fn new() -> NodeEvents {
        NodeEvents([const { AtomicU64::new(0) }; EVENTS])
    }

    /// Adds `n` to `event`.
    ///
    /// Costs an atomic add, or a load and a store for an event that [is
    /// locked](SlabEvent::is_locked). For such an event the caller holds the node's lock, so no
    /// other thread writes the word.
    #[inline]
    pub(crate) fn add(&self, event: SlabEvent, n: usize) {
        let word = &self.0[event as usize];
        if event.is_locked() {
            word.store(word.load(Relaxed).wrapping_add(n as u64), Relaxed);
        } else {
            word.fetch_add(n as u64, Relaxed);
        }
    }

    /// Subtracts `n`, which was added before, from a level. The caller holds the node's lock.
    pub(crate) fn sub(&self, level: SlabEvent, n: usize) {
        self.add(level, n.wrapping_neg());
    }

    /// Adds each count to its place in `counts`.
    pub(crate) fn add_to(&self, counts: &mut [u64; EVENTS]) {
        for (count, word) in counts.iter_mut().zip(&self.0) {
            *count = count.wrapping_add(word.load(Relaxed));
        }
    }

    /// Sets all words to 0.
    pub(crate) fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Relaxed));
    }

    /// Moves the counts to `to`, and sets them to 0 here. The caller holds the node's lock.
    pub(crate) fn move_to(&self, to: &NodeEvents) {
        for (from, to) in self.0.iter().zip(&to.0) {
            to.fetch_add(from.swap(0, Relaxed), Relaxed);
        }
    }
}
