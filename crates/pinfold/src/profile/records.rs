//! The records: each call stack, with what it allocated and freed.
//!
//! The records lie behind a [`Head`], in memory that other processes may read. They are in the
//! order in which their call stacks were first seen. A private table finds a record by the hash of
//! its call stack.
//!
//! A thread that sees a new call stack takes the next record, writes it, and then enters it into
//! the table by one compare-exchange. If two threads see the same new call stack at the same time,
//! both may make a record, but only one enters the table. The counts of the other stay 0.
//!
//! # Invariants
//!
//! * `depth` is written after the frames, with release order. A reader that sees a depth above 0
//!   sees the frames, which never change afterwards.
//! * Each number is one aligned word. A record's counts may be from different moments.

use super::countdown;
use super::math;
use crate::sys;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, fence};

/// The most frames of a call stack that a record keeps.
pub const FRAMES: usize = 64;
/// The most records.
pub const MAX_RECORDS: usize = 8192;
/// Where the first [`Record`] is, in bytes behind the start of the [`Head`].
pub const RECORDS_AT: usize = 4096;
/// The value of [`Head::magic`].
pub const HEAP_MAGIC: u64 = u64::from_le_bytes(*b"PINHEAP\x01");
/// The version of the layout. A reader refuses other versions.
pub const HEAP_VERSION: u32 = 3;

/// The head of the records.
#[derive(Debug)]
#[repr(C)]
pub struct Head {
    /// [`HEAP_MAGIC`], once the other fields are written.
    pub magic: AtomicU64,
    /// [`HEAP_VERSION`].
    pub version: AtomicU32,
    /// The process's PID.
    pub pid: AtomicU32,
    /// The mean bytes from one sample to the next, of the intervals that begin from now on.
    pub interval: AtomicU64,
    /// How many samples were dropped because a table was full, or the stack could not be walked.
    pub dropped: AtomicU64,
    /// How many records were begun. The last of them may not be complete.
    pub used: AtomicU32,
    /// Bytes of a record.
    pub record_bytes: AtomicU32,
    /// Whether allocations are sampled now: 1 or 0.
    pub active: AtomicU32,
    /// Whether the process has looked for lost blocks: 1 or 0.
    pub looked: AtomicU32,
    /// How many times a look at who keeps free bytes in slabs began or ended: odd during one, 0 if
    /// there was none. A reader that finds the same even number before and after it has read the
    /// records has the charges of one look.
    pub weighed: AtomicU32,
    unused: AtomicU32,
}

/// A call stack, and the samples of its allocations.
#[derive(Debug)]
#[repr(C)]
pub struct Record {
    hash: AtomicU64,
    /// How many frames there are. 0 while the record is written.
    pub depth: AtomicU32,
    unused: AtomicU32,
    /// The number of samples.
    pub samples: AtomicU64,
    /// The number of samples that were freed.
    pub freed_samples: AtomicU64,
    /// The estimated number of blocks allocated so far, times [`Counts::ONE`].
    pub objects: AtomicU64,
    /// The estimated bytes allocated so far.
    pub bytes: AtomicU64,
    /// The part of `objects` that was freed.
    pub freed_objects: AtomicU64,
    /// The part of `bytes` that was freed.
    pub freed_bytes: AtomicU64,
    /// The part of `objects` that was lost when the process looked for lost blocks.
    pub lost_objects: AtomicU64,
    /// The part of `bytes` that was lost then.
    pub lost_bytes: AtomicU64,
    /// The estimated bytes that were free in the slabs of the blocks in use when the process last
    /// looked. Each block in use has an equal part of those in its slab.
    pub fragment_bytes: AtomicU64,
    /// The return addresses of the call stack, innermost first. The innermost are the allocator's
    /// own.
    pub frames: [AtomicU64; FRAMES],
}

/// What a sample stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// The number of blocks, times [`ONE`](Self::ONE).
    pub objects: u64,
    /// The number of bytes.
    pub bytes: u64,
}

impl Counts {
    /// One block.
    pub const ONE: u64 = 1 << 10;

    /// Returns what a sample of `size` bytes stands for: 1/p blocks of this size, where p = 1 −
    /// e^(−size/interval) is the probability that such an allocation is sampled. With an interval
    /// of 1, each allocation is sampled.
    pub fn of(size: usize, interval: u64) -> Counts {
        if interval <= 1 {
            return Counts::of_objects(Counts::ONE, size);
        }
        let probability = math::one_minus_exp(size.max(1) as f64 / interval as f64);
        let objects = (Counts::ONE as f64 / probability + 0.5) as u64;
        Counts::of_objects(objects, size)
    }

