//! The statistics segment: the counts that a process shows to other processes.
//!
//! A process that was asked to count makes one file for each of its program images. It maps the
//! file shared. Any process that may open the file can read the counts. The file has three parts:
//!
//! 1. [`Segment`], the head.
//! 2. From [`Segment::events_at`] on, one [`NodeEvents`] for each row of [`Segment::classes`] and
//!    each node, row by row.
//! 3. From [`Segment::units_at`] on, the beginnings of the process's per-CPU units: one for each
//!    CPU (or concurrency id), and the one that all CPUs share.
//!
//! The segment holds three kinds of numbers:
//!
//! * **Calls** are [`VmEvents`]: words in the units. Only the unit's CPU adds to them, in critical
//!   sections. A total is the sum over the units. It misses at most the adds that are under way at
//!   that moment.
//! * **Events of the slow paths** are [`NodeEvents`]. The caches of the size classes add to them.
//! * **Memory held from the system** is counted by the arenas, and copied to [`Segment`]
//!   whenever it changes.
//!
//! # Invariants
//!
//! * `magic` is written last, with release order. A reader that sees [`MAGIC`] sees a complete
//!   head.
//! * Every number only grows, except `held` and `huge`.

use crate::counter_units;
use crate::vmstat::{Item, VmEvents};
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};

/// The value of [`Segment::magic`] in a segment that is ready: "PINFOLD" and a format byte.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PINFOLD\x01");

/// The version of the layout. A reader refuses other versions.
pub const VERSION: u32 = 4;

/// The number of rows for size classes, more than there are classes. Unused rows have `size` 0.
pub const CLASSES: usize = 80;

/// The environment variable that names the directory for segments.
///
/// Each process makes its segment there as `PID.N`. N counts the program images (`exec`) and forks
/// that had this PID.
pub const DIRECTORY_VARIABLE: &str = "PINFOLD_STATS";

/// The head of the segment: the process, and the counts of its slow paths.
///
/// # Examples
///
/// ```
/// // This process was not asked to count.
/// assert!(pinfold::segment::current().is_none());
/// ```
#[repr(C)]
pub struct Segment {
    /// [`MAGIC`], once every field that never changes is written.
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// The number of units that follow.
    pub units: AtomicU32,
    /// The process that counts.
    pub pid: AtomicU32,
    /// The backend in use: 0 atomics, 1 restartable sequences by CPU number, 2 by concurrency id.
    pub backend: AtomicU32,
    /// When the process began to count, in nanoseconds of `CLOCK_REALTIME`.
    pub started_ns: AtomicU64,
    /// The bytes now held from the system: slabs and runs, touched or not, without what was
    /// returned.
    pub held: AtomicU64,
    /// The largest value that `held` ever had.
    pub held_peak: AtomicU64,
    /// The bytes returned to the system so far, in every way.
    pub returned: AtomicU64,
    /// The bytes now mapped for huge blocks, each of which is a separate mapping. Part of `held`.
    pub huge: AtomicU64,
    /// Where in the file the first unit begins.
    pub units_at: AtomicU32,
    /// How many bytes of each unit are in the file.
    pub unit_bytes: AtomicU32,
    /// Where in each unit the [`Call`] events begin, one word each.
    pub calls: AtomicU32,
    /// Where in the file the [`NodeEvents`] begin.
    pub events_at: AtomicU32,
    /// How many nodes have [`NodeEvents`], for each row of `classes`.
    pub nodes: AtomicU32,
    /// One row for each size class, by the number of the class.
    pub classes: [ClassRow; CLASSES],
}

/// One size class.
///
/// # Examples
///
/// ```
/// use std::sync::atomic::Ordering::Relaxed;
///
/// let unused = pinfold::segment::ClassRow::default();
/// assert_eq!(unused.size.load(Relaxed), 0);
/// ```
#[derive(Debug, Default)]
#[repr(C)]
pub struct ClassRow {
    /// The bytes of an object, or 0 in an unused row.
    pub size: AtomicU32,
    /// The maximum number of objects in a sheaf of this class.
    pub sheaf_capacity: AtomicU32,
}

