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
//! * **stripe**: the reservation's first part consists of 128 MiB chunks, each of 64 stripes of 2 MiB. Stripe c of every chunk
//!   holds slabs of size class c and nothing else. So the class of a block is six bits of its address, and freeing it
//!   reads no memory but the CPU's own unit. The second part is **mixed**: everything else, and classes too when their
//!   stripes cannot be had (under `RLIMIT_AS`, or with `vm.overcommit_memory=2`, where a chunk is charged whole).
//! * **dirty** and **clean** free runs: dirty ones hold memory that was used, clean ones were given back (or never
//!   touched) and read as zeroes.
//! * **huge block**: [`HUGE`] bytes or more, a mapping of its own outside the reservation.
//!
//! What an arena takes beyond its first 2 MiB may get huge pages (`madvise`), where the system offers them.
//!
//! # When memory goes back to the system
//!
//! A free run that stays dirty for a second is purged by a later call of the arena; and whenever more than 1 % of the
//! physical memory is dirty, or 16 MiB if that is more, some are purged at once. Huge blocks are unmapped at once.

mod aged;
mod arena;
mod commit;
mod free_runs;
mod huge;
mod meta;
mod numa;
mod stat;

pub(crate) use aged::purge_all_aged;
pub use aged::trim;
pub use arena::{Run, alloc_run, free_run, large_in_use};
pub(crate) use arena::{alloc_run_on, keep, relieve, too_much_dirty, unkeep};
pub use huge::{alloc as alloc_huge, free as free_huge, resize as resize_huge, size as huge_size};
pub(crate) use meta::alloc as alloc_meta;
pub(crate) use numa::{Ask, for_each_item};
pub use numa::{NUMA_STAT, NumaItem, refresh_room};
pub use stat::NodeStat;

use arena::{CHUNKS, arena_at, places};

use crate::fork::{self, Hooks, Rank};
use crate::lock::Lock;
use crate::nodes::MAX_NODES;
use crate::{mempolicy, nodes, segment, sys};
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU16, AtomicU64, AtomicUsize};

/// Whether a thread holds the lock of an arena, or one that comes after these. Reads a word of every arena.
#[cold]
pub(crate) fn is_lock_held(thread: u64) -> bool {
    let mut chunks = CHUNKS.iter().take(nodes::count());
    places().any(|place| arena_at(place).is_held_by(thread))
        || chunks.any(|chunks| chunks.is_held_by(thread))
        || meta::is_lock_held(thread)
        || mempolicy::is_lock_held(thread)
}

/// The node that memory without a policy of its own is allocated from now, for [`alloc_run`]; the thread may run elsewhere by the
/// time this returns.
pub fn node_here() -> usize {
    nodes::current()
}

/// Bytes in a granule.
pub const GRANULE: usize = 1 << GRANULE_SHIFT;
/// log2 of [`GRANULE`].
pub const GRANULE_SHIFT: u32 = 16;
/// From this many bytes on a block is a mapping of its own.
pub const HUGE: usize = 2 << 20;
/// The page map's entry for a run that is one block.
pub const LARGE: u16 = u16::MAX;

/// log2 of the bytes in a stripe.
pub const STRIPE_SHIFT: u32 = 21;
/// Stripes in a chunk that belong to classes; an address has six bits for them, the last stripes stay empty.
pub const STRIPES: usize = 48;
const STRIPE_GRANULES: u32 = 1 << (STRIPE_SHIFT - GRANULE_SHIFT);
/// Bytes in a chunk: 64 stripes.
const CHUNK: usize = 64 << STRIPE_SHIFT;
const CHUNK_GRANULES: u32 = (CHUNK >> GRANULE_SHIFT) as u32;

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
    /// Chunks of each node.
    chunks: AtomicUsize,
    /// Granules of each node's mixed part.
    mixed: AtomicUsize,
}

static MAP: Map = Map {
    biased: AtomicUsize::new(0),
    first: AtomicUsize::new(0),
    count: AtomicUsize::new(0),
    frames: AtomicPtr::new(null_mut()),
    private: AtomicPtr::new(null_mut()),
    chunks: AtomicUsize::new(0),
    mixed: AtomicUsize::new(1),
};