    /// Returns the counts of `objects` (in the fixed point of the field) of `size` bytes each.
    pub(super) fn of_objects(objects: u64, size: usize) -> Counts {
        let one = u128::from(Counts::ONE);
        let bytes = (u128::from(objects) * size as u128 + one / 2) / one;
        Counts {
            objects,
            bytes: bytes as u64,
        }
    }
}

/// Entries in the table of hashes, a power of two.
const PLACES: usize = 2 * MAX_RECORDS;

/// The memory of the head and the records. Null before the profile was on.
static MEMORY: AtomicPtr<Head> = AtomicPtr::new(null_mut());
/// Whether other processes can see the memory.
static IS_SHARED: AtomicBool = AtomicBool::new(false);
/// How many records were begun. This process's own word: [`Head::used`] is for readers.
static USED: AtomicU32 = AtomicU32::new(0);
/// Each entry holds a record's number plus 1, or 0.
static TABLE: [AtomicU32; PLACES] = [const { AtomicU32::new(0) }; PLACES];

fn head() -> Option<&'static Head> {
    // SAFETY: the memory has [`super::BYTES`] bytes and stays mapped. All fields are atomics.
    // Acquire pairs with the release in `prepare`.
    unsafe { MEMORY.load(Acquire).as_ref() }
}

/// Returns record `nth`. Returns `None` before the records were made, and beyond the last one.
fn record(nth: u32) -> Option<&'static Record> {
    if nth as usize >= MAX_RECORDS {
        return None;
    }
    let memory = MEMORY.load(Acquire).cast::<u8>();
    let at = RECORDS_AT + nth as usize * size_of::<Record>();
    // SAFETY: the memory is null, or has room for `MAX_RECORDS` records. All fields are atomics.
    (!memory.is_null()).then(|| unsafe { &*memory.wrapping_add(at).cast() })
}

/// Returns whether there are records.
pub(super) fn is_there() -> bool {
    head().is_some()
}

/// Memory for the records: [`BYTES`](super::BYTES) zeroed bytes that stay mapped.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Where it begins: at a page.
    pub start: *mut u8,
    /// Whether a forked child would share it.
    pub is_shared: bool,
}

fn getpid() -> u32 {
    pinfold_rseq::kernel::process() as u32
}

/// Takes the memory for the records.
pub(super) fn prepare(memory: Memory) {
    IS_SHARED.store(memory.is_shared, Relaxed);
    // Release pairs with the acquire in `head`.
    MEMORY.store(memory.start.cast(), Release);
    publish(getpid());
}

/// Writes the fields of the head that describe the layout and the process.
fn publish(pid: u32) {
    if let Some(head) = head() {
        head.version.store(HEAP_VERSION, Relaxed);
        head.pid.store(pid, Relaxed);
        head.record_bytes.store(size_of::<Record>() as u32, Relaxed);
        // Release pairs with the acquire of a process that reads the records.
        head.magic.store(HEAP_MAGIC, Release);
    }
}

/// Writes to the head whether allocations are sampled, and the mean interval.
pub(super) fn note(is_active: bool) {
    if let Some(head) = head() {
        head.active.store(u32::from(is_active), Relaxed);
    }
    note_interval();
}

/// Writes to the head the mean of the intervals that begin from now on.
pub(super) fn note_interval() {
    if let Some(head) = head() {
        head.interval.store(countdown::interval(), Relaxed);
    }
}

/// Counts a sample that was dropped.
pub(super) fn dropped() {
    if let Some(head) = head() {
        head.dropped.fetch_add(1, Relaxed);
    }
}

/// Returns the number of the record of a call stack. Makes a record for a new call stack. Returns
/// `None` if all records are in use.
pub(super) fn find(frames: &[usize]) -> Option<u32> {
    let hash = hash(frames);
    let mut made = None;
    for step in 0..PLACES {
        let place = &TABLE[(hash as usize).wrapping_add(step) % PLACES];
        loop {
            // Acquire pairs with the exchange below: this thread sees the record's content.
            match place.load(Acquire) {
                0 => {}
                found if is(found - 1, hash, frames) => return Some(found - 1),
                _ => break,
            }
            let fresh = match made {
                Some(fresh) => fresh,
                None => *made.insert(make(hash, frames)?),
            };
            if place
                .compare_exchange(0, fresh + 1, AcqRel, Relaxed)
                .is_ok()
            {
                return Some(fresh);
            }
        }
    }
    None
}

/// Returns whether record `nth` is that of the call stack `frames`.
fn is(nth: u32, hash: u64, frames: &[usize]) -> bool {
    record(nth).is_some_and(|record| {
        let kept = record
            .frames
            .iter()
            .map(|frame| frame.load(Relaxed) as usize);
        record.hash.load(Relaxed) == hash
            && record.depth.load(Relaxed) as usize == frames.len()
            && kept.zip(frames).all(|(kept, &frame)| kept == frame)
    })
}