crate::vmstat_items! {
    /// An event in the slow paths of a cache, with the kernel's name.
    ///
    /// [`SlabEvent::is_locked`] tells whether the node's lock is held for it. The order of the
    /// events is by cache line: those without a lock, rare ones, and those that a holder of the
    /// lock counts together.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::segment::SlabEvent;
    ///
    /// assert!(SlabEvent::Refilled.is_locked() && !SlabEvent::FreeRemote.is_locked());
    /// ```
    pub enum SlabEvent {
        /// The part of `alloc_slowpath` that took no lock.
        AllocLockless = "alloc_lockless",
        /// The part of `free_slowpath` that took no lock.
        FreeLockless = "free_lockless",
        /// Objects allocated from another node's memory than the caller wanted.
        AllocNodeMismatch = "alloc_node_mismatch",
        /// Objects freed on another node than their own, and returned to their own.
        FreeRemote = "free_remote",
        /// Objects of deferred frees, in sheaves that wait for readers or have waited.
        FreeRcuSheaf = "free_rcu_sheaf",
        /// Objects lost because there was no memory for a sheaf in which they could wait.
        FreeRcuSheafFail = "free_rcu_sheaf_fail",
        /// Slabs made.
        SlabAlloc = "slab_alloc",
        /// Slabs given back to the arena.
        SlabFree = "slab_free",
        /// Allocations that found the sheaf empty, without [`AllocLockless`](Self::AllocLockless).
        AllocSlowpath = "alloc_slowpath",
        /// Frees that found the sheaf full, without [`FreeLockless`](Self::FreeLockless).
        FreeSlowpath = "free_slowpath",
        /// Full sheaves taken from the barn.
        BarnGet = "barn_get",
        /// How often the barn had no full sheaf to give.
        BarnGetFail = "barn_get_fail",
        /// Full sheaves put into the barn.
        BarnPut = "barn_put",
        /// How often a full sheaf was flushed because the barn had enough of them.
        BarnPutFail = "barn_put_fail",
        /// Objects taken from slabs, into sheaves or directly to a caller.
        Refilled = "refilled",
        /// Objects taken from slabs into sheaves.
        SheafRefill = "sheaf_refill",
        /// Objects given back to slabs, from sheaves or directly from a caller.
        Flushed = "flushed",
        /// Objects given back to slabs from sheaves.
        SheafFlush = "sheaf_flush",
        /// Slabs that were full until an object was given back.
        FreeAddPartial = "free_add_partial",
        /// Slabs whose last object was given back.
        FreeRemovePartial = "free_remove_partial",
    }
}

impl SlabEvent {
    /// Returns whether only the thread that holds the node's lock counts this event.
    pub const fn is_locked(self) -> bool {
        self as usize >= SlabEvent::SlabAlloc as usize
    }
}

/// The number of [`SlabEvent`]s.
pub const EVENTS: usize = SlabEvent::NAMES.len();

/// The events of one cache on one node: one word for each [`SlabEvent`], by number.
///
/// # Examples
///
/// ```
/// use pinfold::segment::{EVENTS, NodeEvents};
///
/// assert!(size_of::<NodeEvents>() >= 8 * EVENTS);
/// ```
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct NodeEvents([AtomicU64; EVENTS]);

impl NodeEvents {
    /// Returns a row with all words at 0.
    pub(crate) const fn new() -> NodeEvents {
        NodeEvents([const { AtomicU64::new(0) }; EVENTS])
    }

    /// Adds `n` to `event`.
    ///
    /// Costs an atomic add, or a load and a store for an event that [is
    /// locked](SlabEvent::is_locked). For such an event the caller holds the node's lock, so no
    /// other thread writes the word.
    #[inline]
    pub(crate) fn add(&self, event: SlabEvent, n: usize) {
        let word = &self.0[event as usize];
        if event.is_locked() {
            word.store(word.load(Relaxed).wrapping_add(n as u64), Relaxed);
        } else {
            word.fetch_add(n as u64, Relaxed);
        }
    }

    /// Adds each count to its place in `counts`.
    pub(crate) fn add_to(&self, counts: &mut [u64; EVENTS]) {
        for (count, word) in counts.iter_mut().zip(&self.0) {
            *count = count.wrapping_add(word.load(Relaxed));
        }
    }

    /// Moves the counts to `to`, and sets them to 0 here. The caller holds the node's lock.
    pub(crate) fn move_to(&self, to: &NodeEvents) {
        for (from, to) in self.0.iter().zip(&to.0) {
            to.fetch_add(from.swap(0, Relaxed), Relaxed);
        }
    }
}