/// The page map, for a caller that inlines the way from an address to its entry: `(map, first,
/// count)`. The 16-bit entry of a granule is at `map + 2 * granule` if `granule - first`, wrapping,
/// is below `count`. The count is 0 before the first allocation.
pub fn window() -> (usize, usize, usize) {
    // Acquire pairs with the release in `reserve_of`.
    let count = MAP.count.load(Acquire);
    (MAP.biased.load(Relaxed), MAP.first.load(Relaxed), count)
}

/// The class that an address within the stripes belongs to. Two instructions.
#[inline(always)]
pub fn class_in_stripes(address: usize) -> usize {
    address >> STRIPE_SHIFT & 63
}

fn chunks_per_node() -> u32 {
    MAP.chunks.load(Relaxed) as u32
}

/// Whose the granule at `address` is: 0 nobody's, [`LARGE`] a block's, else a cache's number. Any address may be
/// asked for. A few instructions and one load.
#[inline]
pub fn entry(address: usize) -> u16 {
    // Acquire pairs with the release in `reserve_of`.
    let count = MAP.count.load(Acquire);
    let (biased, first) = (MAP.biased.load(Relaxed), MAP.first.load(Relaxed));
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
    place_of(address).0
}

/// The node and the arena of it that `address`, which lies in the reservation, belongs to.
fn place_of(address: usize) -> (usize, usize) {
    let index = index_of(address) as usize;
    let span = MAP.chunks.load(Relaxed) * CHUNK_GRANULES as usize;
    let striped = span * nodes::count();
    if index < striped {
        (index / span, class_in_stripes(address))
    } else {
        ((index - striped) / MAP.mixed.load(Relaxed), STRIPES)
    }
}

/// The first granule's number of the run that `address` lies in; the page map says that the granule is in use, in a run
/// of which every granule was marked.
pub(crate) fn head_of(address: usize) -> u32 {
    // SAFETY: a granule in use has a committed frame, whose `head` the arena wrote before it gave out the run.
    unsafe { (*frame(index_of(address))).head }
}

