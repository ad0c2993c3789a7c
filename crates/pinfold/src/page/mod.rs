//! Memory from the system, by node: the arena, runs of granules, the page map, huge blocks.
//!
//! # Vocabulary
//!
//! * **granule**: 64 KiB, what the arena deals in. A **run** is several in a row.
//! * **reservation**: one range of addresses, reserved at the first allocation and divided evenly among the nodes. It
//!   costs nothing until committed. Under `RLIMIT_AS` and on small machines it is smaller.
//! * **frame**: what the arena knows of a granule, 32 bytes in a table beside the reservation. A second table has 576 bytes
//!   per granule for whoever holds the run. Objects themselves carry no headers.
//! * **page map**: one 16-bit entry per granule that says whose it is: 0 nobody's, [`LARGE`] a block of its own, else
//!   the number of a cache. One load, and no lock: an entry only changes while its granule is nobody's.
//! * **dirty** and **clean** free runs: dirty ones hold memory that was used, clean ones were given back (or never
//!   touched) and read as zeroes.
//! * **huge block**: [`HUGE`] bytes or more, a mapping of its own outside the reservation.
//!
//! # When memory goes back to the system
//!
//! A free run that stays dirty for a second is purged by a later call of the arena; and whenever more than 64 MiB are
//! dirty, the oldest are purged at once. Huge blocks are unmapped at once.

mod arena;
mod free_runs;
mod huge;
mod meta;

pub use arena::{alloc_run, committed, free_run, large_in_use, trim};
pub(crate) use arena::{fork_child_or_parent, fork_prepare};
pub use huge::{
    alloc as alloc_huge, free as free_huge, resize as resize_huge, size as huge_size,
    total as huge_total,
};
pub(crate) use meta::{
    alloc as alloc_meta, fork_done as fork_meta_done, fork_prepare as fork_prepare_meta,
};

use crate::lock::Lock;
use crate::{segment, sys};
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU16, AtomicU64, AtomicUsize};

/// Bytes in a granule.
pub const GRANULE: usize = 1 << GRANULE_SHIFT;
/// log2 of [`GRANULE`].
pub const GRANULE_SHIFT: u32 = 16;
/// From this many bytes on a block is a mapping of its own.
pub const HUGE: usize = 2 << 20;
/// The page map's entry for a run that is one block.
pub const LARGE: u16 = u16::MAX;
/// Nodes that the arena tells apart; memory of further ones is taken as the first's.
pub const MAX_NODES: usize = 64;

/// Bytes per granule for the holder of its run.
pub(crate) const PRIVATE: usize = 576;

/// A granule's frame. The fields are protected by the lock of the node's arena, but for those of a run in use, which
/// belong to its holder.
#[repr(C, align(32))]
pub(crate) struct Frame {
    /// The run's first granule.
    head: u32,
    /// How many granules the run has; valid in its first frame.
    granules: u32,
    /// Neighbours in the free list of the run's size.
    prev: u32,
    next: u32,
    /// Neighbours in the list of dirty runs by age.
    older: u32,
    newer: u32,
    /// When the run became dirty, in milliseconds, wrapping.
    stamp: u32,
    state: State,
}

/// What a run is; valid in its first and its last frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum State {
    /// Never part of a run, in use, or between two states.
    Busy = 0,
    Dirty = 1,
    Clean = 2,
}

/// What everybody may read without a lock; written once, `count` last.
pub(crate) struct Map {
    /// The entries' address less two bytes for each granule below the reservation, so that an address finds its entry
    /// by one shift.
    biased: AtomicUsize,
    /// Number of the reservation's first granule.
    first: AtomicUsize,
    /// Granules in the reservation.
    count: AtomicUsize,
    frames: AtomicPtr<Frame>,
    private: AtomicPtr<[u8; PRIVATE]>,
    /// Granules of each node's part.
    span: AtomicUsize,
}

static MAP: Map = Map {
    biased: AtomicUsize::new(0),
    first: AtomicUsize::new(0),
    count: AtomicUsize::new(0),
    frames: AtomicPtr::new(null_mut()),
    private: AtomicPtr::new(null_mut()),
    span: AtomicUsize::new(1),
};

/// Where the page map lies, for a caller that inlines [`entry`]: the biased address of the entries, the first granule's
/// number and how many there are; all 0 before the first allocation.
pub fn map_parts() -> (usize, usize, usize) {
    // Acquire pairs with the release in `reserve_all`.
    let count = MAP.count.load(Acquire);
    (MAP.biased.load(Relaxed), MAP.first.load(Relaxed), count)
}

/// Whose the granule at `address` is: 0 nobody's, [`LARGE`] a block's, else a cache's number. Any address may be
/// asked for. A few instructions and one load.
#[inline]
pub fn entry(address: usize) -> u16 {
    let (biased, first, count) = map_parts();
    let granule = address >> GRANULE_SHIFT;
    if granule.wrapping_sub(first) >= count {
        return 0;
    }
    // SAFETY: the granule lies in the reservation, and the map has a readable entry for each of its granules.
    unsafe { &*((biased + 2 * granule) as *const AtomicU16) }.load(Relaxed)
}

/// Sets the entry of granule `index`.
fn set_entry(index: u32, value: u16) {
    let at = MAP.biased.load(Relaxed) + 2 * (MAP.first.load(Relaxed) + index as usize);
    // SAFETY: the granule is committed, and with it its entry.
    unsafe { &*(at as *const AtomicU16) }.store(value, Relaxed);
}

/// The frame of granule `index`, as a raw pointer: lists link frames by number.
fn frame(index: u32) -> *mut Frame {
    MAP.frames.load(Relaxed).wrapping_add(index as usize)
}