/// An event that is counted at each call, in a process that was asked to count.
///
/// # Examples
///
/// ```
/// use pinfold::segment::Call;
///
/// assert_ne!(Call::alloc(3), Call::free(3));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call(usize);

impl Call {
    /// Bytes that callers asked for, in blocks of every size.
    pub const REQUESTED: Call = Call(2 * CLASSES);
    /// Blocks larger than the largest class that were allocated.
    pub const LARGE_ALLOC: Call = Call(2 * CLASSES + 1);
    /// Blocks larger than the largest class that were freed.
    pub const LARGE_FREE: Call = Call(2 * CLASSES + 2);
    /// Bytes allocated in blocks larger than the largest class.
    pub const LARGE_BYTES: Call = Call(2 * CLASSES + 3);
    /// Bytes freed in blocks larger than the largest class.
    pub const LARGE_BYTES_FREED: Call = Call(2 * CLASSES + 4);
    /// Calls of `realloc` and `reallocarray`. A call that moved the block also counts as an
    /// allocation and a free.
    pub const REALLOC: Call = Call(2 * CLASSES + 5);
    /// Calls that failed, without memory or because of a bad argument.
    pub const FAILED: Call = Call(2 * CLASSES + 6);

    /// Returns the event of an allocation of class `class`.
    ///
    /// # Examples
    ///
    /// ```
    /// let alloc = pinfold::segment::Call::alloc(0);
    /// assert_ne!(alloc, pinfold::segment::Call::alloc(1));
    /// ```
    #[inline]
    pub const fn alloc(class: usize) -> Call {
        Call(class)
    }

    /// Returns the event of a free of class `class`.
    ///
    /// # Examples
    ///
    /// ```
    /// let free = pinfold::segment::Call::free(0);
    /// assert_ne!(free, pinfold::segment::Call::alloc(0));
    /// ```
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

/// The part of the units that other processes can read, for [`share_units`].
///
/// # Examples
///
/// ```
/// use pinfold::segment::{Call, place_calls};
/// use pinfold::vmstat::VmEvents;
///
/// static CALLS: VmEvents<Call> = VmEvents::new();
/// // Nothing else was counted, so the whole pages with the calls can be shared.
/// if let Some(shared) = place_calls(&CALLS) {
///     assert!(shared.units > 1 && shared.bytes.is_multiple_of(4096));
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// The number of units.
    pub units: usize,
    /// The shared bytes of each unit.
    pub bytes: usize,
}

/// Gives `calls` a place in the units, and keeps other counts away from the same pages.
///
/// Call it at the start of a process, before anything else is counted. Returns `None` if something
/// was counted before, or if there is no memory. Costs a walk over the bitmap of the units.
pub fn place_calls(calls: &VmEvents<Call>) -> Option<Shared> {
    calls.block()?;
    Some(Shared {
        units: pinfold_rseq::possible() + 1,
        bytes: counter_units::seal(8 * Call::NAMES.len())?,
    })
}

/// Returns where in each unit the words of `calls` are, for [`Segment::calls`]. Returns `None` if
/// there is no memory. Costs one load if the calls have their place.
pub fn place_of(calls: &VmEvents<Call>) -> Option<usize> {
    calls.block()
}

/// Maps the beginnings of the units to the file `fd`, from `offset` on. Counts begin at 0.
///
/// Returns false if the system refuses, for some units or for all. Costs one system call for each
/// unit.
///
/// # Safety
///
/// * `shared` comes from [`place_calls`].
/// * The file is zeroed and large enough, and no process truncates it.
/// * No other thread counts during the call. Its counts could be lost.
pub unsafe fn share_units(fd: i32, offset: usize, shared: Shared) -> bool {
    // SAFETY: the caller promises that `shared.bytes` comes from `place_calls`, so from
    // `counter_units::seal`. It also promises a large enough file, and that no count in those bytes
    // is needed.
    unsafe { counter_units::share(fd, offset, shared.bytes) }
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
/// `segment` is zeroed or filled in, and stays mapped until the process ends.
pub unsafe fn install(segment: *mut Segment) {
    // Release pairs with the acquire in `current`: a thread that sees the address also sees the
    // segment's content.
    CURRENT.store(segment, Release);
}