/// Where the run that `address` lies in begins; as for [`head_of`].
#[inline]
pub(crate) fn start_of_run(address: usize) -> *const u8 {
    address_of(head_of(address))
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

crate::vmstat_items! {
    /// What the page layer counts, in bytes, by node. Counted where memory is taken and given back,
    /// never per object.
    pub enum PageItem {
        /// Held now: runs in use or dirty, and huge blocks.
        Held = "held_bytes",
        /// The part of `Held` that is huge blocks. The kernel chooses their nodes, so that all of
        /// them are counted for node 0.
        Huge = "huge_bytes",
        /// Given back to the system so far.
        Returned = "returned_bytes",
    }
}

/// What the page layer holds and gave back.
pub static PAGE_STAT: NodeStat<PageItem> = NodeStat::new();

/// The most that was ever held.
static PEAK: AtomicU64 = AtomicU64::new(0);

/// Bytes held now: runs in use or dirty, and huge blocks.
pub fn held() -> u64 {
    PAGE_STAT.read(PageItem::Held)
}

/// The most bytes that were ever held.
pub fn held_peak() -> u64 {
    PEAK.load(Relaxed)
}

/// Bytes given back to the system so far.
pub fn returned() -> u64 {
    PAGE_STAT.read(PageItem::Returned)
}

/// Bytes in huge blocks.
pub fn huge_total() -> usize {
    PAGE_STAT.read(PageItem::Huge) as usize
}

/// Counts memory of `node` taken from the system.
fn took(node: usize, bytes: usize) {
    PAGE_STAT.add(node, PageItem::Held, bytes as u64);
    PEAK.fetch_max(held(), Relaxed);
    publish();
}

/// Counts memory of `node` given back to the system.
fn gave_back(node: usize, bytes: usize) {
    PAGE_STAT.sub(node, PageItem::Held, bytes as u64);
    PAGE_STAT.add(node, PageItem::Returned, bytes as u64);
    publish();
}

/// Counts pages given back of runs that stay in use: what is held does not change.
pub(crate) fn gave_back_pages(node: usize, bytes: usize) {
    PAGE_STAT.add(node, PageItem::Returned, bytes as u64);
    publish();
}

/// Copies the figures to the statistics segment, where there is one.
pub fn publish() {
    if let Some(segment) = segment::current() {
        segment.held.store(held(), Relaxed);
        segment.held_peak.fetch_max(held_peak(), Relaxed);
        segment.returned.store(returned(), Relaxed);
        segment.huge.store(huge_total() as u64, Relaxed);
    }
}

/// Whether [`ready`] has tried to make the reservation.
static READY: Lock<bool> = Lock::new(false);

/// Has a fork wait until no thread changes what the page layer knows.
pub(crate) fn register_fork() {
    static HOOKS: Hooks = Hooks {
        rank: Rank::Page,
        holds: |thread| READY.is_held_by(thread) || is_lock_held(thread),
        before: || {
            READY.lock_for_fork();
            arena::lock_for_fork();
            meta::lock_for_fork();
        },
        child: || {},
        after: || {
            meta::unlock_after_fork();
            arena::unlock_after_fork();
            READY.unlock_after_fork();
        },
    };
    fork::register(&HOOKS);
}

/// Learns of the machine and of its free memory, on the first call; before anything is made that
/// there is one of for each node.
pub(crate) fn init() {
    if !nodes::are_known() {
        mempolicy::init();
        refresh_room();
    }
}

/// Makes the reservation, once, after [`init`]. Returns false if not even the smallest can be had,
/// in a signal handler that interrupted this function, and while another thread forks.
fn ready() -> bool {
    if MAP.count.load(Acquire) > 0 {
        return true;
    }
    register_fork();
    let Some(mut done) = READY.lock_or_divert(|_| false) else {
        return false;
    };
    if !*done {
        // It asks the system, which a later call of `free` must not.
        arena::dirty_most();
        // How many nodes share the reservation must not change any more.
        debug_assert!(nodes::are_known());
        *done = reserve_all();
    }
    *done
}

/// Reserves addresses for the arenas and their records: mixed parts of four times the physical memory, or once for each node, and
/// stripes in which a single class could take twice the physical memory. Half as much each time that the kernel refuses.
///
/// Where addresses are limited (`RLIMIT_AS`) or committing in chunks is dear (`vm.overcommit_memory=2`), there are no
/// stripes, and the mixed parts get three quarters of what the limit leaves.
fn reserve_all() -> bool {
    /// The largest reservations tried, for all nodes together: half of what 47 bits address, and less.
    const STRIPED_MOST: usize = 32 << 40;
    const MIXED_MOST: usize = 8 << 40;
    const MIXED_LEAST: usize = 16 << 20;
    let memory = sys::physical_memory().next_power_of_two().max(16 << 30);
    let left = sys::address_space_left();
    let nodes = nodes::count();
    let striped = left == usize::MAX && !sys::commits_strictly();
    let mut chunks = if striped {
        (2 * memory).min(STRIPED_MOST / 64) >> STRIPE_SHIFT
    } else {
        0
    };
    // A single node's part may have to hold everything: the kernel's, where the process has a policy.
    let mut mixed = (nodes.max(4) * memory).min(MIXED_MOST).min(left / 4 * 3) / GRANULE;
    while mixed * GRANULE >= MIXED_LEAST {
        if reserve_of(nodes, chunks / nodes, mixed / nodes) {
            return true;
        }
        chunks /= 2;
        mixed = if chunks == 0 { mixed / 2 } else { mixed };
    }
    false
}

fn reserve_of(nodes: usize, chunks: usize, mixed: usize) -> bool {
    let count = nodes * (chunks * CHUNK_GRANULES as usize + mixed);
    let page = sys::page_size();
    let align = if chunks > 0 { CHUNK } else { GRANULE };
    let sizes = [
        count * GRANULE + align,
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
    let first = (memory.as_ptr() as usize).next_multiple_of(align) >> GRANULE_SHIFT;
    MAP.first.store(first, Relaxed);
    MAP.biased
        .store((map.as_ptr() as usize).wrapping_sub(2 * first), Relaxed);
    MAP.frames.store(frames.as_ptr().cast(), Relaxed);
    MAP.private.store(private.as_ptr().cast(), Relaxed);
    MAP.chunks.store(chunks, Relaxed);
    MAP.mixed.store(mixed.max(1), Relaxed);
    arena::divide(nodes, chunks as u32, mixed as u32);
    // Release pairs with the acquire in `entry`, `window` and `ready`: who sees the count sees the rest.
    MAP.count.store(count, Release);
    true
}
