//! Mappings of freed huge blocks that wait while a thread has isolated its CPU.
//!
//! To unmap a block, the kernel interrupts each CPU that runs the process. So while a CPU is
//! isolated (`spared`), a freed huge block stays mapped, up to [`MOST`] bytes and [`PLACES`] blocks
//! in all. When no CPU is isolated any more, the blocks are unmapped.
//!
//! # Places
//!
//! A signal handler may free a huge block at any point. So the table has no lock. A place is free
//! (address 0), claimed ([`CLAIMED`]), or has a mapping. Only the thread that made a place claimed
//! accesses its size.
//!
//! | from | to | by |
//! |---|---|---|
//! | free | claimed | a compare-exchange in [`Waiting::put`] |
//! | claimed | a mapping | [`Waiting::put`], after the size is written |
//! | a mapping | claimed | a compare-exchange in [`Waiting::take_all`] |
//! | claimed | free | [`Waiting::take_all`], after the size is read |
//!
//! A thread that puts a mapping here looks afterwards whether a CPU is still isolated. A thread
//! that ends the last isolation looks afterwards what waits. There is a fence between the two steps
//! of both. So at least one of them unmaps. `model_waiting.rs` explores the orders.
//!
//! The child of a fork has the mappings that waited, and unmaps them at its first tick, `trim` or
//! free of a huge block. A mapping that another thread was putting in or taking out is lost to the
//! child, and stays in its counts.

use super::primitive::{AtomicUsize, PLACES, fence};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// The most bytes that wait.
pub(super) const MOST: usize = 1 << 30;
/// Stands for an address in a place that a thread has claimed. No mapping begins there.
const CLAIMED: usize = 1;

pub(super) struct Place {
    pub(super) address: AtomicUsize,
    pub(super) size: AtomicUsize,
}

/// The mappings that wait.
pub(super) struct Waiting {
    pub(super) places: [Place; PLACES],
    /// The bytes that wait, or for which a thread seeks a place.
    pub(super) bytes: AtomicUsize,
}

impl Waiting {
    /// Lets a mapping wait. Returns false, and does nothing, if there is no room. After success,
    /// the caller must look whether the mapping still has to wait, and else call
    /// [`take_all`](Self::take_all).
    pub(super) fn put(&self, address: usize, size: usize) -> bool {
        // Relaxed: the number alone matters.
        let more = |bytes: usize| Some(bytes + size).filter(|&bytes| bytes <= MOST);
        if self.bytes.fetch_update(Relaxed, Relaxed, more).is_err() {
            return false;
        }
        let free = |place: &&Place| {
            // Acquire pairs with the release in `take_all`: the size was read before the place was
            // free.
            let claim = place.address.compare_exchange(0, CLAIMED, Acquire, Relaxed);
            claim.is_ok()
        };
        let Some(place) = self.places.iter().find(free) else {
            self.bytes.fetch_sub(size, Relaxed);
            return false;
        };
        place.size.store(size, Relaxed);
        // Release pairs with the acquire in `take_all`, which then sees the size.
        place.address.store(address, Release);
        // Pairs with the fence in `take_all`: either that call finds the mapping, or the caller
        // sees the end of the isolation.
        fence(SeqCst);
        true
    }

    /// Takes all mappings out, and calls `each` with the address and the size of each one. Costs a
    /// fence and a load if nothing waits.
    pub(super) fn take_all(&self, mut each: impl FnMut(usize, usize)) {
        // Pairs with the fence in `put`.
        fence(SeqCst);
        if self.bytes.load(Relaxed) == 0 {
            return;
        }
        for place in &self.places {
            let address = place.address.load(Relaxed);
            // Acquire pairs with the release in `put`.
            let claim = || {
                place
                    .address
                    .compare_exchange(address, CLAIMED, Acquire, Relaxed)
            };
            if address <= CLAIMED || claim().is_err() {
                continue;
            }
            let size = place.size.load(Relaxed);
            // Release pairs with the acquire in `put`.
            place.address.store(0, Release);
            each(address, size);
            self.bytes.fetch_sub(size, Relaxed);
        }
    }
}
