//! Heap profiles: which call stacks allocated the memory, from a sample of the allocations.
//!
//! While the profile is on, each CPU counts bytes down to its next sample. The allocator's fast
//! path counts small blocks itself. Where it cannot, it asks whether a sample is [`due`]. On
//! average, one allocation is sampled for each *interval* of bytes. The allocator then calls
//! [`allocated`] with the new block, and [`freed`] when that block is freed. A block that was not
//! sampled costs nothing when it is freed.
//!
//! | part | holds | memory |
//! |---|---|---|
//! | `countdown` | bytes until the next sample | two words for each CPU |
//! | `walk` | the stacks on which call stacks are walked | private |
//! | `unwinder` | whether the unwinder takes the loader's lock | |
//! | `growth` | what a sample stands for after `realloc` in place | |
//! | `records` | each call stack, with what it allocated and freed | shared, or private |
//! | `blocks` | the sampled blocks in use | private |
//! | `probes` | static probes for tracers outside | |
//!
//! # What a sample stands for
//!
//! The bytes between two samples follow an exponential distribution with the interval R as mean. So
//! an allocation of S bytes is sampled with probability 1 − e^(−S/R), whatever other allocations
//! there are. A sample with probability p stands for 1/p allocations of its size: the expected sum
//! over all samples is the exact sum over all allocations. `growth` says how a block that grows in
//! place is counted.
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
mod growth;
mod math;
mod probes;
mod records;
mod unwinder;
mod walk;

use blocks::NO_RECORD;
pub use blocks::{Lifted, StandIn};
pub use countdown::{DEFAULT_INTERVAL, MAX_INTERVAL, due};
pub use growth::Resize;
pub use probes::is_watched;
pub use records::{
    Counts, FRAMES, HEAP_MAGIC, HEAP_VERSION, Head, MAX_RECORDS, Memory, RECORDS_AT, Record, Totals,
};
#[doc(hidden)]
pub use walk::forbid_walks;
pub(crate) use walk::{
    ALL, prepare as prepare_walks, run_on_stack, walk, walks_are_forbidden, without_signals,
};
pub use walk::{NoWalks, callers, no_walks};

pub use crate::sys::{here, keep_frame};

use crate::sys;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU8};

/// Bytes of the memory that [`start`] takes.
pub const BYTES: usize = RECORDS_AT + MAX_RECORDS * size_of::<Record>();

/// Bits: whether the tables exist, and whether call stacks are recorded.
static STATE: AtomicU8 = AtomicU8::new(0);
/// Blocks can be sampled, and their frees seen.
const READY: u8 = 1;
/// Call stacks are recorded.
const RECORDS: u8 = 2;

fn is(bit: u8) -> bool {
    // Acquire pairs with the release in `prepare` and `start`: a thread that sees the bit sees the
    // tables.
    STATE.load(Acquire) & bit != 0
}

/// Returns whether allocations are to be counted and sampled now: for call stacks, or for a tracer
/// at the probes. Three loads.
pub(crate) fn takes_samples() -> bool {
    is(RECORDS) || is_watched()
}

/// Returns whether there may be sampled blocks. One load.
pub(crate) fn has_samples() -> bool {
    is(READY)
}

/// Returns whether there are records.
pub fn has_records() -> bool {
    records::is_there()
}

/// Makes the tables that every sample needs. Returns false if there is no memory. The caller makes
/// sure that no two threads start or stop at the same time.
fn prepare() -> bool {
    let made = is(READY) || blocks::prepare();
    if made && !is(READY) {
        countdown::prepare();
        STATE.fetch_or(READY, Release);
    }
    made
}

/// Starts the profile, or changes the mean bytes from one sample to the next. Makes the tables if
/// there are none. [`DEFAULT_INTERVAL`] grows while it would give more than some 4,000 samples a
/// second. Any other mean stays. `memory` makes the memory for the records.
///
/// Returns false if the system has no memory. An interval above [`MAX_INTERVAL`] counts as
/// [`MAX_INTERVAL`], and 0 as 1. The caller makes sure that no two threads start or stop at the
/// same time, and that this thread may load a library: the first call walks the stack once, so that
/// the unwinder is loaded.
///
/// # Safety
///
/// `memory` returns [`BYTES`] zeroed bytes that stay mapped, and that only this module writes.
pub unsafe fn start(interval: u64, memory: impl FnOnce() -> Option<Memory>) -> bool {
    let made = prepare() && (records::is_there() || walk::prepare());
    if !made || !(records::is_there() || memory().map(records::prepare).is_some()) {
        return false;
    }
    countdown::set_interval(interval);
    STATE.fetch_or(RECORDS, Release);
    records::note(true);
    true
}

