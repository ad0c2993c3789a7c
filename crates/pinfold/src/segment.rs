//! The statistics segment: what a process that was asked to count shows to others.
//!
//! One file per process image, mapped shared by the process that counts and read by anyone who may open it. The
//! file has three parts:
//!
//! 1. [`Segment`], the head.
//! 2. From [`Segment::events_at`] on, [`NodeEvents`] for each row of [`Segment::classes`] and each
//!    node, row by row.
//! 3. From [`Segment::units_at`] on, the beginnings of the process's per-CPU units: one for each
//!    CPU (or concurrency id) and one that all share.
//!
//! Three kinds of numbers live here:
//!
//! * Calls are [`VmEvents`]: words in the units, to which only the unit's CPU adds, in critical
//!   sections. A total is the sum over the units; it misses at most what is being added at that
//!   moment.
//! * Events of the slow paths are [`NodeEvents`], to which the caches of the size classes add.
//! * What is held from the system is kept by the page layer, and copied to [`Segment`] whenever it
//!   changes.
//!
//! # Invariants
//!
//! `magic` is written last, with release order: a reader that sees [`MAGIC`] sees a complete header. Every number
//! only grows, except `held` and `huge`.

use crate::percpu;
use crate::vmstat::{Item, VmEvents};
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};

/// Marks a segment that is ready to be read: "PINFOLD" and a format byte.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PINFOLD\x01");

/// The layout's version; a reader refuses another.
pub const VERSION: u32 = 4;

/// Rows for size classes, more than there are classes; unused rows have `size` 0.
pub const CLASSES: usize = 80;

/// The environment variable that names the directory in which each process makes its segment, as `PID.N`, with N
/// counting the program images (`exec`) and forks that had this PID.
pub const DIRECTORY_VARIABLE: &str = "PINFOLD_STATS";

/// The head of the segment: who counts, and what the slow paths know.
#[repr(C)]
pub struct Segment {
    /// [`MAGIC`] once everything that never changes is written.
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// How many units follow.
    pub units: AtomicU32,
    /// The process that counts.
    pub pid: AtomicU32,
    /// The backend in use: 0 atomics, 1 restartable sequences by CPU number, 2 by concurrency id.
    pub backend: AtomicU32,
    /// When the process began to count, in nanoseconds of `CLOCK_REALTIME`.
    pub started_ns: AtomicU64,
    /// Bytes now held from the system: slabs and runs, resident or not yet touched, without what was returned.
    pub held: AtomicU64,
    /// The most that `held` ever was.
    pub held_peak: AtomicU64,
    /// Bytes returned to the system so far, by all ways together.
    pub returned: AtomicU64,
    /// Bytes now mapped for huge blocks, each a mapping of its own. Part of `held`.
    pub huge: AtomicU64,
    /// Where in the file the first unit begins.
    pub units_at: AtomicU32,
    /// Bytes of each unit that are in the file.
    pub unit_bytes: AtomicU32,
    /// Where in each unit the [`Call`] events are, a word each.
    pub calls: AtomicU32,
    /// Where in the file the [`NodeEvents`] begin.
    pub events_at: AtomicU32,
    /// How many nodes have [`NodeEvents`], for each row of `classes`.
    pub nodes: AtomicU32,
    /// One row for each size class, by class number.
    pub classes: [ClassRow; CLASSES],
}

/// What one size class is.
#[derive(Debug, Default)]
#[repr(C)]
pub struct ClassRow {
    /// Bytes of an object; 0 in an unused row.
    pub size: AtomicU32,
    /// Objects that a sheaf of this class holds at most.
    pub sheaf_capacity: AtomicU32,
}

