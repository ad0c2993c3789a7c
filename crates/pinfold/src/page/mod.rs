//! Memory from the system, by node: regions, runs of granules, the page map, huge blocks.
//!
//! # Vocabulary
//!
//! * **granule**: 64 KiB. Arenas hand out whole granules.
//! * **run**: one granule, or several in a row, up to almost a region.
//! * **region**: 64 MiB of addresses for one node. A region begins with the records of its
//!   granules. The arena maps the rest in steps, shortly before it hands out the granules.
//! * **window**: the range of addresses in which the regions lie, in the order in which they were
//!   made. Its addresses are not reserved.
//! * **frame**: what the arena knows of a granule, 32 bytes among the region's records. A second
//!   table has 576 bytes per granule for the holder of the run. Objects carry no headers.
//! * **page map**: a 16-bit entry for each granule of the window: the number of the cache whose
//!   slab the granule is in, [`LARGE`] at the first granule of a run that is one block, else 0. A
//!   thread finds an entry by a subtraction, a comparison and a load, without a lock: the entry
//!   changes only while no caller holds the granule.
//! * **dirty**, **clean** and **absent** free runs: a dirty run holds memory that was used. A clean
//!   run is mapped, but has no memory behind it, and reads as zeroes. An absent run is not mapped.
//!   To **purge** a dirty run is to give its memory to the system: it is clean then.
//! * **huge block**: [`HUGE`] bytes or more, a mapping of its own outside the window.
//!
//! # When memory goes back to the system
//!
//! 1. The `free_run` after which more is dirty than may be kept (`kept`, `budget`) purges dirty
//!    memory: whole units of 2 MiB of long runs first, then the oldest runs.
//! 2. Runs that stay dirty for about half a second are purged by later calls (`aged`).
//! 3. `trim` purges all dirty runs; `unmap_free` also unmaps clean runs, if the system has no
//!    memory.
//! 4. Huge blocks are unmapped when they are freed.

mod aged;
mod arena;
mod bins;
pub(crate) mod budget;
mod free_runs;
mod huge;
mod huge_pages;
mod kept;
mod meta;
mod numa;
mod resize;
mod stat;
mod window;

pub(crate) use aged::purge_all_aged;
pub use aged::{trim, unmap_free};
pub(crate) use arena::alloc_run_on;
pub use arena::{Run, alloc_run, free_run};
pub use budget::{
    Limit, VARIABLE as LIMIT_VARIABLE, cgroup_limit, hard_limit, memory_limit, set_memory_limit,
};
pub use huge::{alloc as alloc_huge, free as free_huge, resize as resize_huge, size as huge_size};
pub use huge_pages::{HUGE_PAGES_VARIABLE, HugePages, set_huge_pages};
pub use kept::large_in_use;
pub(crate) use meta::alloc as alloc_meta;
pub(crate) use numa::{Ask, for_each_item};
pub use numa::{NUMA_STAT, NumaItem, refresh_room};
pub use resize::{alloc_aligned_run, alloc_growing_run, move_run, resize_run};
pub use stat::NodeStat;
pub use window::watch_count;

use crate::fork::{self, Hooks, Rank};
use crate::nodes::MAX_NODES;
use crate::topology::cgroup;
use crate::{mempolicy, nodes, segment};
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use core::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize};

/// Whether a thread holds the lock of an arena, or one that comes after these. Reads a word of
/// every arena.
#[cold]
pub(crate) fn is_lock_held(thread: u64) -> bool {
    arena::is_lock_held(thread) || meta::is_lock_held(thread) || mempolicy::is_lock_held(thread)
}

/// The node that memory without a policy of its own is allocated from now, for [`alloc_run`]; the
/// thread may run elsewhere by the time this returns.
pub fn node_here() -> usize {
    nodes::current()
}

/// Bytes in a granule.
pub const GRANULE: usize = 1 << GRANULE_SHIFT;
/// log2 of [`GRANULE`].
pub const GRANULE_SHIFT: u32 = 16;
/// From this many bytes on a block is a mapping of its own.
pub const HUGE: usize = 62 << 20;
/// The page map's entry for a run that is one block.
pub const LARGE: u16 = u16::MAX;

/// Bytes in a region, whose address is a multiple of this.
const REGION: usize = 64 << 20;
const REGION_GRANULES: usize = REGION / GRANULE;
/// Where in a region the private parts are: behind the frames.
const PRIVATE_AT: usize = REGION_GRANULES * size_of::<Frame>();
/// Bytes of a region's records, rounded up so that any system's pages are whole.
const HEADER: usize = (PRIVATE_AT + REGION_GRANULES * PRIVATE).next_multiple_of(GRANULE);
/// A region's first granule that is no record.
const REGION_FIRST: u32 = (HEADER / GRANULE) as u32;
/// The longest run; a region's last granule is never mapped.
const RUN_MOST: u32 = REGION_GRANULES as u32 - REGION_FIRST - 1;

/// Bytes per granule for the holder of its run.
pub(crate) const PRIVATE: usize = 576;

