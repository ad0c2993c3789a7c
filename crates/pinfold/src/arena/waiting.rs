//! Mappings of freed huge blocks that wait while a thread has isolated its CPU.
//!
//! To unmap a block, the kernel interrupts each CPU that runs the process. So while a CPU is
//! isolated (`spared`), a freed huge block stays mapped, up to [`MOST`] bytes and [`PLACES`] blocks
//! in all. When no CPU is isolated any more, [`unmap_all`] unmaps them.
//!
//! # Places
//!
//! A signal handler may free a huge block at any point. So the table has no lock. A place is free
//! (address 0), claimed ([`CLAIMED`]), or has a mapping. Only the thread that made a place claimed
//! accesses its size.
//!
//! | from | to | by |
//! |---|---|---|
//! | free | claimed | a compare-exchange in [`put`] |
//! | claimed | a mapping | [`put`], after the size is written |
//! | a mapping | claimed | a compare-exchange in [`unmap_all`] |
//! | claimed | free | [`unmap_all`], after the size is read |
//!
//! A thread that puts a mapping here and a thread that ends the last isolation write first and then
//! look at what the other one wrote, with a fence in between. So at least one of them unmaps.
//!
//! In the child of a fork, a place that another thread had claimed stays claimed. Its mapping is
//! lost to the child.

use super::budget;
use crate::{spared, sys};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::fence;

/// The most bytes that wait.
const MOST: usize = 1 << 30;
/// The most mappings that wait.
const PLACES: usize = 64;
/// Stands for an address in a place that a thread has claimed. No mapping begins there.
const CLAIMED: usize = 1;

struct Place {
    address: AtomicUsize,
    size: AtomicUsize,
}

static TABLE: [Place; PLACES] = [const {
    Place {
        address: AtomicUsize::new(0),
        size: AtomicUsize::new(0),
    }
}; PLACES];

/// The bytes that wait, or for which a thread seeks a place.
static BYTES: AtomicUsize = AtomicUsize::new(0);

/// Lets a mapping wait if a CPU is isolated and there is room. Returns false, and does nothing, if
/// the caller must unmap it now. `held` is the memory that the process holds.
///
/// Also returns false near a limit, and if the user has limited how much free memory stays.
pub(super) fn put(address: *mut u8, size: usize, held: u64) -> bool {
    if !spared::any() || budget::dirty_limit().is_some() || budget::near(held as usize, 0) {
        return false;
    }
    // Relaxed: the number alone matters.
    let more = |bytes: usize| Some(bytes + size).filter(|&bytes| bytes <= MOST);
    if BYTES.fetch_update(Relaxed, Relaxed, more).is_err() {
        return false;
    }
    // Acquire pairs with the release in `unmap_all`: the size was read before the place was free.
    let free = TABLE.iter().find(|place| {
        place
            .address
            .compare_exchange(0, CLAIMED, Acquire, Relaxed)
            .is_ok()
    });
    let Some(place) = free else {
        BYTES.fetch_sub(size, Relaxed);
        return false;
    };
    place.size.store(size, Relaxed);
    // Release pairs with the acquire in `unmap_all`, which then sees the size.
    place.address.store(address as usize, Release);
    // Pairs with the fence in `unmap_all`, between the end of an isolation and its look here.
    fence(SeqCst);
    true
}

/// Unmaps what waits. Calls `unmapped` with the size of each mapping. Costs a load if nothing
/// waits, and else a system call for each mapping.
pub(super) fn unmap_all(mut unmapped: impl FnMut(usize)) {
    // Pairs with the fence in `put`, between its store of the address and the look at `spared`.
    fence(SeqCst);
    if BYTES.load(Relaxed) == 0 {
        return;
    }
    for place in &TABLE {
        let address = place.address.load(Relaxed);
        // Acquire pairs with the release in `put`.
        if address <= CLAIMED
            || place
                .address
                .compare_exchange(address, CLAIMED, Acquire, Relaxed)
                .is_err()
        {
            continue;
        }
        let size = place.size.load(Relaxed);
        // Release pairs with the acquire in `put`.
        place.address.store(0, Release);
        // SAFETY: `put` got the mapping from its last owner, and the exchange gave it to this
        // thread alone.
        unsafe { sys::unmap(address as *mut u8, size) };
        BYTES.fetch_sub(size, Relaxed);
        unmapped(size);
    }
}