/// The granule that `address`, which lies in the reservation, belongs to.
fn index_of(address: usize) -> u32 {
    ((address >> GRANULE_SHIFT) - MAP.first.load(Relaxed)) as u32
}

/// Where granule `index` begins.
fn address_of(index: u32) -> *mut u8 {
    ((MAP.first.load(Relaxed) + index as usize) << GRANULE_SHIFT) as *mut u8
}

/// The node whose part of the reservation `address` lies in. Arithmetic only.
pub fn node_of(address: usize) -> usize {
    index_of(address) as usize / MAP.span.load(Relaxed)
}

/// The first granule's number of the run that `address` lies in; the page map says that the granule is in use, in a run
/// of which every granule was marked.
pub(crate) fn head_of(address: usize) -> u32 {
    // SAFETY: a granule in use has a committed frame, whose `head` the arena wrote before it gave out the run.
    unsafe { (*frame(index_of(address))).head }
}

/// What granule `index` has for the holder of its run: [`PRIVATE`] bytes, aligned to 64.
pub(crate) fn private_at(index: u32) -> *mut u8 {
    let table = MAP.private.load(Relaxed);
    table.wrapping_add(index as usize).cast()
}

/// The number of the first granule of the run that begins at `start`.
pub(crate) fn index_of_run(start: NonNull<u8>) -> u32 {
    index_of(start.as_ptr() as usize)
}

/// Bytes in the run that begins at `start`.
///
/// # Safety
///
/// `start` begins a run in use.
pub unsafe fn run_size(start: NonNull<u8>) -> usize {
    // SAFETY: the caller's promise: the frame is committed and its head is set.
    unsafe { (*frame(index_of_run(start))).granules as usize * GRANULE }
}

/// What the page layer holds and gave back, in bytes. Kept where memory is taken and given back, never per object.
#[derive(Debug)]
pub struct Held {
    now: AtomicU64,
    peak: AtomicU64,
    returned: AtomicU64,
}

/// The process's one.
pub static HELD: Held = Held {
    now: AtomicU64::new(0),
    peak: AtomicU64::new(0),
    returned: AtomicU64::new(0),
};

impl Held {
    /// Bytes held now: runs in use or dirty, and huge blocks.
    pub fn now(&self) -> u64 {
        self.now.load(Relaxed)
    }

    /// The most that was ever held.
    pub fn peak(&self) -> u64 {
        self.peak.load(Relaxed)
    }

    /// Bytes given back to the system so far.
    pub fn returned(&self) -> u64 {
        self.returned.load(Relaxed)
    }

    fn take(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        self.peak.fetch_max(now, Relaxed);
        self.publish();
    }

    fn give_back(&self, bytes: usize) {
        self.now.fetch_sub(bytes as u64, Relaxed);
        self.returned.fetch_add(bytes as u64, Relaxed);
        self.publish();
    }

    /// Copies the figures to the statistics segment, where there is one.
    pub fn publish(&self) {
        if let Some(segment) = segment::current() {
            segment.held.store(self.now(), Relaxed);
            segment.held_peak.fetch_max(self.peak(), Relaxed);
            segment.returned.store(self.returned(), Relaxed);
        }
    }
}

/// Makes the reservation, once. False when not even the smallest can be had.
fn ready() -> bool {
    static DONE: Lock<bool> = Lock::new(false);
    if MAP.count.load(Acquire) > 0 {
        return true;
    }
    let Some(mut done) = DONE.lock() else {
        return false;
    };
    if !*done {
        *done = reserve_all();
    }
    *done
}

/// Reserves the arena, its frames and its map: four times the physical memory and at least 64 GiB where addresses are
/// free; three quarters of what `RLIMIT_AS` leaves otherwise; half as much each time the kernel refuses.
fn reserve_all() -> bool {
    const LEAST: usize = 16 << 20;
    let wish = (4 * sys::physical_memory())
        .next_power_of_two()
        .clamp(64 << 30, 8 << 40);
    let mut size = wish.min(sys::address_space_left() / 4 * 3) & !(GRANULE - 1);
    while size >= LEAST {
        if reserve_of(size) {
            return true;
        }
        size = size / 2 & !(GRANULE - 1);
    }
    false
}

fn reserve_of(size: usize) -> bool {
    let count = size / GRANULE;
    let page = sys::page_size();
    let sizes = [
        size + GRANULE,
        count * size_of::<Frame>(),
        count * PRIVATE,
        2 * count,
    ]
    .map(|size| size.next_multiple_of(page));
    let parts = [
        sys::reserve(sizes[0]),
        sys::reserve(sizes[1]),
        sys::reserve(sizes[2]),
        // Readable throughout: any address in the reservation may be asked about.
        sys::reserve_readable(sizes[3]),
    ];
    let [Some(memory), Some(frames), Some(private), Some(map)] = parts else {
        for (part, size) in parts.into_iter().zip(sizes) {
            // SAFETY: made above and used by nobody.
            part.inspect(|at| unsafe { sys::unmap(at.as_ptr(), size) });
        }
        return false;
    };
    let first = (memory.as_ptr() as usize).next_multiple_of(GRANULE) >> GRANULE_SHIFT;
    let nodes = crate::nodes::count();
    MAP.first.store(first, Relaxed);
    MAP.biased
        .store((map.as_ptr() as usize).wrapping_sub(2 * first), Relaxed);
    MAP.frames.store(frames.as_ptr().cast(), Relaxed);
    MAP.private.store(private.as_ptr().cast(), Relaxed);
    MAP.span.store((count / nodes).max(1), Relaxed);
    arena::divide(count, nodes);
    // Release pairs with the acquire in `map_parts` and `ready`: who sees the count sees the rest.
    MAP.count.store(count, Release);
    true
}