/// Makes a record for a call stack.
fn make(hash: u64, frames: &[usize]) -> Option<u32> {
    let more = |used: u32| ((used as usize) < MAX_RECORDS).then_some(used + 1);
    let nth = USED.fetch_update(Relaxed, Relaxed, more).ok()?;
    let record = record(nth)?;
    record.hash.store(hash, Relaxed);
    for (place, &frame) in record.frames.iter().zip(frames) {
        place.store(frame as u64, Relaxed);
    }
    // Release pairs with the acquire of a process that reads the records: it sees the frames.
    record.depth.store(frames.len() as u32, Release);
    head()?.used.fetch_max(nth + 1, Relaxed);
    Some(nth)
}

/// Returns a hash of the addresses: that of FNV-1a, by words.
fn hash(frames: &[usize]) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325_u64;
    let hash = frames.iter().fold(start, |hash, &frame| {
        (hash ^ frame as u64).wrapping_mul(0x0100_0000_01b3)
    });
    // The multiplication mixes the low bits least, so the high bits are added to them.
    hash ^ (hash >> 32)
}

/// Counts a sample that was allocated.
pub(super) fn add(nth: u32, counts: Counts) {
    if let Some(record) = record(nth) {
        record.samples.fetch_add(1, Relaxed);
        record.objects.fetch_add(counts.objects, Relaxed);
        record.bytes.fetch_add(counts.bytes, Relaxed);
    }
}

/// Counts that a sample was freed.
pub(super) fn take(nth: u32, counts: Counts) {
    if let Some(record) = record(nth) {
        record.freed_samples.fetch_add(1, Relaxed);
        record.freed_objects.fetch_add(counts.objects, Relaxed);
        record.freed_bytes.fetch_add(counts.bytes, Relaxed);
    }
}

/// Notes that a sampled block is lost.
pub(super) fn lost(nth: u32, counts: Counts) {
    if let Some(record) = record(nth) {
        record.lost_objects.fetch_add(counts.objects, Relaxed);
        record.lost_bytes.fetch_add(counts.bytes, Relaxed);
    }
}

/// Forgets which blocks were lost. Writes to the head whether the process has looked for them.
pub(super) fn note_look(is_done: bool) {
    if let Some(head) = head() {
        for record in (0..USED.load(Relaxed))
            .filter_map(record)
            .filter(|_| !is_done)
        {
            record.lost_objects.store(0, Relaxed);
            record.lost_bytes.store(0, Relaxed);
        }
        head.looked.store(u32::from(is_done), Relaxed);
    }
}

/// Notes that a sampled block keeps free bytes in slabs.
pub(super) fn keeps_free(nth: u32, bytes: u64) {
    if let Some(record) = record(nth) {
        record.fragment_bytes.fetch_add(bytes, Relaxed);
    }
}

/// Notes in the head that a look at who keeps free bytes in slabs begins, or that it `is_done`.
/// When it begins, forgets what the last one found.
pub(super) fn note_fragments(is_done: bool) {
    let Some(head) = head() else {
        return;
    };
    let next = head.weighed.load(Relaxed).wrapping_add(1);
    if is_done {
        // Release, for a reader that sees the even number: it also sees the charges.
        head.weighed.store(next & !1, Release);
        return;
    }
    // The number may be odd already, in the child of a fork during a look.
    head.weighed.store(next | 1, Relaxed);
    // A reader that sees one of the zeroes below, and then reads the number again, sees the odd one
    // or a later one.
    fence(Release);
    for record in (0..USED.load(Relaxed)).filter_map(record) {
        record.fragment_bytes.store(0, Relaxed);
    }
}

/// Counts that a sampled block was resized in place. If the block's room grew, no byte was freed: a
/// sample that stands for less than before corrects what was counted as allocated.
pub(super) fn resize(nth: u32, before: Counts, after: Counts, has_grown: bool) {
    if let Some(record) = record(nth) {
        let more = after.bytes.saturating_sub(before.bytes);
        let less = before.bytes.saturating_sub(after.bytes);
        record.bytes.fetch_add(more, Relaxed);
        if has_grown {
            take_from(&record.bytes, less);
            take_from(
                &record.objects,
                before.objects.saturating_sub(after.objects),
            );
        } else {
            record.freed_bytes.fetch_add(less, Relaxed);
        }
    }
}

/// Subtracts `less` from a count. A child that was forked while a thread counted a sample may know
/// the sample without its counts, so the result stops at 0.
fn take_from(count: &AtomicU64, less: u64) {
    let _ = count.fetch_update(Relaxed, Relaxed, |count| Some(count.saturating_sub(less)));
}

