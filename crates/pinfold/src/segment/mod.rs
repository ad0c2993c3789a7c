//! The statistics segment: the counts that a process shows to other processes.
//!
//! A process that runs on Pinfold's malloc has one segment: shared memory behind a descriptor,
//! which any process of the same user can open in `/proc/PID/fd`. A child of `fork` has private
//! memory in its place, which a process that may trace the child finds behind the mapping named
//! [`MARK_FILE`]. A process that was asked to count every call has a file in its place. The segment
//! has these parts, in this order:
//!
//! 1. [`Segment`], the head.
//! 2. From [`Segment::memory_at`] on, one [`NodeMemory`] for each node.
//! 3. From [`Segment::caches_at`] on, one [`CacheRow`] for each cache, by the cache's number. The
//!    caches of the size classes come first.
//! 4. From [`Segment::events_at`] on, one [`NodeEvents`] for each row of the caches and each node,
//!    row by row.
//! 5. From [`Segment::counters_at`] on, [`COUNTERS`] times a [`CounterRow`]: the counters that the
//!    program shows by name ([`show`]).
//! 6. From [`Segment::splits_at`] on, [`Segment::splits`] times a [`SplitRow`]: the events of
//!    caches that have a part for each CPU.
//! 7. In a process that counts every call, from [`Segment::units_at`] on: the beginnings of the
//!    process's per-CPU units, one for each CPU (or concurrency id), and the one that all CPUs
//!    share.
//!
//! The segment holds three kinds of numbers:
//!
//! * **Calls** are [`VmEvents`](crate::vmstat::VmEvents): words in the units. Only the unit's CPU
//!   adds to them, in critical sections. A total is the sum over the units. It misses at most the
//!   adds that are under way at that moment.
//! * **Events of the slow paths** are [`NodeEvents`]. The slow paths always add to them, so showing
//!   them costs nothing.
//! * **Memory held from the system** is counted by the arenas, and copied to the segment whenever
//!   it changes.
//!
//! # Invariants
//!
//! * `magic` is written last, with release order. A reader that sees [`MAGIC`] sees a complete
//!   head.
//! * Each number is one aligned word, which its writer stores at once. So a reader never sees half
//!   of a number.
//! * A wrong number in the segment cannot lead the process to an address outside the segment.

mod calls;
mod counters;
mod events;
mod files;
mod mailbox;

pub use calls::Call;
pub(crate) use calls::{Shared, place_calls, place_of, share_units};
pub(crate) use counters::show_heap;
pub use counters::{Counted, CountedSet, CounterKind, ShowError, hide, hide_at, show, show_set};
pub use events::{EVENTS, NodeEvents, SlabEvent};
pub use files::{
    F_SEAL_FUTURE_WRITE, FILE, MAILBOX_FILE, MARK_FILE, PROFILE_FILE, SEALS, commits_strictly,
    now_ms,
};
pub use mailbox::{
    Answer, Code, Consent, GET, HEAP_FRAGMENTS, HEAP_START, HEAP_STOP, MAIL_MAGIC, MAIL_VERSION,
    Mailbox, Posted, Request, SET, TRIM, Taken,
};
pub use primitive::SLOTS;

/// What `mailbox` is built from. A model of the mailbox replaces it.
mod primitive {
    pub use super::files::now_ms;
    pub use core::sync::atomic::{AtomicU32, AtomicU64};

    /// The number of requests that a mailbox holds at once.
    pub const SLOTS: usize = 120;
}

use crate::cache_units::most_parts;
use crate::shepherd::{self, Reach};
use crate::{nodes, spared, sys};
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};
use pinfold_rseq::{Backend, Index, backend};

/// The value of [`Segment::magic`] in a segment that is ready: "PINFOLD" and a format byte.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PINFOLD\x01");

/// The version of the layout. A reader refuses other versions.
pub const VERSION: u32 = 13;

/// The number of settings that the segment has room for.
pub const SETTINGS: usize = 8;

/// The number of size classes that [`Call`] has room for.
pub const CLASSES: usize = 104;

/// The number of caches that the segment has room for. Caches with higher numbers are not shown.
pub const CACHES: usize = 768;

