//! Counts of every call, in a process that was asked to count: words in the per-CPU units, which
//! lie in the segment's file.

use super::CLASSES;
use crate::counter_units;
use crate::vmstat::{Item, VmEvents};

/// An event that is counted at each call, in a process that was asked to count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call(usize);

impl Call {
    /// Bytes that callers asked for, in blocks of every size.
    pub const REQUESTED: Call = Call(3 * CLASSES);
    /// Blocks larger than the largest class that were allocated.
    pub const LARGE_ALLOC: Call = Call(3 * CLASSES + 1);
    /// Blocks larger than the largest class that were freed.
    pub const LARGE_FREE: Call = Call(3 * CLASSES + 2);
    /// Bytes allocated in blocks larger than the largest class.
    pub const LARGE_BYTES: Call = Call(3 * CLASSES + 3);
    /// Bytes freed in blocks larger than the largest class.
    pub const LARGE_BYTES_FREED: Call = Call(3 * CLASSES + 4);
    /// Calls of `realloc` and `reallocarray`. A call that moved the block also counts as an
    /// allocation and a free.
    pub const REALLOC: Call = Call(3 * CLASSES + 5);
    /// Calls that failed, because there was no memory or an argument was bad.
    pub const FAILED: Call = Call(3 * CLASSES + 6);

    /// Returns the event of an allocation of class `class`.
    #[inline]
    pub const fn alloc(class: usize) -> Call {
        Call(class)
    }

    /// Returns the event of a free of class `class`.
    #[inline]
    pub const fn free(class: usize) -> Call {
        Call(CLASSES + class)
    }

    /// Returns the event of bytes that callers asked for, in blocks of class `class`.
    #[inline]
    pub const fn requested(class: usize) -> Call {
        Call(2 * CLASSES + class)
    }
}

const CALL_NAMES: [&str; 3 * CLASSES + 7] = {
    let mut names = ["alloc"; 3 * CLASSES + 7];
    let mut class = 0;
    while class < CLASSES {
        names[CLASSES + class] = "free";
        names[2 * CLASSES + class] = "requested";
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
        names[3 * CLASSES + nth] = rest[nth];
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

/// Returns where in each unit the words of `calls` are, for
/// [`Segment::calls`](super::Segment::calls). Returns `None` if there is no memory. Costs one load
/// if the words exist.
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
