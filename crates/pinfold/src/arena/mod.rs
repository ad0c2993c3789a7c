//! Memory from the system, node by node: runs of granules, and huge blocks.
//!
//! If the allocator asked the kernel for each block and gave it back at once, each block would cost
//! system calls and page faults. If it kept all freed memory, other processes could not use that
//! memory. So each node has an arena. The arena keeps freed memory for a while, up to a bound, and
//! gives the rest back to the system.
//!
//! # Vocabulary
//!
//! * **arena**: the allocator of one node's memory. It hands out whole granules.
//! * **granule**: 64 KiB, at a multiple of 64 KiB.
//! * **run**: one granule, or several in a row, up to almost the size of a region. The **holder**
//!   of a run is the code that allocated the run and has not freed it yet.
//! * **region**: 64 MiB of addresses for one node. It begins with the records of its granules. The
//!   arena maps the rest in steps, shortly before it hands out the granules.
//! * **window**: the range of addresses in which the regions lie, in the order in which they were
//!   made. The window is not reserved: the arenas map only the parts that they need.
//! * **frame**: the arena's record of a granule, 32 bytes at the region's beginning.
//! * **private part**: 576 bytes for each granule, after the frames. The holder of the granule's
//!   run uses them.
//! * **page map**: a 16-bit entry for each granule of the window ([`entry`]).
//! * **huge block**: a block that is a mapping of its own, outside the window. Blocks of [`HUGE`]
//!   bytes or more are huge blocks.
//!
//! # States of a run
//!
//! | state | mapped | content | becomes |
//! |---|---|---|---|
//! | in use | yes | a slab, or a block | dirty, when it is freed |
//! | dirty | yes | memory that was used | in use; clean or absent, when it is purged |
//! | clean | yes | zeroes, with no memory behind them | in use; absent, when it is unmapped |
//! | absent | no | | clean, when the arena maps it |
//!
//! A freed block that is a run may be **parked** on its CPU instead (`parked`). A parked run
//! becomes a block of the same length, or dirty.
//!
//! To **purge** a dirty run is to give its memory to the system. If the system refuses, a long run
//! is unmapped instead.
//!
//! # When memory goes back to the system
//!
//! 1. If more memory is dirty than may be kept (`kept`, `budget`), `free_run` purges dirty memory:
//!    whole units of 2 MiB of long runs first, then the oldest runs.
//! 2. Some calls of `free_run`, and the shepherd (`crate::shepherd`), purge runs that have been
//!    dirty for about half a second (`purge`).
//! 3. `trim` purges all dirty runs. `unmap_free`, called when the system refuses memory, also
//!    unmaps clean runs of 1 MiB or more.
//! 4. Huge blocks are unmapped when they are freed, or when no thread isolates its CPU any more
//!    (`waiting`).
//!
//! # Who may write what
//!
//! | what | who |
//! |---|---|
//! | the free runs of a node, and their frames | the holder of the arena's lock |
//! | the frames and the private part of a run in use | the holder of the run |
//! | a parked run, and its frames | the thread that takes it out of its place (`parked`) |
//! | the page map entries of a run | the thread that allocates or frees the run |
//! | the regions and the window | the holder of the regions' lock |

mod bins;
pub(crate) mod budget;
mod free_runs;
mod huge;
mod huge_pages;
mod kept;
mod large;
mod metadata;
mod numa;
mod pageblocks;
mod parked;
mod purge;
mod resize;
mod runs;
mod sparse;
mod stat;
mod waiting;
mod window;

