//! Tracks *transfers*: threads that are moving sheaves of deferred objects from one place to
//! another.
//!
//! A thread that waits for all deferred objects of a cache checks the lists where the objects'
//! sheaves wait. It would miss a sheaf that another thread has in hand: one that is out of a CPU's
//! unit but not yet on a list, or off a list but not yet at its node. So each transfer has an entry
//! here:
//!
//! 1. Before the sheaf leaves the unit, or while the list is locked, the thread that moves the
//!    sheaf calls [`begin`], which makes an entry.
//! 2. That thread moves the sheaf.
//! 3. That thread drops the [`Transfer`], which removes the entry.
//! 4. A thread that waits for deferred objects calls [`await_others`], which waits until the
//!    entries that it finds are gone.
//!
//! A thread does not wait for its own entries. A signal handler, or the handler of a report, may
//! run while its own thread is in step 2. If it waited for that thread's entry, it would wait
//! forever.

use crate::cache_units::CacheId;
use crate::sys;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64};
use pinfold_rseq::thread_pointer;

/// The most transfers that have entries at once. Further transfers have no entry, so `await_others`
/// may return before they end.
const HANDS: usize = 256;
/// Microseconds between two loads of an entry.
const NAP: u32 = 100;
/// An entry is 0, or three parts:
///
/// | bits | part |
/// |---|---|
/// | 0 … 47 | the thread pointer |
/// | 48 … 51 | a number that differs between a thread's transfers |
/// | 52 … 63 | the cache's number |
static ENTRIES: [AtomicU64; HANDS] = [const { AtomicU64::new(0) }; HANDS];
const THREAD: u64 = (1 << 48) - 1;
const WAY_SHIFT: u32 = 48;
const WAYS: u32 = 16;
const CACHE_SHIFT: u32 = 52;

/// A transfer that is under way. Dropping this value ends the transfer.
pub(crate) struct Transfer(Option<&'static AtomicU64>);

/// Makes an entry for a transfer of sheaves of the cache with number `id`.
pub(crate) fn begin(id: CacheId) -> Transfer {
    static WAY: AtomicU32 = AtomicU32::new(0);
    let me = thread_pointer() as u64;
    let way = u64::from(WAY.fetch_add(1, Relaxed) % WAYS) << WAY_SHIFT;
    let entry = u64::from(id.entry()) << CACHE_SHIFT | way | me & THREAD;
    // Different threads start their search at different words, so that most find a free word at
    // once.
    let first = (me >> 12) as usize % HANDS;
    let words = ENTRIES[first..].iter().chain(&ENTRIES[..first]);
    let free = |word: &&AtomicU64| {
        // Acquire orders the moves of the sheaf after the entry. Each move publishes with a release
        // or under a lock. So a thread that sees that the sheaf has left its old place also finds
        // the entry.
        let taken = word.load(Relaxed) == 0;
        taken && word.compare_exchange(0, entry, Acquire, Relaxed).is_ok()
    };
    Transfer(words.into_iter().find(free))
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let Some(word) = self.0 {
            // Release pairs with the acquire in `await_others`: a thread that sees that the entry
            // is gone finds the sheaf in its new place.
            word.store(0, Release);
        }
    }
}

/// Waits until other threads have ended the transfers of the cache's sheaves that are under way
/// now.
pub(crate) fn await_others(id: CacheId) {
    let me = thread_pointer() as u64 & THREAD;
    for word in &ENTRIES {
        let entry = word.load(Acquire);
        let is_others = entry >> CACHE_SHIFT == u64::from(id.entry()) && entry & THREAD != me;
        while is_others && word.load(Acquire) == entry {
            sys::sleep_microseconds(NAP);
        }
    }
}

/// Removes the entries of threads that do not exist in the child after a fork. The sheaves that
/// these threads had in hand are lost to the child.
pub(crate) fn fork_child() {
    let me = thread_pointer() as u64 & THREAD;
    for word in &ENTRIES {
        if word.load(Relaxed) & THREAD != me {
            word.store(0, Relaxed);
        }
    }
}
