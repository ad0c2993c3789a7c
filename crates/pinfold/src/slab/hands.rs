//! Who has sheaves of deferred objects in hand: between a CPU's unit and the list where they wait, or between that list and their node.
//!
//! Whoever waits for all deferred objects of a cache waits for those who are on the way at that moment, but not for itself: a report's
//! handler, or a signal's, may be above such a way in its own thread.

use super::deferred::BETWEEN_LOOKS;
use crate::sys;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64};
use pinfold_rseq::thread_pointer;

/// Ways at a time that are known of; of those beyond, somebody who waits may miss what is on them.
const HANDS: usize = 256;
/// An entry is 0, or the thread's pointer, and above it a number that tells its ways apart and the cache's number.
static ENTRIES: [AtomicU64; HANDS] = [const { AtomicU64::new(0) }; HANDS];
const THREAD: u64 = (1 << 48) - 1;
const WAY_SHIFT: u32 = 48;
const WAYS: u32 = 16;
const CACHE_SHIFT: u32 = 52;

/// A way, until dropped.
pub(super) struct Hand(Option<&'static AtomicU64>);

/// Begins a way with sheaves of the cache with number `slot`.
pub(super) fn begin(slot: u16) -> Hand {
    static WAY: AtomicU32 = AtomicU32::new(0);
    let me = thread_pointer() as u64;
    let way = u64::from(WAY.fetch_add(1, Relaxed) % WAYS) << WAY_SHIFT;
    let entry = u64::from(slot) << CACHE_SHIFT | way | me & THREAD;
    // Threads begin their search apart, so that most find their place at once.
    let first = (me >> 12) as usize % HANDS;
    let places = ENTRIES[first..].iter().chain(&ENTRIES[..first]);
    let free = |place: &&AtomicU64| {
        // Acquire: what follows on the way is not seen before the entry by who looks for it with acquire.
        let taken = place.load(Relaxed) == 0;
        taken && place.compare_exchange(0, entry, Acquire, Relaxed).is_ok()
    };
    Hand(places.into_iter().find(free))
}

impl Drop for Hand {
    fn drop(&mut self) {
        if let Some(place) = self.0 {
            // Release pairs with the acquire in `await_others`: it finds the objects where they were put.
            place.store(0, Release);
        }
    }
}

/// Waits until every way of another thread with sheaves of that cache, of those that are under way now, is over.
pub(super) fn await_others(slot: u16) {
    let me = thread_pointer() as u64 & THREAD;
    for place in &ENTRIES {
        let entry = place.load(Acquire);
        let is_others = entry >> CACHE_SHIFT == u64::from(slot) && entry & THREAD != me;
        while is_others && place.load(Acquire) == entry {
            sys::sleep_microseconds(BETWEEN_LOOKS);
        }
    }
}

/// In the child: the other threads are gone, and what they had in hand with them.
pub(super) fn fork_child() {
    let me = thread_pointer() as u64 & THREAD;
    for place in &ENTRIES {
        if place.load(Relaxed) & THREAD != me {
            place.store(0, Relaxed);
        }
    }
}