/// Prepares samples for another use than a profile: for guarded blocks, or for the probes. Makes
/// the tables if there are none, and sets the mean bytes from one sample to the next unless a
/// profile is on. Returns false if the system has no memory. The caller makes sure that no two
/// threads start or stop at the same time.
pub fn start_samples(interval: u64) -> bool {
    let made = prepare();
    if made && !is(RECORDS) {
        countdown::set_interval(interval);
    }
    made
}

/// Ends the recording of call stacks. The frees of samples are still recorded.
pub fn stop() {
    STATE.fetch_and(!RECORDS, Release);
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
/// The block was sampled: [`due`] has returned `mean` for this size, and the block has not been
/// freed. The call stack leaves out what [`callers`] leaves out for `from`.
///
/// Returns the block of `stand_in` if the caller is to free it now, or null: the sample was
/// dropped.
#[cold]
#[inline(never)]
pub fn allocated(
    block: *mut u8,
    size: usize,
    mean: u64,
    stand_in: StandIn,
    from: usize,
) -> *mut u8 {
    match enter(block, size, Counts::of(size, mean), mean, stand_in, from) {
        true => null_mut(),
        false => stand_in.block,
    }
}

/// Notes that a block without a sample has grown in place, with the call stack of this thread.
/// [`due`] has returned `mean` for the bytes by which the block's room grew. `from` is as in
/// [`allocated`].
#[cold]
#[inline(never)]
pub fn grown(block: *mut u8, resize: Resize, mean: u64, from: usize) {
    let counts = resize.sampled(mean);
    enter(block, resize.size, counts, mean, StandIn::NONE, from);
}

/// Enters the sample of a block, which stands for `counts`. Returns false if the sample was
/// dropped.
#[inline(always)]
fn enter(
    block: *mut u8,
    size: usize,
    counts: Counts,
    mean: u64,
    stand_in: StandIn,
    from: usize,
) -> bool {
    let record = if is(RECORDS) {
        record_here(from)
    } else {
        Some(NO_RECORD)
    };
    let is_kept = record.is_some_and(|record| {
        let is_kept = blocks::insert(
            block,
            Lifted {
                record,
                size,
                counts,
                stand_in,
            },
        );
        if is_kept {
            records::add(record, counts);
        }
        is_kept
    });
    if is_kept {
        probes::alloc(block, size, counts.bytes, from);
    } else {
        records::dropped();
    }
    countdown::pace(mean);
    records::note_interval();
    is_kept
}

/// Counts a sample that was due and could not be taken.
pub fn dropped() {
    records::dropped();
}

/// Returns the record of the calling thread's call stack. Returns `None` if there is no room for
/// it, or if the stack cannot be walked now.
#[inline(never)]
fn record_here(from: usize) -> Option<u32> {
    let mut frames = [0; FRAMES];
    let depth = callers(&mut frames, from)?;
    records::find(&frames[..depth])
}

/// Notes that `block` was freed. Does nothing if the block was not sampled. Reads at most 32
/// neighbouring entries of a table.
///
/// The caller still owns the block: the address belongs to no other block yet. `from` is what
/// [`here`] returned in the allocator's outermost function, for tracers. Returns the block that
/// stood in for this one, for the caller to free, or null.
#[must_use]
pub fn freed(block: *mut u8, from: usize) -> *mut u8 {
    lift(block, from).map_or(null_mut(), drop_lifted)
}

/// Takes the sample of a block out of the table, for a caller that is about to move or resize the
/// block. Returns `None` if the block was not sampled. Costs as much as [`freed`].
///
/// A tracer sees a free now, because the address may belong to another block after the move. `from`
/// is as in [`freed`].
pub fn lift(block: *mut u8, from: usize) -> Option<Lifted> {
    let lifted = blocks::remove(block)?;
    probes::free(block, from);
    Some(lifted)
}

/// Puts a sample back that was lifted from `block`. `resize` says how the block was resized, or is
/// `None` if the block has not changed. A tracer sees an allocation. `from` and the result are as
/// in [`freed`].
#[must_use]
pub fn put_back(lifted: Lifted, block: *mut u8, resize: Option<Resize>, from: usize) -> *mut u8 {
    let resized = match resize {
        Some(resize) => {
            let counts = resize.of_sample(lifted.size, lifted.counts, countdown::interval());
            records::resize(lifted.record, lifted.counts, counts, resize.growth() > 0);
            Lifted {
                size: resize.size,
                counts,
                ..lifted
            }
        }
        None => lifted,
    };
    if blocks::insert(block, resized) {
        probes::alloc(block, resized.size, resized.counts.bytes, from);
        null_mut()
    } else {
        records::dropped();
        drop_lifted(resized)
    }
}

/// Notes that the block whose sample was lifted was freed. The result is as in [`freed`].
#[must_use]
pub fn drop_lifted(lifted: Lifted) -> *mut u8 {
    records::take(lifted.record, lifted.counts);
    lifted.stand_in.block
}

/// Copies the parent's records to private memory, in the child of a fork. Does nothing if the
/// records are private already. The child calls this before its first allocation. `pid` is the
/// child's PID, because a sandbox may forbid the child to ask for it.
pub fn in_child(pid: u32) {
    if is(READY) {
        // Another thread of the parent may have been at it.
        IS_WEIGHING.store(false, Relaxed);
        walk::in_child();
        countdown::in_child(pid);
        records::in_child(pid);
    }
}

/// A sampled block in use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InUse {
    pub start: usize,
    pub size: usize,
    record: u32,
    counts: Counts,
}