/// Bytes of the head and the records in use.
fn used_bytes() -> usize {
    bytes_of(USED.load(Relaxed))
}

/// Bytes of the head and `used` records.
fn bytes_of(used: u32) -> usize {
    RECORDS_AT + used as usize * size_of::<Record>()
}

/// Passes the words of the head and of the records in use to `take`, in their order. Returns how
/// many records these are, or `None` before the profile was on. The head may already count more.
pub(super) fn copy_out(mut take: impl FnMut(u64)) -> Option<u32> {
    let (bytes, used) = bytes()?;
    for at in (0..bytes.len()).step_by(8) {
        // SAFETY: the bytes stay mapped. Their words are accessed as atomics.
        take(unsafe { (*bytes.cast::<u8>().add(at).cast::<AtomicU64>()).load(Relaxed) });
    }
    Some(used)
}

/// Copies the words in use from one memory to another. Other threads may write to either.
fn copy(from: *const u8, to: *mut u8) {
    for at in (0..used_bytes()).step_by(8) {
        // SAFETY: both memories have [`super::BYTES`] bytes. Their words are accessed as atomics.
        unsafe {
            let word = (*from.add(at).cast::<AtomicU64>()).load(Relaxed);
            (*to.add(at).cast::<AtomicU64>()).store(word, Relaxed);
        }
    }
}

/// Replaces the shared records by a private copy, in the child of a fork. The parent may count a
/// few samples meanwhile, and some of these may be in the copy.
///
/// If the system has no memory, the child has no records: its samples are dropped. Writes the
/// child's PID to the head.
pub(super) fn in_child(pid: u32) {
    if IS_SHARED.swap(false, Relaxed) {
        replace_by_copy();
    }
    publish(pid);
}

/// Puts a private copy in the place of the shared records.
fn replace_by_copy() {
    let old = MEMORY.load(Acquire).cast::<u8>();
    let Some(fresh) = sys::map_sparse(super::BYTES) else {
        MEMORY.store(null_mut(), Relaxed);
        return;
    };
    copy(old, fresh.as_ptr());
    // SAFETY: both mappings have this size and belong to this module, and the old content is
    // copied.
    unsafe { replace(old, fresh.as_ptr()) };
}

/// Puts the memory at `fresh` in the place of the memory at `old`, which has the same records. If
/// the kernel refuses, the records go on at `fresh`.
///
/// # Safety
///
/// Both are mappings of [`super::BYTES`] bytes, which only this module uses. `old` is the one at
/// [`MEMORY`].
unsafe fn replace(old: *mut u8, fresh: *mut u8) {
    // SAFETY: the caller promises both mappings. The exchange is atomic for threads that count at
    // the old address.
    let moved = unsafe { sys::move_pages(fresh, old, super::BYTES) };
    if !moved {
        // The kernel may have unmapped the memory at `old` before it failed. Maps the addresses
        // again, because a thread may still use them.
        // SAFETY: only this module uses these addresses.
        unsafe { sys::map_at(old, super::BYTES) };
        // Release pairs with the acquire in `head`.
        MEMORY.store(fresh.cast(), Release);
    }
}

/// The sums over all call stacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// The number of samples.
    pub samples: u64,
    /// The number of samples that were freed.
    pub freed_samples: u64,
    /// The estimated bytes allocated so far.
    pub bytes: u64,
    /// The part of `bytes` that was freed.
    pub freed_bytes: u64,
    /// How many samples were dropped.
    pub dropped: u64,
}

pub(super) fn totals() -> Totals {
    let dropped = head().map_or(0, |head| head.dropped.load(Relaxed));
    let none = Totals {
        dropped,
        ..Totals::default()
    };
    let records = (0..USED.load(Relaxed)).filter_map(record);
    records.fold(none, |sum, record| Totals {
        samples: sum.samples + record.samples.load(Relaxed),
        freed_samples: sum.freed_samples + record.freed_samples.load(Relaxed),
        bytes: sum.bytes.wrapping_add(record.bytes.load(Relaxed)),
        freed_bytes: sum
            .freed_bytes
            .wrapping_add(record.freed_bytes.load(Relaxed)),
        ..sum
    })
}

/// Returns the bytes of the head and the records in use, and the number of these records. Returns
/// `None` before the profile was on.
pub(super) fn bytes() -> Option<(*const [u8], u32)> {
    let memory = MEMORY.load(Acquire).cast::<u8>();
    let used = USED.load(Relaxed);
    let bytes = core::ptr::slice_from_raw_parts(memory.cast_const(), bytes_of(used));
    (!memory.is_null()).then_some((bytes, used))
}