crate::vmstat_items! {
    /// What the slow paths of a cache count, with the kernel's names.
    /// [`SlabEvent::is_locked`] tells the two kinds apart.
    ///
    /// The order is by cache line: what takes no lock, what is rare, and what the holder of the
    /// lock counts together.
    pub enum SlabEvent {
        /// The part of `alloc_slowpath` that took no lock.
        AllocLockless = "alloc_lockless",
        /// The part of `free_slowpath` that took no lock.
        FreeLockless = "free_lockless",
        /// Objects given out of another node's memory than wanted.
        AllocNodeMismatch = "alloc_node_mismatch",
        /// Objects that were freed on another node than theirs, and went home.
        FreeRemote = "free_remote",
        /// Objects freed deferred, as far as their sheaves wait or have waited.
        FreeRcuSheaf = "free_rcu_sheaf",
        /// Objects lost because there was no memory for a sheaf in which they could have waited.
        FreeRcuSheafFail = "free_rcu_sheaf_fail",
        /// Slabs made.
        SlabAlloc = "slab_alloc",
        /// Slabs given back to the arena.
        SlabFree = "slab_free",
        /// Allocations that found the sheaf empty, less [`AllocLockless`](Self::AllocLockless).
        AllocSlowpath = "alloc_slowpath",
        /// Frees that found the sheaf full, less [`FreeLockless`](Self::FreeLockless).
        FreeSlowpath = "free_slowpath",
        /// Full sheaves taken from the barn.
        BarnGet = "barn_get",
        /// Times that the barn had no full sheaf to give.
        BarnGetFail = "barn_get_fail",
        /// Full sheaves put into the barn.
        BarnPut = "barn_put",
        /// Times that the barn had full sheaves enough, so that one was flushed.
        BarnPutFail = "barn_put_fail",
        /// Objects taken from slabs, into sheaves or past them.
        Refilled = "refilled",
        /// Objects taken from slabs into sheaves.
        SheafRefill = "sheaf_refill",
        /// Objects given back to slabs, out of sheaves or past them.
        Flushed = "flushed",
        /// Objects given back to slabs out of sheaves.
        SheafFlush = "sheaf_flush",
        /// Slabs that were full until an object came back.
        FreeAddPartial = "free_add_partial",
        /// Slabs whose last object came back.
        FreeRemovePartial = "free_remove_partial",
    }
}

impl SlabEvent {
    /// Returns whether only the thread that holds the node's lock counts this event.
    pub const fn is_locked(self) -> bool {
        self as usize >= SlabEvent::SlabAlloc as usize
    }
}

/// How many [`SlabEvent`]s there are.
pub const EVENTS: usize = SlabEvent::NAMES.len();

/// What the slow paths of one cache count on one node: a word for each [`SlabEvent`], by number.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct NodeEvents([AtomicU64; EVENTS]);

impl NodeEvents {
    /// All words at 0.
    pub(crate) const fn new() -> NodeEvents {
        NodeEvents([const { AtomicU64::new(0) }; EVENTS])
    }

    /// Adds `n` to `event`.
    ///
    /// An event that [is locked](SlabEvent::is_locked) needs no atomic read-modify-write: the
    /// caller holds the node's lock, so that no other thread writes the word.
    #[inline]
    pub(crate) fn add(&self, event: SlabEvent, n: usize) {
        let word = &self.0[event as usize];
        if event.is_locked() {
            word.store(word.load(Relaxed).wrapping_add(n as u64), Relaxed);
        } else {
            word.fetch_add(n as u64, Relaxed);
        }
    }

    /// Adds the counts to `counts`.
    pub(crate) fn add_to(&self, counts: &mut [u64; EVENTS]) {
        for (count, word) in counts.iter_mut().zip(&self.0) {
            *count = count.wrapping_add(word.load(Relaxed));
        }
    }

    /// Moves the counts to `to`; these begin at 0 again. The caller holds the node's lock.
    pub(crate) fn move_to(&self, to: &NodeEvents) {
        for (from, to) in self.0.iter().zip(&to.0) {
            to.fetch_add(from.swap(0, Relaxed), Relaxed);
        }
    }
}

/// What is counted call by call, while somebody asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call(usize);