pub use budget::{
    Limit, LimitError, VARIABLE as LIMIT_VARIABLE, dirty_limit, hard_limit, limit, memory_limit,
    set_dirty_limit, set_limit, set_memory_limit, tightest_limit,
};
pub use huge::{
    alloc as alloc_huge, alloc_for as alloc_huge_for, count as huge_count, free as free_huge,
    resize as resize_huge, size as huge_size, unmap_waiting,
};
pub(crate) use huge::{
    free_all_of as free_huge_of, heap_of as heap_of_huge, holds_table as is_table_of_huge,
};
pub use huge_pages::{HUGE_PAGES_VARIABLE, HugePages, HugePagesError, huge_pages, set_huge_pages};
pub use kept::large_in_use;
pub(crate) use large::colour_of;
pub use large::{
    COLOURED, COLOURED_ALIGN, alloc_block_run, block_of_run, free_block_run, granules_for,
    least_of_coloured, offset_in_run, run_at, size_in_run,
};
pub(crate) use metadata::{alloc as alloc_metadata, is_metadata};
pub use numa::{NUMA_STAT, NumaItem, refresh_room};
pub(crate) use numa::{NodeRequest, for_each_item};
pub(crate) use pageblocks::refuse as refuse_huge_pages;
pub(crate) use purge::purge_all_aged;
pub use purge::{dirty_time, set_dirty_time, trim, unmap_free};
pub use resize::{alloc_aligned_run, alloc_growing_run, is_aligned_run, move_run, resize_run};
pub(crate) use runs::alloc_run_on;
pub use runs::{Run, alloc_run, free_run};
pub use sparse::{is_sparse, zero_run};
pub use stat::NodeStat;
pub(crate) use window::watch_count;

/// What `waiting` is made of. Its model has its own.
mod primitive {
    pub(super) use core::sync::atomic::{AtomicUsize, fence};

    /// The most freed huge blocks that wait.
    pub(super) const PLACES: usize = 64;
}

use crate::fork;
use crate::lock::{Hooks, Rank};
use crate::nodes::MAX_NODES;
use crate::topology::cgroup;
use crate::{mempolicy, nodes, segment};
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize};

/// Returns the node to pass to [`alloc_run`] for memory without a policy of its own. The thread may
/// run on another node by the time this function returns. Costs a few loads.
pub fn node_here() -> usize {
    nodes::current()
}

/// Bytes in a granule.
pub const GRANULE: usize = 1 << GRANULE_SHIFT;
/// log2 of [`GRANULE`].
pub const GRANULE_SHIFT: u32 = 16;
/// Blocks of at least this many bytes are mappings of their own.
pub const HUGE: usize = 62 << 20;
/// The page map's entry for a run that is one block, which begins with the run.
pub const LARGE: u16 = u16::MAX;

/// Bytes in a region. Its address is a multiple of this.
const REGION: usize = 64 << 20;
const REGION_GRANULES: usize = REGION / GRANULE;
/// The offset of the private parts in a region: behind the frames.
const PRIVATE_AT: usize = REGION_GRANULES * size_of::<Frame>();
/// Bytes of a region's records, rounded up to whole granules, because a granule is a multiple of
/// every page size.
const HEADER: usize = (PRIVATE_AT + REGION_GRANULES * PRIVATE).next_multiple_of(GRANULE);
/// A region's first granule behind the records.
const REGION_FIRST: u32 = (HEADER / GRANULE) as u32;
/// Granules in the longest run. A region's last granule is never mapped.
const MAX_RUN: u32 = REGION_GRANULES as u32 - REGION_FIRST - 1;

/// Bytes of a granule's private part.
pub(crate) const PRIVATE: usize = 576;

/// The arena's record of a granule. The lock of the node's arena protects the frames of free runs.
/// The frames of a run in use belong to the holder of the run, except the `state` of its first and
/// last frame, which changes only under the lock.
#[repr(C, align(32))]
pub(crate) struct Frame {
    /// The run's first granule.
    head: u32,
    /// How many granules the run has; valid in its first frame.
    granules: u16,
    state: State,
    /// What the run is used for; valid in the first frame of a run in use.
    purpose: Purpose,
    /// Links in the heap of the run's bin (`bins`): the first child, the next sibling, and the
    /// previous sibling. A first child has its parent in place of the previous sibling.
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
    /// In use, or part of a region's records, or taken out of the free runs for a moment.
    Busy = 0,
    /// Free, with memory that was used.
    Dirty = 1,
    /// Free, and reads as zeroes.
    Clean = 2,
    /// Free, and not mapped.
    Absent = 3,
}

/// What the holder of a run uses it for, as far as it matters for huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Purpose {
    Other = 0,
    /// A slab of small objects (`huge_pages`).
    SmallObjects = 1,
    /// A long block that the program is expected to fill (`pageblocks`). A run in use has this
    /// purpose only while it is long and all of it was made of fresh memory.
    LongBlock = 2,
}

