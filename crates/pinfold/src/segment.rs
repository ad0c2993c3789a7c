//! The statistics segment: what a process that was asked to count shows to others.
//!
//! One file per process image, mapped shared by the process that counts and read by anyone who may open it. The
//! layout is [`Segment`] followed by `shards` times [`Shard`], each at [`shard_offset`]. Two kinds of numbers live
//! here:
//!
//! * Per-call counts stand in the shards, one shard a CPU (or concurrency id), and only that CPU's restartable
//!   sequences add to them. A total is the sum over the shards; it misses at most what is being added at that moment.
//! * What the slow paths know (refills, spills, slabs, memory held) stands in [`Segment`] itself and is added to
//!   with atomics or under the lock of the thing counted.
//!
//! # Invariants
//!
//! `magic` is written last, with release order: a reader that sees [`MAGIC`] sees a complete header. Every number
//! only grows, except `held` and `huge`.

use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Acquire, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};

/// Marks a segment that is ready to be read: "PINFOLD" and a format byte.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PINFOLD\x01");

/// The layout's version; a reader refuses another.
pub const VERSION: u32 = 1;

/// Rows for size classes, more than there are classes; unused rows have `size` 0.
pub const CLASSES: usize = 48;

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
    /// How many [`Shard`]s follow.
    pub shards: AtomicU32,
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
    /// One row for each size class, by class number.
    pub classes: [ClassRow; CLASSES],
}

/// What the slow paths know of one size class.
#[derive(Debug, Default)]
#[repr(C)]
pub struct ClassRow {
    /// Bytes of an object; 0 in an unused row.
    pub size: AtomicU32,
    /// Objects that a sheaf of this class holds at most.
    pub sheaf_capacity: AtomicU32,
    /// Allocations that found the sheaf empty.
    pub alloc_slowpath: AtomicU64,
    /// Frees that found the sheaf full.
    pub free_slowpath: AtomicU64,
    /// Full sheaves taken from the barn.
    pub barn_get: AtomicU64,
    /// Full sheaves put into the barn.
    pub barn_put: AtomicU64,
    /// Objects taken from slabs.
    pub refilled: AtomicU64,
    /// Objects given back to slabs.
    pub flushed: AtomicU64,
    /// Slabs made.
    pub slab_alloc: AtomicU64,
    /// Slabs given back to the arena.
    pub slab_free: AtomicU64,
}

/// What one CPU counted, call by call.
#[repr(C, align(64))]
pub struct Shard {
    /// The header of the unit that a shard is to the operations that add to it.
    pub unit_header: [AtomicU64; 8],
    /// Objects allocated, by class.
    pub alloc: [AtomicU64; CLASSES],
    /// Objects freed, by class.
    pub free: [AtomicU64; CLASSES],
    /// Bytes that the callers asked for, of every size.
    pub requested: AtomicU64,
    /// Blocks above the largest class that were allocated.
    pub large_alloc: AtomicU64,
    /// Blocks above the largest class that were freed.
    pub large_free: AtomicU64,
    /// Bytes given out in blocks above the largest class.
    pub large_bytes: AtomicU64,
    /// Bytes taken back in blocks above the largest class.
    pub large_bytes_freed: AtomicU64,
    /// Calls of `realloc` and `reallocarray`, which also show as an allocation and a free when the block moved.
    pub realloc: AtomicU64,
    /// Calls that failed for want of memory or by a bad argument.
    pub failed: AtomicU64,
}

/// Where shard `shard` begins, in bytes from the start of the segment.
pub const fn shard_offset(shard: usize) -> usize {
    size_of::<Segment>().next_multiple_of(align_of::<Shard>()) + shard * size_of::<Shard>()
}

/// The size in bytes of a segment with `shards` shards.
pub const fn segment_size(shards: usize) -> usize {
    shard_offset(shards)
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