impl Call {
    /// Bytes that the callers asked for, of every size.
    pub const REQUESTED: Call = Call(2 * CLASSES);
    /// Blocks above the largest class that were allocated.
    pub const LARGE_ALLOC: Call = Call(2 * CLASSES + 1);
    /// Blocks above the largest class that were freed.
    pub const LARGE_FREE: Call = Call(2 * CLASSES + 2);
    /// Bytes given out in blocks above the largest class.
    pub const LARGE_BYTES: Call = Call(2 * CLASSES + 3);
    /// Bytes taken back in blocks above the largest class.
    pub const LARGE_BYTES_FREED: Call = Call(2 * CLASSES + 4);
    /// Calls of `realloc` and `reallocarray`, which also show as an allocation and a free when the block moved.
    pub const REALLOC: Call = Call(2 * CLASSES + 5);
    /// Calls that failed for want of memory or by a bad argument.
    pub const FAILED: Call = Call(2 * CLASSES + 6);

    /// Objects of a class allocated.
    #[inline]
    pub const fn alloc(class: usize) -> Call {
        Call(class)
    }

    /// Objects of a class freed.
    #[inline]
    pub const fn free(class: usize) -> Call {
        Call(CLASSES + class)
    }
}

const CALL_NAMES: [&str; 2 * CLASSES + 7] = {
    let mut names = ["alloc"; 2 * CLASSES + 7];
    let mut class = 0;
    while class < CLASSES {
        names[CLASSES + class] = "free";
        class += 1;
    }
    let rest = [
        "requested",
        "large_alloc",
        "large_free",
        "large_bytes",
        "large_bytes_freed",
        "realloc",
        "failed",
    ];
    let mut nth = 0;
    while nth < rest.len() {
        names[2 * CLASSES + nth] = rest[nth];
        nth += 1;
    }
    names
};

impl Item for Call {
    const NAMES: &'static [&'static str] = &CALL_NAMES;
    #[inline(always)]
    fn index(self) -> usize {
        self.0
    }
}

/// The units' beginnings as they are shared: what [`share_units`] needs.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// How many units.
    pub units: usize,
    /// Bytes of each.
    pub bytes: usize,
}

/// Gives `calls` their place in the units, and keeps everything else away from it; at a process's
/// start, before anything else is counted. `None` when it is too late, or there is no memory.
pub fn place_calls(calls: &VmEvents<Call>) -> Option<Shared> {
    calls.place()?;
    Some(Shared {
        units: pinfold_rseq::possible() + 1,
        bytes: percpu::seal(8 * Call::NAMES.len())?,
    })
}

/// Returns where in each unit the words of `calls` are, for [`Segment::calls`]; `None` without
/// memory.
pub fn place_of(calls: &VmEvents<Call>) -> Option<usize> {
    calls.place()
}

/// Maps the units' beginnings to the file `fd`, from `offset` on. Counts begin at zero.
///
/// # Safety
///
/// `shared` comes from [`place_calls`]; the file is zeroed, large enough, and nobody cuts it; no
/// other thread counts meanwhile, or what it counts may be lost.
pub unsafe fn share_units(fd: i32, offset: usize, shared: Shared) -> bool {
    // SAFETY: the caller's promise.
    unsafe { percpu::share(fd, offset, shared.bytes) }
}

static CURRENT: AtomicPtr<Segment> = AtomicPtr::new(null_mut());

/// This process's segment, where it has one. One load.
pub fn current() -> Option<&'static Segment> {
    // SAFETY: `install` was given a segment that stays mapped.
    NonNull::new(CURRENT.load(Acquire)).map(|segment| unsafe { segment.as_ref() })
}

/// Makes `segment` this process's.
///
/// # Safety
///
/// `segment` is a zeroed or filled-in segment that stays mapped for the rest of the process's life.
pub unsafe fn install(segment: *mut Segment) {
    // Release pairs with the acquire in `current`.
    CURRENT.store(segment, Release);
}