/// The words that any thread may read without a lock.
struct Map {
    /// Where the window and the page map begin. Written before the first region is made.
    window: AtomicUsize,
    /// Granules up to the end of the newest region.
    count: AtomicUsize,
}

static MAP: Map = Map {
    window: AtomicUsize::new(0),
    count: AtomicUsize::new(0),
};

/// Returns whether there is a region.
fn is_open() -> bool {
    MAP.count.load(Relaxed) > 0
}

/// Returns the page map's entry for `address`, which may be any address. Takes no lock: while the
/// caller holds a block, no other thread changes the block's entry. Costs a few instructions and
/// three loads.
///
/// | entry | the address is |
/// |---|---|
/// | [`LARGE`], [`COLOURED`] | in the first granule of a run that is one block (`large`) |
/// | 0 | in another granule of a block, or in no run in use |
/// | other | in a slab of the cache with this number, or in a large block of the heap with it |
#[inline]
pub fn entry(address: usize) -> u16 {
    // Acquire pairs with the release in `make_region`: a thread that sees the count also sees the
    // window's address, and the entries of all granules below the count.
    let count = MAP.count.load(Acquire);
    let window = MAP.window.load(Relaxed);
    let granule = address.wrapping_sub(window) >> GRANULE_SHIFT;
    if granule >= count {
        return 0;
    }
    // SAFETY: the granule is below the count. `make_region` maps the entries of all granules below
    // the count before it stores the count, and entries are never unmapped.
    unsafe { &*((window + 2 * granule) as *const AtomicU16) }.load(Relaxed)
}

/// Returns the page map's entry for granule `index`, which is or was part of a run.
pub(crate) fn entry_at(index: u32) -> u16 {
    entry(address_of(index) as usize)
}

/// Describes an address whose [entry] is 0, for the report of a wrong free.
pub fn describe_unused(address: usize) -> &'static str {
    if holds(address) {
        "Pinfold holds the memory, but nothing in use begins there: freed before, or inside a block"
    } else if huge_size(address as *mut u8).is_some() {
        "it is a large block of malloc's"
    } else {
        "the address is not Pinfold's"
    }
}

/// Returns whether `address`, which may be any address, lies in a region of an arena.
pub fn holds(address: usize) -> bool {
    is_open() && window::contains(address)
}

/// Calls `f` with the start of each run whose entries `is_wanted` accepts, and with the entry. `f`
/// may free the run. Walks the entries of all granules: two bytes for each 64 KiB of the window.
///
/// # Safety
///
/// No other thread allocates or frees runs whose entries `is_wanted` accepts, and all granules of
/// such a run have its entry.
pub(crate) unsafe fn for_each_run(
    is_wanted: impl Fn(u16) -> bool,
    mut f: impl FnMut(NonNull<u8>, u16),
) {
    // Acquire pairs with the release in `make_region`, as in `entry`.
    let count = MAP.count.load(Acquire);
    for index in 0..count as u32 {
        let start = address_of(index);
        let entry = entry(start as usize);
        // SAFETY: the entry is not 0, so the granule has a frame, whose `head` was written before
        // the entry. The caller promises that no other thread changes it.
        if entry != 0 && is_wanted(entry) && unsafe { (*frame(index)).head } == index {
            NonNull::new(start)
                .into_iter()
                .for_each(|start| f(start, entry));
        }
    }
}

/// Sets the entry of granule `index`.
fn set_entry(index: u32, value: u16) {
    let at = MAP.window.load(Relaxed) + 2 * index as usize;
    // SAFETY: the granule lies in a region, whose entries were mapped before the region was made.
    unsafe { &*(at as *const AtomicU16) }.store(value, Relaxed);
}

/// Returns where region `number` begins.
fn region_at(number: usize) -> *mut u8 {
    (MAP.window.load(Relaxed) + number * REGION) as *mut u8
}

/// Returns the region in which granule `index` lies, and the granule's number there.
fn region_of(index: u32) -> (*mut u8, usize) {
    let index = index as usize;
    (region_at(index / REGION_GRANULES), index % REGION_GRANULES)
}

/// Returns the frame of granule `index`. Returns a raw pointer, because several links may name the
/// same frame.
fn frame(index: u32) -> *mut Frame {
    let (region, nth) = region_of(index);
    region.cast::<Frame>().wrapping_add(nth)
}

