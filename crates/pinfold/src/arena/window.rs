//! The window: the addresses in which the arenas' regions lie.
//!
//! A call of free gets only an address, and has to find the size class of the block. All regions
//! lie in one range of addresses, so that a subtraction and a shift turn an address into the number
//! of its entry in the page map. The window is far from the addresses at which the kernel maps by
//! itself. The window is not reserved: addresses that the arenas do not need are not mapped, and
//! count against no limit.
//!
//! ```text
//! window                    128 MiB                                  each region, 64 MiB
//! ┌──────────────────┬─────┬──────────┬──────────┬─────┐   ┌────────┬──────────┬──────────┐
//! │ page map         │     │ region 2 │ region 3 │  …  │   │ frames │ private  │ granules │
//! └──────────────────┴─────┴──────────┴──────────┴─────┘   └────────┴──────────┴──────────┘
//! ```
//!
//! * The page map has two bytes for each granule of the window. Only the part for the regions that
//!   exist is mapped.
//! * A region begins with its records. The granules behind them are mapped in steps, shortly before
//!   they are handed out.
//! * A region's last granule is never mapped, so that a write beyond the end of a block cannot
//!   reach the records of the next region.
//! * If the program has mapped something in the window, no region is made at those addresses.

use super::{
    GRANULE, HEADER, MAP, REGION, REGION_GRANULES, address_of, huge_pages, metadata, region_at,
};
use crate::lock::{Lock, Rank};
use crate::nodes::MAX_NODES;
use crate::sanitizer;
use crate::sys::{self, Mapped};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU8, AtomicUsize};

/// The largest size of the window, in bytes. With addresses of 39 bits the window is smaller.
pub(super) const MAX_WINDOW: usize = 4 << 40;
/// Bytes of page map that are mapped at a time: the entries of 32 regions.
const MAP_STEP: usize = 64 << 10;
/// The number of regions whose addresses the page map takes.
const MAP_REGIONS: usize = MAX_WINDOW / GRANULE * 2 / REGION;
/// Maximum number of addresses that `make_region` tries. A try fails if other code of the process
/// has mapped something there.
const TRIES: usize = 64;

/// The state that changes when a region is made.
pub(super) struct Regions {
    /// The next region's number; 0 until the window is chosen.
    next: usize,
    /// Bytes of the page map that are mapped.
    mapped: usize,
    /// Bytes of the window.
    size: usize,
    /// A caller's copy of the count ([`watch_count`]).
    copy: Option<&'static AtomicUsize>,
}

/// The regions. This lock is taken inside the lock of a node's arena.
pub(super) static REGIONS: Lock<Regions> = Lock::new(
    Rank::Regions,
    Regions {
        next: 0,
        mapped: 0,
        size: 0,
        copy: None,
    },
);

/// Marks a dense region in [`NODES`].
const DENSE: u8 = 1 << 7;
/// Marks a number in [`NODES`] that has a region.
const MADE: u8 = 1 << 6;
const _: () = assert!(MAX_NODES <= MADE as usize);

/// The node of each region's memory, [`MADE`], and [`DENSE`] for a dense region. 0 for no region.
static NODES: [AtomicU8; MAX_WINDOW / REGION] = [const { AtomicU8::new(0) }; MAX_WINDOW / REGION];

/// Makes a region for `node`, a dense one if `dense` is true, and maps only its records. Returns
/// the number of its first granule.
///
/// Returns `None` if the system has no memory or the window has no room, while another thread
/// forks, and in a signal handler that may not wait for the lock of the regions.
pub(super) fn make_region(node: usize, dense: bool) -> Option<u32> {
    let mut regions = REGIONS.lock_or_divert()?;
    if regions.next == 0 && !choose_window(&mut regions) {
        return None;
    }
    for _ in 0..TRIES {
        let number = regions.next;
        let end = (number + 1) * REGION;
        if end > regions.size || !map_entries(&mut regions, number + 1) {
            return None;
        }
        let at = region_at(number);
        // SAFETY: `next` says that no region was made here yet, and only the holder of this lock,
        // this thread, makes regions.
        match unsafe { sys::map_at(at, HEADER) } {
            Mapped::Done => metadata::mapped(HEADER),
            Mapped::Taken => {
                regions.next += 1;
                continue;
            }
            Mapped::NoMemory => return None,
        }
        regions.next += 1;
        NODES[number].store(node as u8 | MADE | if dense { DENSE } else { 0 }, Relaxed);
        // Release pairs with the acquire in `entry`: a thread that sees the count sees the entries.
        MAP.count.store(end / GRANULE, Release);
        if let Some(copy) = regions.copy {
            copy.store(end / GRANULE, Release);
        }
        return Some((number * REGION_GRANULES) as u32);
    }
    None
}

/// Chooses where the window is. Called at the start, because the choice asks the system for random
/// bytes, and a sandbox may forbid that system call later.
pub(super) fn choose() {
    if let Some(mut regions) = REGIONS.lock_or_divert() {
        // If the system has no memory now, `make_region` tries again.
        let _ = regions.next != 0 || choose_window(&mut regions);
    }
}