/// The number of counters that the segment has room for.
pub const COUNTERS: usize = 128;

/// The most parts of split caches that a segment has room for. The events of any others are not
/// shown.
pub const SPLITS: usize = 1 << 14;
/// A segment has room for the parts of this many split caches, but for at most [`SPLITS`] parts.
const SPLIT_CACHES: usize = 32;

/// The number of isolated CPUs that the segment has room for.
pub const ISOLATED: usize = 64;

/// The largest number of nodes that a segment has rows for.
pub const NODES: usize = nodes::MAX_NODES;

/// The environment variable that names the directory for segments.
///
/// Each process makes its segment there as `PID.N`. N counts the program images (`exec`) and forks
/// that had this PID.
pub const DIRECTORY_VARIABLE: &str = "PINFOLD_STATS";

/// The head of the segment: the process, and where the other parts are.
#[repr(C)]
pub struct Segment {
    /// [`MAGIC`], once every field that never changes is written.
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// The number of units that follow; 0 in a process that does not count every call.
    pub units: AtomicU32,
    /// The PID of the process that counts.
    pub pid: AtomicU32,
    /// The backend in use: 0 atomics, 1 restartable sequences by CPU number, 2 by concurrency id.
    pub backend: AtomicU32,
    /// When the process began to count, in nanoseconds of `CLOCK_REALTIME`.
    pub started_ns: AtomicU64,
    /// The bytes now held from the system: slabs and runs, touched or not. Memory that
    /// went back to the system does not count.
    pub held: AtomicU64,
    /// The largest value that `held` ever had.
    pub held_peak: AtomicU64,
    /// The bytes returned to the system so far, in every way.
    pub returned: AtomicU64,
    /// The bytes now mapped for huge blocks, each of which is a separate mapping. Part of `held`.
    pub huge: AtomicU64,
    /// Where in the segment the first unit begins.
    pub units_at: AtomicU32,
    /// How many bytes of each unit are in the segment.
    pub unit_bytes: AtomicU32,
    /// Where in each unit the [`Call`] events begin, one word each.
    pub calls: AtomicU32,
    /// Where in the segment the [`NodeMemory`] rows begin.
    pub memory_at: AtomicU32,
    /// Where in the segment the [`CacheRow`]s begin.
    pub caches_at: AtomicU32,
    /// How many [`CacheRow`]s there are.
    pub caches: AtomicU32,
    /// How many of the first rows were ever used.
    pub caches_used: AtomicU32,
    /// Where in the segment the [`NodeEvents`] begin.
    pub events_at: AtomicU32,
    /// How many nodes have a [`NodeMemory`], and [`NodeEvents`] for each cache.
    pub nodes: AtomicU32,
    /// Bytes of a system page.
    pub page_size: AtomicU32,
    /// Where in the segment the [`CounterRow`]s begin.
    pub counters_at: AtomicU32,
    /// How many [`CounterRow`]s there are.
    pub counters: AtomicU32,
    /// How many of the first of these rows were ever used.
    pub counters_used: AtomicU32,
    /// Where in the segment the [`SplitRow`]s begin.
    pub splits_at: AtomicU32,
    /// How many [`SplitRow`]s there are.
    pub splits: AtomicU32,
    /// How many of the first of these rows were ever used.
    pub splits_used: AtomicU32,
    /// When the rows were written last, in nanoseconds of `CLOCK_REALTIME`.
    pub counted_ns: AtomicU64,
    /// The bytes mapped for the allocator's own structures, without the CPUs' units of counters.
    /// Not part of `held`.
    pub metadata: AtomicU64,
    /// The bytes of runs that are mapped: in use, dirty, given back, or never touched.
    pub mapped: AtomicU64,
    /// The number of ticks so far, of shepherds' threads and in slow paths.
    pub ticks: AtomicU64,
    /// When the last tick was, in nanoseconds of `CLOCK_REALTIME`.
    pub ticked_ns: AtomicU64,
    /// Nanoseconds spent in ticks, without the last one.
    pub in_ticks_ns: AtomicU64,
    /// How many shards of watched counters the ticks have folded.
    pub folds: AtomicU64,
    /// The number of shepherds' threads at the last tick.
    pub shepherds: AtomicU32,
    /// The number of [`settings`](Self::settings) in use.
    pub settings_used: AtomicU32,
    /// The present values of the settings that may change while the process runs, by their numbers
    /// in requests ([`GET`]).
    pub settings: [AtomicU64; SETTINGS],
    /// The addresses of malloc's *gates*, or 0: a word that holds 0 while the fast path of malloc
    /// is closed, and one for the path of malloc that counts bytes for a heap profile. Any thread
    /// may store 0 there, at any time. The next calls of malloc then take a slow path, which looks
    /// for requests, and opens the path again.
    pub gates: [AtomicU64; 2],
    /// The address of the heap profile's records, or 0.
    pub profile: AtomicU64,
    /// The CPUs that threads of the process have isolated.
    pub isolated: [IsolatedRow; ISOLATED],
}