/// A granule's frame. The fields are protected by the lock of the node's arena, but for those of a
/// run in use, which belong to its holder.
#[repr(C, align(32))]
pub(crate) struct Frame {
    /// The run's first granule.
    head: u32,
    /// How many granules the run has; valid in its first frame.
    granules: u16,
    state: State,
    /// The heap of the run's bin (`bins`): its first child, its next sibling, and its previous
    /// sibling or else its parent.
    child: u32,
    next: u32,
    prev: u32,
    /// Neighbours in the list of dirty runs by age.
    older: u32,
    newer: u32,
    /// When the run became dirty, in milliseconds, wrapping.
    stamp: u32,
}

/// The state of a run; valid in the run's first and last frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum State {
    /// In use, a record, or between two states.
    Busy = 0,
    /// Free, with memory that was used.
    Dirty = 1,
    /// Free, and reads as zeroes.
    Clean = 2,
    /// Free, and not mapped.
    Absent = 3,
}

/// What any thread may read without a lock.
struct Map {
    /// Where the window begins, and with it the page map; written before the first region is made.
    window: AtomicUsize,
    /// Granules up to the end of the newest region.
    count: AtomicUsize,
}

static MAP: Map = Map {
    window: AtomicUsize::new(0),
    count: AtomicUsize::new(0),
};

/// Whether there is a region.
fn is_open() -> bool {
    MAP.count.load(Relaxed) > 0
}

/// Returns the page map's entry for `address`, which may be any address: the number of the cache
/// whose slab the address is in, [`LARGE`] in the first granule of a run that is one block, else 0.
/// Costs a few instructions and three loads.
#[inline]
pub fn entry(address: usize) -> u16 {
    // Acquire pairs with the release in `make_region`.
    let count = MAP.count.load(Acquire);
    let window = MAP.window.load(Relaxed);
    let granule = address.wrapping_sub(window) >> GRANULE_SHIFT;
    if granule >= count {
        return 0;
    }
    // SAFETY: the page map is mapped for all granules below the count.
    unsafe { &*((window + 2 * granule) as *const AtomicU16) }.load(Relaxed)
}

/// Sets the entry of granule `index`.
fn set_entry(index: u32, value: u16) {
    let at = MAP.window.load(Relaxed) + 2 * index as usize;
    // SAFETY: the granule lies in a region, and its entry was mapped with the region.
    unsafe { &*(at as *const AtomicU16) }.store(value, Relaxed);
}

/// Where region `number` begins.
fn region_at(number: usize) -> *mut u8 {
    (MAP.window.load(Relaxed) + number * REGION) as *mut u8
}

/// The region that granule `index` lies in, and its number there.
fn region_of(index: u32) -> (*mut u8, usize) {
    let index = index as usize;
    (region_at(index / REGION_GRANULES), index % REGION_GRANULES)
}

/// The frame of granule `index`, as a raw pointer: lists link frames by number.
fn frame(index: u32) -> *mut Frame {
    let (region, nth) = region_of(index);
    region.cast::<Frame>().wrapping_add(nth)
}

/// The granule that `address`, which lies in a region, belongs to.
fn index_of(address: usize) -> u32 {
    ((address - MAP.window.load(Relaxed)) >> GRANULE_SHIFT) as u32
}

/// Where granule `index` begins.
fn address_of(index: u32) -> *mut u8 {
    (MAP.window.load(Relaxed) + ((index as usize) << GRANULE_SHIFT)) as *mut u8
}

/// Returns the node of the region that `address`, which lies in a run, belongs to. Costs two loads.
pub fn node_of(address: usize) -> usize {
    window::node_of(address)
}

/// The first granule's number of the run that `address` lies in; the page map says that the granule
/// is in use, in a run of which every granule was marked.
pub(crate) fn head_of(address: usize) -> u32 {
    // SAFETY: a granule in use has a frame, whose `head` the arena wrote before it gave out the
    // run.
    unsafe { (*frame(index_of(address))).head }
}

/// Where the run that `address` lies in begins; as for [`head_of`].
#[inline]
pub(crate) fn start_of_run(address: usize) -> *const u8 {
    address_of(head_of(address))
}

/// What granule `index` has for the holder of its run: [`PRIVATE`] bytes, aligned to 64.
pub(crate) fn private_at(index: u32) -> *mut u8 {
    let (region, nth) = region_of(index);
    region.wrapping_add(PRIVATE_AT + nth * PRIVATE)
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
    // SAFETY: the caller's promise: the frame says how long the run is.
    unsafe { usize::from((*frame(index_of_run(start))).granules) * GRANULE }
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

/// Counts memory of `node` that went to another run, pages and all.
fn moved_away(node: usize, bytes: usize) {
    PAGE_STAT.sub(node, PageItem::Held, bytes as u64);
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

/// Has a fork wait until no thread changes what the page layer knows.
pub(crate) fn register_fork() {
    static HOOKS: Hooks = Hooks {
        rank: Rank::Page,
        holds: is_lock_held,
        before: || {
            arena::lock_for_fork();
            meta::lock_for_fork();
            cgroup::lock_for_fork();
        },
        child: || {},
        after: || {
            cgroup::unlock_after_fork();
            meta::unlock_after_fork();
            arena::unlock_after_fork();
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
        budget::read();
        huge_pages::read();
        window::choose();
    }
}