/// Calls `f` with the sampled blocks in use. Reads the whole table of blocks. A block that another
/// thread allocates or frees meanwhile may be missing.
pub(crate) fn for_each_in_use(mut f: impl FnMut(InUse)) {
    blocks::for_each(
        |start,
         Lifted {
             record,
             size,
             counts,
             ..
         }| {
            f(InUse {
                start,
                size,
                record,
                counts,
            });
        },
    );
}

/// Returns whether each allocation is sampled now, and no sample was dropped.
pub(crate) fn is_exact() -> bool {
    is(RECORDS) && countdown::interval() <= 1 && records::totals().dropped == 0
}

/// Returns whether `address` lies in this module's private memory.
pub(crate) fn holds(address: usize) -> bool {
    blocks::holds(address) || walk::holds(address)
}

/// Notes that a block is lost.
pub(crate) fn lost(block: &InUse) {
    records::lost(block.record, block.counts);
}

/// Forgets which blocks were lost. Writes to the head whether lost blocks were looked for.
pub(crate) fn note_look(is_done: bool) {
    records::note_look(is_done);
}

/// Whether a thread is in [`weigh_fragments`].
static IS_WEIGHING: AtomicBool = AtomicBool::new(false);

/// Charges each call stack with the free bytes in slabs that its blocks in use keep. `free_beside`
/// returns how many bytes a block in the slab of a [`StandIn`] keeps. Forgets earlier charges.
/// Reads the whole table of blocks.
///
/// Returns false, and does nothing, if there are no records, or if another thread is at it. In the
/// second case the records may have a part of the charges.
pub(crate) fn weigh_fragments(free_beside: impl Fn(u32) -> f64) -> bool {
    if !records::is_there() || IS_WEIGHING.swap(true, Acquire) {
        return false;
    }
    records::note_fragments(false);
    blocks::for_each(|_, sample| {
        let objects = sample.counts.objects as f64 / Counts::ONE as f64;
        let bytes = objects * free_beside(sample.stand_in.slab.get());
        records::keeps_free(sample.record, (bytes + 0.5) as u64);
    });
    records::note_fragments(true);
    IS_WEIGHING.store(false, Release);
    true
}

/// Returns the sums over all call stacks. Reads every record.
pub fn totals() -> Totals {
    records::totals()
}

/// Passes the words of the head and of the records in use to `take`, in their order. Returns how
/// many records these are, or `None` before the profile was on. The head may already count more.
pub fn copy_out(take: impl FnMut(u64)) -> Option<u32> {
    records::copy_out(take)
}

/// Returns the bytes of the head and the records in use, for a file, and the number of these
/// records. Returns `None` before the profile was on.
///
/// The bytes stay mapped. Other threads write to them, so only the system may read them, in a
/// system call. The head may already count more records.
pub fn bytes() -> Option<(*const [u8], u32)> {
    records::bytes()
}