/// A CPU that a thread of the process has isolated.
#[derive(Debug, Default)]
#[repr(C)]
pub struct IsolatedRow {
    /// The CPU plus 1, or 0 in a free row.
    pub cpu: AtomicU64,
    /// How often other threads of the process may have disturbed the CPU until the last tick:
    /// fences, calls by which memory went back, folds, drains.
    pub counts: [AtomicU64; 4],
}

/// The memory of one node.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct NodeMemory {
    /// Bytes of runs in use, of slabs and of large blocks, and of the freed blocks that CPUs keep
    /// until the next tick.
    pub used: AtomicU64,
    /// Bytes of dirty free runs in the arena: memory that is kept for the next use.
    pub dirty: AtomicU64,
}

/// One cache.
#[derive(Debug, Default)]
#[repr(C)]
pub struct CacheRow {
    /// The cache's name in UTF-8, at most 32 bytes, filled up with zero bytes.
    pub name: [AtomicU64; 4],
    /// Bit 0 is set while the row is written, and bit 1 while a cache has the row. The other bits
    /// change with every cache that gets the row.
    pub state: AtomicU32,
    /// Bytes of an object.
    pub object: AtomicU32,
    /// Bytes from one object to the next.
    pub size: AtomicU32,
    /// Objects in a slab.
    pub per_slab: AtomicU32,
    /// Bytes of a slab.
    pub slab: AtomicU32,
    /// The maximum number of objects in a sheaf.
    pub sheaf_capacity: AtomicU32,
}

/// The events of one part of a split cache, besides those of the first part on each node.
#[derive(Debug, Default)]
#[repr(C)]
pub struct SplitRow {
    /// The events, which count as the cache's on the node.
    pub events: NodeEvents,
    /// The number of the cache's row plus 1, or 0 if no part has this row.
    pub cache: AtomicU32,
    /// The node.
    pub node: AtomicU32,
}

/// One counter that the program shows by name.
#[derive(Debug, Default)]
#[repr(C)]
pub struct CounterRow {
    /// The counter's name in ASCII, at most 32 bytes, filled up with zero bytes.
    pub name: [AtomicU64; 4],
    /// The counter's value at the last tick.
    pub value: AtomicU64,
    /// 2 while a counter has the row, otherwise 0.
    pub state: AtomicU32,
    /// The [`CounterKind`] of the value.
    pub kind: AtomicU32,
}

impl CacheRow {
    /// Writes a cache's name into a row that no cache has.
    pub(crate) fn set_name(&self, name: &str) {
        let mut bytes = [0; 32];
        let shown = &name.as_bytes()[..name.len().min(32)];
        bytes[..shown.len()].copy_from_slice(shown);
        for (word, bytes) in self.name.iter().zip(bytes.as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Relaxed);
        }
    }
}

/// Where the parts of a segment are, for a number of nodes.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// See [`Segment::memory_at`].
    pub memory: usize,
    /// See [`Segment::caches_at`].
    pub caches: usize,
    /// See [`Segment::events_at`].
    pub events: usize,
    /// See [`Segment::counters_at`].
    pub counters: usize,
    /// See [`Segment::splits_at`].
    pub splits: usize,
    /// How many nodes there are.
    pub nodes: usize,
}