/// Stores in `copy` how many granules have entries, now and each time the number grows. For a
/// caller that looks entries up itself. Returns where the window begins, or `None` if the system
/// has no memory.
///
/// To look an address up:
///
/// 1. Subtract the window's beginning from the address, and divide by [`GRANULE`].
/// 2. If the result n is at least the count, the address has no entry.
/// 3. Otherwise the entry is the 16-bit word at 2 × n bytes from the window's beginning.
pub fn watch_count(copy: &'static AtomicUsize) -> Option<usize> {
    let mut regions = REGIONS.lock()?;
    if regions.next == 0 && !choose_window(&mut regions) {
        return None;
    }
    regions.copy = Some(copy);
    // Release pairs with an acquire load of the copy by the caller's threads: a thread that sees
    // the number also sees the entries.
    copy.store(MAP.count.load(Acquire), Release);
    Some(MAP.window.load(Relaxed))
}

/// Maps the page map's entries of the first `count` regions. Returns false if the system has no
/// memory.
fn map_entries(regions: &mut Regions, count: usize) -> bool {
    let needed = count * REGION_GRANULES * 2;
    while regions.mapped < needed {
        let at = region_at(0).wrapping_add(regions.mapped);
        // SAFETY: `mapped` says that the page map is not mapped from here on, and only the holder
        // of this lock, this thread, maps more of it.
        if !matches!(unsafe { sys::map_at(at, MAP_STEP) }, Mapped::Done) {
            return false;
        }
        regions.mapped += MAP_STEP;
        metadata::mapped(MAP_STEP);
    }
    true
}

/// Chooses where the window is:
///
/// 1. at random within a sixteenth of the address space;
/// 2. if that cannot be mapped, in smaller parts of it;
/// 3. otherwise where the kernel has room.
///
/// Emulators have fewer addresses. Sanitizers keep the addresses of the first two choices for
/// themselves, and end a program that has mapped something there. They leave the program the
/// addresses that the kernel chooses, up to some hundred gibibytes. So beside a sanitizer only the
/// third choice is left, and the window is smaller.
fn choose_window(regions: &mut Regions) -> bool {
    // The stack lies in the upper half of the address space, so the stack's address tells how large
    // the space is.
    let part = (sys::stack_address() + 1).next_power_of_two() / 16;
    let beside_sanitizer = sanitizer::is_there();
    let random = (0..5).filter(|_| !beside_sanitizer).map(|shift| {
        let part = part >> shift;
        let start = part + sys::random() as usize % (part / 2);
        (start & !(REGION - 1), (part / 2).min(MAX_WINDOW))
    });
    let largest = if beside_sanitizer { 2 } else { 0 };
    let kernels = (largest..5).filter_map(|shift| {
        let size = MAX_WINDOW >> (2 * shift);
        let start = sys::unmapped_addresses(size)?;
        Some((start.next_multiple_of(REGION), size - REGION))
    });
    random.chain(kernels).any(|(start, size)| {
        if size <= (MAP_REGIONS + 1) * REGION {
            return false;
        }
        MAP.window.store(start, Relaxed);
        (regions.size, regions.mapped) = (size, 0);
        let mapped = map_entries(regions, 1);
        if mapped {
            regions.next = MAP_REGIONS;
        }
        mapped
    })
}

/// Returns how many regions were made. One load.
pub(super) fn count() -> usize {
    let end = MAP.count.load(Relaxed) / REGION_GRANULES;
    end.saturating_sub(MAP_REGIONS)
}

/// Returns the node of the region in which `address` lies, or 0 for an address outside the window.
/// Two loads.
pub(super) fn node_of(address: usize) -> usize {
    let number = address.wrapping_sub(MAP.window.load(Relaxed)) / REGION;
    let node = NODES.get(number);
    node.map_or(0, |node| usize::from(node.load(Relaxed) & !(DENSE | MADE)))
}

/// Returns whether `address`, which may be any address, lies in a region.
pub(super) fn contains(address: usize) -> bool {
    let number = address.wrapping_sub(MAP.window.load(Relaxed)) / REGION;
    let node = NODES.get(number);
    node.is_some_and(|node| node.load(Relaxed) & MADE != 0)
}

/// Returns whether granule `index` lies in a dense region (`huge_pages`). One load.
pub(super) fn is_dense(index: u32) -> bool {
    NODES[index as usize / REGION_GRANULES].load(Relaxed) & DENSE != 0
}

/// Maps granules of a region for `node`, with the kind of pages that the region should have.
pub(super) fn map_granules(node: usize, first: u32, count: u32) -> Mapped {
    let (start, size) = (address_of(first), count as usize * GRANULE);
    // SAFETY: the granules are absent, and only the holder of the arena's lock maps them.
    let mapped = unsafe { sys::map_at(start, size) };
    if matches!(mapped, Mapped::Done) {
        // SAFETY: `map_at` above mapped the range, which no other thread uses yet.
        unsafe {
            if huge_pages::are_wanted(is_dense(first)) {
                sys::prefer_huge(start, size);
            } else {
                sys::refuse_huge(start, size);
            }
            if crate::nodes::count() > 1 && !crate::nodes::is_the_kernels(node) {
                sys::prefer_node(start, size, Some(crate::nodes::id(node)));
            }
        }
    }
    mapped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{metadata, register_fork};
    use crate::lock::{hold, while_held};
    use core::time::Duration;

    #[test]
    fn who_holds_the_lock_of_metadata_does_not_wait_for_the_regions() {
        register_fork();
        let made = while_held(REGIONS.word(), Duration::from_secs(20), || {
            let _metadata = hold(metadata::lock_word());
            make_region(0, false)
        });
        assert_eq!(made, Some(None));
    }
}