/// Returns the number of the granule of `address`, which lies in a region.
fn index_of(address: usize) -> u32 {
    ((address - MAP.window.load(Relaxed)) >> GRANULE_SHIFT) as u32
}

/// Returns where granule `index` begins.
fn address_of(index: u32) -> *mut u8 {
    (MAP.window.load(Relaxed) + ((index as usize) << GRANULE_SHIFT)) as *mut u8
}

/// Returns the node of the region in which `address` lies. The address is in a run. Costs two
/// loads.
pub fn node_of(address: usize) -> usize {
    window::node_of(address)
}

/// Returns the number of the first granule of the run in which `address` lies. The granule's entry
/// in the page map is not 0.
pub(crate) fn head_of(address: usize) -> u32 {
    // SAFETY: the granule's entry is not 0. So the granule has a frame, whose `head` was written
    // before the entry.
    unsafe { (*frame(index_of(address))).head }
}

/// Returns where the run in which `address` lies begins. The entry for `address` is not 0.
#[inline]
pub(crate) fn start_of_run(address: usize) -> *const u8 {
    address_of(head_of(address))
}

/// Returns the private part of granule `index`: [`PRIVATE`] bytes, aligned to 64.
pub(crate) fn private_at(index: u32) -> *mut u8 {
    let (region, nth) = region_of(index);
    region.wrapping_add(PRIVATE_AT + nth * PRIVATE)
}

/// Returns the number of the first granule of the run that begins at `start`.
pub(crate) fn index_of_run(start: NonNull<u8>) -> u32 {
    index_of(start.as_ptr() as usize)
}

/// Returns the size, in bytes, of the run that begins at `start`. Costs two loads.
///
/// # Safety
///
/// A run in use begins at `start`.
pub unsafe fn run_size(start: NonNull<u8>) -> usize {
    // SAFETY: the caller promises that `start` begins a run. Its first frame has its length.
    unsafe { usize::from((*frame(index_of_run(start))).granules) * GRANULE }
}

crate::vmstat_items! {
    /// The counts of the arenas, in bytes, by node. An arena counts when it takes memory
    /// or gives memory back, never for each object.
    ///
    /// ```
    /// use pinfold::internal::arena::{ARENA_STAT, ArenaItem, HUGE, alloc_huge, free_huge};
    ///
    /// let block = alloc_huge(HUGE, 4096).expect("memory");
    /// assert!(ARENA_STAT.read_node(0, ArenaItem::Huge) >= HUGE as u64);
    /// // SAFETY: the block is not used afterwards.
    /// assert!(unsafe { free_huge(block.as_ptr()) });
    /// assert!(ARENA_STAT.read(ArenaItem::Returned) >= HUGE as u64);
    /// ```
    pub enum ArenaItem {
        /// Held now: runs in use or dirty, and huge blocks.
        Held = "held_bytes",
        /// The part of `Held` that is huge blocks. All of them count for node 0, because the kernel
        /// chooses their nodes.
        Huge = "huge_bytes",
        /// Given back to the system so far.
        Returned = "returned_bytes",
        /// Runs that are mapped now, without huge blocks: in use, dirty, given back, or never
        /// touched.
        Mapped = "mapped_bytes",
    }
}

/// The memory that the arenas hold and gave back, by node.
///
/// ```
/// use pinfold::memory::{ARENA_STAT, ArenaItem, held};
///
/// assert!(ARENA_STAT.read(ArenaItem::Held) >= ARENA_STAT.read(ArenaItem::Huge));
/// ```
pub static ARENA_STAT: NodeStat<ArenaItem> = NodeStat::new();

/// The largest number of bytes that were ever held at once.
static PEAK: AtomicU64 = AtomicU64::new(0);

/// Returns how many bytes are held now: runs in use or dirty, and huge blocks. One load for each
/// node.
pub fn held() -> u64 {
    ARENA_STAT.read(ArenaItem::Held)
}

/// Returns the largest number of bytes that were ever held at once. One load.
pub fn held_peak() -> u64 {
    PEAK.load(Relaxed)
}

/// Returns how many bytes went back to the system so far. One load for each node.
pub fn returned() -> u64 {
    ARENA_STAT.read(ArenaItem::Returned)
}

/// Returns how many bytes are in huge blocks. One load for each node.
pub fn huge_total() -> usize {
    ARENA_STAT.read(ArenaItem::Huge) as usize
}