impl Parts {
    /// Returns where the parts are in this process's segment.
    pub fn here() -> Parts {
        let nodes = nodes::count();
        let memory = size_of::<Segment>().next_multiple_of(align_of::<NodeMemory>());
        let caches = memory + nodes * size_of::<NodeMemory>();
        let events =
            (caches + CACHES * size_of::<CacheRow>()).next_multiple_of(align_of::<NodeEvents>());
        let counters = events + CACHES * nodes * size_of::<NodeEvents>();
        let splits = (counters + COUNTERS * size_of::<CounterRow>())
            .next_multiple_of(align_of::<SplitRow>());
        Parts {
            memory,
            caches,
            events,
            counters,
            splits,
            nodes,
        }
    }

    /// Returns how many [`SplitRow`]s there are.
    pub fn split_rows(&self) -> usize {
        // The first part of a cache on each node counts in the cache's own row.
        (SPLIT_CACHES * self.nodes * (most_parts() - 1)).min(SPLITS)
    }

    /// Returns where the last part ends.
    pub fn end(&self) -> usize {
        self.splits + self.split_rows() * size_of::<SplitRow>()
    }
}

impl Segment {
    /// Writes the fields of the head that never change, except `magic`, `pid` and those of the
    /// units.
    pub fn fill_in(&self, parts: Parts) {
        self.version.store(VERSION, Relaxed);
        self.memory_at.store(parts.memory as u32, Relaxed);
        self.caches_at.store(parts.caches as u32, Relaxed);
        self.caches.store(CACHES as u32, Relaxed);
        self.events_at.store(parts.events as u32, Relaxed);
        self.counters_at.store(parts.counters as u32, Relaxed);
        self.counters.store(COUNTERS as u32, Relaxed);
        self.splits_at.store(parts.splits as u32, Relaxed);
        self.splits.store(parts.split_rows() as u32, Relaxed);
        self.nodes.store(parts.nodes as u32, Relaxed);
        self.page_size.store(sys::page_size() as u32, Relaxed);
        let code = match backend() {
            Backend::Atomic => 0,
            Backend::Rseq(Index::Cpu) => 1,
            Backend::Rseq(Index::Cid) => 2,
        };
        self.backend.store(code, Relaxed);
        // A forked child begins with the counts of its parent, so it also keeps the time when they
        // began.
        if self.started_ns.load(Relaxed) == 0 {
            self.started_ns.store(files::now_ns(), Relaxed);
        }
    }
}

static CURRENT: AtomicPtr<Segment> = AtomicPtr::new(null_mut());

/// Returns this process's segment, or `None` if it has none. One load.
pub fn current() -> Option<&'static Segment> {
    // SAFETY: the caller of `install` promised that the segment stays mapped. Acquire pairs with
    // the release in `install`: a thread that sees the address also sees the segment's content.
    NonNull::new(CURRENT.load(Acquire)).map(|segment| unsafe { segment.as_ref() })
}

/// Sets this process's segment. One store.
///
/// # Safety
///
/// `segment` is zeroed or filled in, has the size of [`Parts::end`], and stays mapped until the
/// process ends.
pub unsafe fn install(segment: *mut Segment) {
    // Release pairs with the acquire in `current`: a thread that sees the address also sees the
    // segment's content.
    CURRENT.store(segment, Release);
    // Without room for this drain, the segment shows no ticks.
    shepherd::register(show_ticks);
}

/// Shows the shepherd's work. Each tick calls it.
fn show_ticks(_: Reach) {
    if let Some(segment) = current() {
        let work = shepherd::work();
        segment.ticks.store(work.ticks, Relaxed);
        segment.ticked_ns.store(files::now_ns(), Relaxed);
        segment.in_ticks_ns.store(work.nanoseconds, Relaxed);
        segment.folds.store(work.folds, Relaxed);
        segment.shepherds.store(work.threads, Relaxed);
        show_isolated();
    }
}

