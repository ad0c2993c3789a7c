//! Heap profiles: which call stacks allocated the memory, from a sample of the allocations.
//!
//! The allocator asks [`is_due`] at each allocation, while the profile is on. On average, one
//! allocation is sampled for each *interval* of bytes. The allocator then calls [`allocated`] with
//! the new block, and [`freed`] when that block is freed. A block that was not sampled costs
//! nothing when it is freed.
//!
//! | part | holds | memory |
//! |---|---|---|
//! | `countdown` | bytes until the next sample | two words for each CPU |
//! | `walk` | the stacks on which call stacks are walked | private |
//! | `records` | each call stack, with what it allocated and freed | shared, or private |
//! | `blocks` | the sampled blocks in use | private |
//!
//! # What a sample stands for
//!
//! The bytes between two samples follow an exponential distribution with the interval R as mean. So
//! an allocation of S bytes is sampled with probability 1 − e^(−S/R), whatever other allocations
//! there are. A sample stands for the inverse of that probability as many allocations of its size:
//! the expected sum over all samples is the exact sum over all allocations.
//!
//! # Forks
//!
//! The child of a fork goes on with a private copy of the records ([`in_child`]).
//!
//! # Limits
//!
//! The tables have a fixed size. A sample that finds no room is dropped and counted
//! ([`Head::dropped`]).

mod blocks;
mod countdown;
mod math;
mod records;
mod walk;

pub use blocks::Lifted;
pub use countdown::{DEFAULT_INTERVAL, MAX_INTERVAL, count, is_due, is_due_slow};
pub use records::{
    Counts, FRAMES, HEAP_MAGIC, HEAP_VERSION, Head, MAX_RECORDS, Memory, RECORDS_AT, Record, Totals,
};
pub use walk::callers;

use crate::sys;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::{Acquire, Release};

/// Bytes of the memory that [`start`] takes.
pub const BYTES: usize = RECORDS_AT + MAX_RECORDS * size_of::<Record>();

/// Whether the tables exist.
static READY: AtomicBool = AtomicBool::new(false);

/// Returns whether the profile was ever on.
pub fn is_ready() -> bool {
    READY.load(Acquire)
}

/// Makes the tables if there are none, and sets the mean bytes from one sample to the next.
/// `memory` makes the memory for the records.
///
/// Returns false if the system has no memory. An interval beyond [`MAX_INTERVAL`] is taken as that,
/// and 0 as 1. The caller makes sure that no two threads start or stop at the same time, and that
/// this thread may load a library: the first call walks the stack once, so that the unwinder is
/// loaded.
///
/// # Safety
///
/// `memory` returns [`BYTES`] zeroed bytes that stay mapped, and that only this module writes.
pub unsafe fn start(interval: u64, memory: impl FnOnce() -> Option<Memory>) -> bool {
    if !is_ready() {
        let made = countdown::prepare() && walk::prepare() && blocks::prepare();
        if !made || !(records::is_there() || memory().is_some_and(records::prepare)) {
            return false;
        }
        // Release pairs with the acquire in `is_ready`: a thread that sees the flag sees the
        // tables.
        READY.store(true, Release);
    }
    countdown::set_interval(interval);
    records::note(true);
    true
}

/// Moves private records to memory that other processes see. Returns false if there are no records,
/// or the system refuses. Does nothing if they are shared already. Some samples of this moment may
/// be lost.
///
/// # Safety
///
/// The same as for [`start`]. The memory is a mapping of its own.
pub unsafe fn share(memory: impl FnOnce() -> Option<Memory>) -> bool {
    // SAFETY: the caller promises the memory.
    is_ready() && unsafe { records::share(memory) }
}

/// Notes for readers that allocations are not sampled any more.
pub fn stop() {
    records::note(false);
}

/// Returns private memory for [`start`].
pub fn private_memory() -> Option<Memory> {
    let start = sys::map_sparse(BYTES)?.as_ptr();
    Some(Memory {
        start,
        is_shared: false,
    })
}

/// Notes that `block` was allocated for `size` bytes, with the call stack of this thread. Costs a
/// walk of the stack.
///
/// The block was sampled: [`is_due`] has returned true for this size, and it has not been freed.
#[cold]
#[inline(never)]
pub fn allocated(block: *mut u8, size: usize) {
    let mut frames = [0; FRAMES];
    let depth = callers(&mut frames);
    let counts = Counts::of(size, countdown::interval());
    let record = depth.and_then(|depth| records::find(&frames[..depth]));
    let is_kept = record.is_some_and(|record| {
        let is_kept = blocks::insert(
            block,
            Lifted {
                record,
                size,
                objects: counts.objects,
            },
        );
        if is_kept {
            records::add(record, counts);
        }
        is_kept
    });
    if !is_kept {
        records::dropped();
    }
}

/// Notes that `block` was freed. Does nothing if the block was not sampled. Costs a look at no more
/// than 32 neighbouring entries of a table.
///
/// The caller still owns the block: the address belongs to no other block yet.
pub fn freed(block: *mut u8) {
    if let Some(lifted) = lift(block) {
        drop_lifted(lifted);
    }
}

/// Takes the sample of a block out of the table, for a caller that is about to move or resize the
/// block. Returns `None` if the block was not sampled. Costs as much as [`freed`].
pub fn lift(block: *mut u8) -> Option<Lifted> {
    blocks::remove(block)
}

/// Puts a sample back that was lifted from `block`, which has `size` bytes now, or as many as before
/// if that is `None`. The sample goes on to stand for as many blocks.
pub fn put_back(lifted: Lifted, block: *mut u8, size: Option<usize>) {
    let (before, size) = (lifted.counts(), size.unwrap_or(lifted.size));
    let resized = Lifted { size, ..lifted };
    records::resize(lifted.record, before, resized.counts());
    if !blocks::insert(block, resized) {
        records::take(lifted.record, resized.counts());
        records::dropped();
    }
}

/// Notes that the block of a sample that was lifted was freed.
pub fn drop_lifted(lifted: Lifted) {
    records::take(lifted.record, lifted.counts());
}

/// Gives the child of a fork its own records, with what its parent's say. Does nothing if the
/// records are private already. The child calls this before its first allocation.
pub fn in_child() {
    if is_ready() {
        walk::in_child();
        records::in_child();
    }
}

/// Returns the sums over all call stacks. Reads every record.
pub fn totals() -> Totals {
    records::totals()
}

/// Calls `f` with the bytes of the head and the records in use, for a file.
pub fn with_bytes(f: impl FnOnce(&[u8])) {
    if is_ready() {
        records::with_bytes(f);
    }
}