/// Returns how many bytes are mapped for Pinfold's own structures. Leaves out the CPUs' units of
/// counters. Includes their units of sheaves, of which only the used pages take memory. Not part of
/// [`held`]. One load.
///
/// ```
/// use pinfold::memory;
///
/// assert!(memory::metadata_mapped() < 1 << 40);
/// ```
pub fn metadata_mapped() -> u64 {
    metadata::total()
}

/// Returns how many of the held bytes are in dirty free runs: memory that is kept for the next use.
/// One load for each node, and four for each of at most 64 CPUs.
///
/// ```
/// use pinfold::memory;
///
/// assert!(memory::dirty() <= memory::held());
/// ```
pub fn dirty() -> u64 {
    let granules: usize = (0..nodes::count()).map(kept::dirty).sum();
    ((granules + parked::granules()) * GRANULE) as u64
}

/// Adds `bytes`, taken from the system, to the held memory of `node`.
fn took(node: usize, bytes: usize) {
    ARENA_STAT.add(node, ArenaItem::Held, bytes as u64);
    PEAK.fetch_max(held(), Relaxed);
    publish();
}

/// Subtracts `bytes` from the held memory of `node`, and adds them to the returned memory: they
/// went back to the system.
fn gave_back(node: usize, bytes: usize) {
    ARENA_STAT.sub(node, ArenaItem::Held, bytes as u64);
    ARENA_STAT.add(node, ArenaItem::Returned, bytes as u64);
    publish();
}

/// Adds `bytes` to the mapped runs of `node`.
fn mapped(node: usize, bytes: usize) {
    ARENA_STAT.add(node, ArenaItem::Mapped, bytes as u64);
}

/// Subtracts `bytes` from the mapped runs of `node`.
fn unmapped(node: usize, bytes: usize) {
    ARENA_STAT.sub(node, ArenaItem::Mapped, bytes as u64);
    publish();
}

/// Adds `bytes` to the returned memory of `node`: pages went back to the system, but their run
/// stays in use. The number of held bytes does not change.
pub(crate) fn gave_back_pages(node: usize, bytes: usize) {
    ARENA_STAT.add(node, ArenaItem::Returned, bytes as u64);
    publish();
}

/// Subtracts `bytes` from the held memory of `node`: their pages moved to another run or to a huge
/// block.
fn moved_away(node: usize, bytes: usize) {
    ARENA_STAT.sub(node, ArenaItem::Held, bytes as u64);
    publish();
}

/// Copies the counts to the statistics segment, if there is one. A few stores.
pub fn publish() {
    if let Some(segment) = segment::current() {
        segment.held.store(held(), Relaxed);
        segment.held_peak.fetch_max(held_peak(), Relaxed);
        segment.returned.store(returned(), Relaxed);
        segment.huge.store(huge_total() as u64, Relaxed);
        segment.metadata.store(metadata::total(), Relaxed);
        segment
            .mapped
            .store(ARENA_STAT.read(ArenaItem::Mapped), Relaxed);
    }
}

/// Makes a fork wait until no thread changes the arenas' state.
pub(crate) fn register_fork() {
    static HOOKS: [Hooks; 4] = [
        Hooks::locks(Rank::Arenas, runs::visit_locks),
        Hooks::locks(Rank::Regions, |visit| visit(window::REGIONS.word())),
        Hooks::locks(Rank::Metadata, |visit| visit(metadata::lock_word())),
        Hooks::locks(Rank::Cgroup, |visit| visit(cgroup::lock_word())),
    ];
    fork::register(&HOOKS);
}

/// Reads the facts of the machine, its free memory and the settings, on the first call. Must be
/// called before any structure is made that has a part for each node.
///
/// Two threads that call this function at once may both read. So may a signal handler that
/// interrupted the first call.
pub(crate) fn init() {
    static IS_OVER: AtomicBool = AtomicBool::new(false);
    // Acquire pairs with the release below: a thread that sees the end also sees what was read.
    if !IS_OVER.load(Acquire) {
        register_fork();
        mempolicy::init();
        refresh_room();
        budget::read();
        huge_pages::read();
        huge::read();
        window::choose();
        IS_OVER.store(true, Release);
    }
}