/// Shows which CPUs threads of this process have isolated, and what disturbed these. A row may show
/// the CPU of one isolation with the counts of another until the next call.
pub(crate) fn show_isolated() {
    if let Some(segment) = current() {
        let mut rows = segment.isolated.iter();
        spared::for_each(|cpu, counts| {
            if let Some(row) = rows.next() {
                row.cpu.store(cpu as u64 + 1, Relaxed);
                let places = row.counts.iter().zip(counts);
                places.for_each(|(place, count)| place.store(count, Relaxed));
            }
        });
        rows.for_each(|row| row.cpu.store(0, Relaxed));
    }
}

/// Returns the address of byte `at` of this process's segment.
fn part(at: usize) -> Option<*const u8> {
    let head = NonNull::new(CURRENT.load(Acquire))?;
    Some(head.as_ptr().cast_const().cast::<u8>().wrapping_add(at))
}

/// Returns the words for the memory of `node`, which exists.
pub(crate) fn memory(node: usize) -> Option<&'static NodeMemory> {
    let at = Parts::here().memory + node * size_of::<NodeMemory>();
    // SAFETY: the segment has a row for each node, and stays mapped. The words are atomics.
    part(at).map(|row| unsafe { &*row.cast() })
}

/// Returns the row of the cache at position `nth`, and its words for each node. Returns `None` if
/// there is no segment, or no room for the cache.
pub(crate) fn row(nth: usize) -> Option<(&'static CacheRow, &'static [NodeEvents])> {
    if nth >= CACHES {
        return None;
    }
    let parts = Parts::here();
    let row = part(parts.caches + nth * size_of::<CacheRow>())?;
    let events = part(parts.events + nth * parts.nodes * size_of::<NodeEvents>())?;
    current()?.caches_used.fetch_max(nth as u32 + 1, Relaxed);
    // SAFETY: the segment has rows for `CACHES` caches, and stays mapped. All words are atomics.
    unsafe {
        Some((
            &*row.cast(),
            core::slice::from_raw_parts(events.cast(), parts.nodes),
        ))
    }
}

/// Returns the rows of split caches' parts, or none if there is no segment.
pub(crate) fn split_rows() -> &'static [SplitRow] {
    let parts = Parts::here();
    match part(parts.splits) {
        // SAFETY: the segment has this many rows here, and stays mapped. All words are atomics.
        Some(rows) => unsafe { core::slice::from_raw_parts(rows.cast(), parts.split_rows()) },
        None => &[],
    }
}

/// Gives a row to a part of the cache at position `nth`, from the row with number `first` on.
/// Returns the row and its number, or `None` if there is no segment, or no row left.
pub(crate) fn claim_split_row(
    nth: usize,
    node: usize,
    first: usize,
) -> Option<(&'static SplitRow, usize)> {
    // Stands for no cache, so that no reader uses the row before it has its node.
    const TAKEN: u32 = u32::MAX;
    let claim = |row: &SplitRow| {
        let exchange = || row.cache.compare_exchange(0, TAKEN, Relaxed, Relaxed);
        row.cache.load(Relaxed) == 0 && exchange().is_ok()
    };
    let rows = split_rows();
    let at = first + rows.get(first..)?.iter().position(claim)?;
    current()?.splits_used.fetch_max(at as u32 + 1, Relaxed);
    rows[at].node.store(node as u32, Relaxed);
    // Release, for a reader that loads the cache first.
    rows[at].cache.store(nth as u32 + 1, Release);
    Some((&rows[at], at))
}

/// Takes the rows back from the parts of the cache at position `nth`, which count there no more.
pub(crate) fn give_split_rows(nth: usize) {
    let used = current().map_or(0, |segment| segment.splits_used.load(Relaxed) as usize);
    let rows = split_rows().iter().take(used);
    for row in rows.filter(|row| row.cache.load(Relaxed) == nth as u32 + 1) {
        row.events.clear();
        row.cache.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_that_are_copied_keep_their_time() {
        // SAFETY: all fields are atomics, for which zero is valid.
        let segment: Segment = unsafe { core::mem::zeroed() };
        segment.fill_in(Parts::here());
        assert_ne!(segment.started_ns.load(Relaxed), 0);
        segment.started_ns.store(5, Relaxed);
        segment.fill_in(Parts::here());
        assert_eq!(segment.started_ns.load(Relaxed), 5);
    }
}
