//! Heap profiles of malloc: which blocks are sampled, and how their frees are recognised.
//!
//! While the profile is on, the fast path of malloc is closed (`gate`), and that of free stays
//! open. The slow path counts the block's bytes and takes the block in one critical section
//! ([`gate::alloc_counted`]). If it cannot, it asks whether a sample is due
//! ([`pinfold::profile::due`]).
//!
//! A *sampled* block is recognised when it is freed:
//!
//! * A block of a size class comes from the class's twin (`slab::kmalloc`), whose number in the
//!   page map the fast path of free does not know.
//! * A larger block takes the slow path of free in any case. From the first start of a profile on,
//!   this path looks every larger block up in the table of sampled blocks.
//!
//! `realloc` in place leaves a sampled block sampled. A run or a huge block that grows in place may
//! be sampled because of the growth ([`profile::grown`]). A block that moves counts as freed and
//! allocated.
//!
//! Samples are taken for a heap profile ([`start`], [`stop`]), for guarded blocks
//! ([`start_guarding`]), and while a tracer outside is attached to the probes of
//! [`pinfold::profile`] ([`look`]). A block that is sampled for guarding alone, and is not guarded,
//! is a plain block. A *guarded* block lies outside the arenas, so its free takes the slow path.

use crate::gate::{self, alloc_behind};
use crate::heap::{self, ALIGN};
use crate::mode::{self, GUARD, PROFILE, TRACER};
use crate::{count, live};
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU8, AtomicU64};
use core::time::Duration;
use pinfold::arena;
use pinfold::guarded;
use pinfold::internal::{coarse_milliseconds, keep_errno};
use pinfold::profile::{self, DEFAULT_INTERVAL, MAX_INTERVAL, Memory, Resize};
use pinfold::segment::{self, PROFILE_FILE};
use pinfold::shepherd;
use pinfold::slab::{
    self,
    kmalloc::{self, MAX_CLASS_SIZE},
};

/// The environment variable that turns the profile on at the start: `on`, or the mean bytes from
/// one sample to the next.
pub const VARIABLE: &str = "PINFOLD_HEAP";

/// Returns the interval that the variable's value means, or `None` for an invalid value.
pub fn parse(value: &[u8]) -> Option<u64> {
    if value == b"on" {
        return Some(DEFAULT_INTERVAL);
    }
    let (digits, unit) = match value.split_last()? {
        (b'k' | b'K', digits) => (digits, 1 << 10),
        (b'm' | b'M', digits) => (digits, 1 << 20),
        (b'g' | b'G', digits) => (digits, 1 << 30),
        _ => (value, 1),
    };
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    let number: u64 = is_number.then(|| core::str::from_utf8(digits).ok()?.parse().ok())??;
    let bytes = number.checked_mul(unit)?;
    (1..=MAX_INTERVAL).contains(&bytes).then_some(bytes)
}

/// The mean bytes from one sample to the next, for guarded blocks while there is no heap profile.
static GUARD_INTERVAL: AtomicU64 = AtomicU64::new(DEFAULT_INTERVAL);

/// Returns whether there is a heap profile that is on.
pub(crate) fn is_profiling() -> bool {
    mode::samples() & PROFILE != 0
}

/// Returns whether some samples become guarded blocks.
pub(crate) fn is_guarding() -> bool {
    mode::samples() & GUARD != 0
}

/// Turns the profile on, or changes the interval. Returns false if the system has no memory, or if
/// another thread is starting or stopping samples. The first start may load the unwinder's library,
/// so the thread must not be inside the loader. The allocator has been started.
pub(crate) fn start(interval: u64) -> bool {
    mode::exclusively(|| {
        let memory = || shared_memory().or_else(profile::private_memory);
        // SAFETY: both functions return zeroed memory that no other code knows.
        let started = unsafe { profile::start(interval, memory) };
        if started {
            show();
            mode::sample_for(PROFILE);
        }
        started
    })
}

/// Does what [`start`] does, for a shepherd, which must not wait for the loader's lock: a
/// thread that holds this lock may wait for the shepherd. Returns false if the profile has not
/// started within a second. It may start later then.
#[cold]
#[inline(never)]
pub(crate) fn start_apart(interval: u64) -> bool {
    let last = APART.load(Relaxed);
    // Acquire pairs with the release below: the last thread has read the interval.
    let claimed = APART.compare_exchange(last, UNDER_WAY, Acquire, Relaxed);
    if last == UNDER_WAY || claimed.is_err() {
        return false;
    }
    APART_INTERVAL.store(interval, Relaxed);
    let in_thread = || {
        let done = match start(APART_INTERVAL.load(Relaxed)) {
            true => STARTED,
            false => REFUSED,
        };
        APART.store(done, Release);
    };
    if !shepherd::run_apart(in_thread) {
        APART.store(REFUSED, Relaxed);
    }
    let begin = coarse_milliseconds();
    // Acquire pairs with the release in the thread: this one sees the profile.
    while APART.load(Acquire) == UNDER_WAY && coarse_milliseconds() - begin < 1000 {
        shepherd::nap(Duration::from_millis(1));
    }
    APART.load(Acquire) == STARTED
}

/// What became of the last [`start_apart`].
static APART: AtomicU8 = AtomicU8::new(REFUSED);
const REFUSED: u8 = 0;
const UNDER_WAY: u8 = 1;
const STARTED: u8 = 2;
/// The interval for [`start_apart`]'s thread.
static APART_INTERVAL: AtomicU64 = AtomicU64::new(0);

/// Turns the profile off. Keeps the samples: their frees still count. Returns false if another
/// thread is starting or stopping samples.
pub(crate) fn stop() -> bool {
    mode::exclusively(|| {
        profile::stop();
        mode::sample_no_more_for(PROFILE);
        if is_guarding() {
            profile::start_samples(GUARD_INTERVAL.load(Relaxed));
        } else if mode::is_sampling() {
            profile::start_samples(DEFAULT_INTERVAL);
        }
        true
    })
}

/// Has some samples become guarded blocks. If there is no heap profile, `interval` is the mean
/// bytes from one sample to the next. Returns false if the system has no memory, or if another
/// thread is starting or stopping samples. The first start may load the unwinder's library, so the
/// thread must not be inside the loader. The allocator has been started.
pub(crate) fn start_guarding(interval: u64) -> bool {
    mode::exclusively(|| {
        GUARD_INTERVAL.store(interval, Relaxed);
        let started = start_samples_for(GUARD, interval) && guarded::prepare();
        if started {
            mode::sample_for(GUARD);
        }
        started
    })
}

/// Guards no further blocks. Returns false if another thread is starting or stopping samples.
pub(crate) fn stop_guarding() -> bool {
    mode::exclusively(|| {
        mode::sample_no_more_for(GUARD);
        true
    })
}

/// Takes samples while a tracer is attached to the probes. The shepherd's ticks call it.
pub(crate) fn look(_: shepherd::Reach) {
    let is_traced = mode::samples() & TRACER != 0;
    if profile::is_watched() == is_traced {
        return;
    }
    keep_errno(|| {
        mode::exclusively(|| {
            if is_traced {
                mode::sample_no_more_for(TRACER);
            } else if start_samples_for(TRACER, DEFAULT_INTERVAL) {
                mode::sample_for(TRACER);
            }
            true
        })
    });
}

/// Prepares samples for guarded blocks or for a tracer. The interval of a heap profile has
/// precedence over that of guarded blocks, and this one over that of a tracer. Returns false if the
/// system has no memory.
fn start_samples_for(what: u8, interval: u64) -> bool {
    let has_interval = what == TRACER && is_guarding();
    profile::start_samples(match has_interval {
        true => GUARD_INTERVAL.load(Relaxed),
        false => interval,
    })
}

/// Returns memory that `pinfold heap` can read.
fn shared_memory() -> Option<Memory> {
    let start = live::shared_memory(PROFILE_FILE, profile::BYTES)?;
    Some(Memory {
        start,
        is_shared: true,
    })
}

/// Shows in the segment where the profile's records are.
fn show() {
    if let (Some(segment), Some((records, _))) = (segment::current(), profile::bytes()) {
        // Release pairs with the acquire of a process that reads the segment.
        segment.profile.store(records.addr() as u64, Release);
    }
}

/// Returns whether no thread is loading or unloading a library. Reads `r_debug.state`, whose
/// address is the entry `DT_DEBUG` of the program's dynamic section. A program without this entry
/// has no loader.
pub(crate) fn loader_is_idle() -> bool {
    // SAFETY: `getauxval` only reads the auxiliary vector.
    let (at, count) = unsafe {
        (
            libc::getauxval(libc::AT_PHDR) as usize,
            libc::getauxval(libc::AT_PHNUM) as usize,
        )
    };
    if at == 0 {
        return false;
    }
    // SAFETY: the kernel passes the place of the program's headers, which stay mapped.
    let headers = unsafe { core::slice::from_raw_parts(at as *const libc::Elf64_Phdr, count) };
    let find = |kind| headers.iter().find(|header| header.p_type == kind);
    let bias = find(libc::PT_PHDR).map_or(0, |own| at.wrapping_sub(own.p_vaddr as usize));
    let Some(dynamic) = find(libc::PT_DYNAMIC) else {
        return true;
    };
    let mut entry = bias.wrapping_add(dynamic.p_vaddr as usize) as *const [usize; 2];
    loop {
        // SAFETY: the section is mapped, and ends with an entry of tag 0.
        match unsafe { *entry } {
            [0, _] | [DT_DEBUG, 0] => return true,
            // SAFETY: the loader has stored the address of its `r_debug`, which stays.
            [DT_DEBUG, debug] => return unsafe { (*(debug as *const LoaderState)).state } == 0,
            _ => entry = entry.wrapping_add(1),
        }
    }
}

/// The tag of the entry with the address of the loader's `r_debug`.
const DT_DEBUG: usize = 21;

/// The beginning of the C library's `struct r_debug`.
#[repr(C)]
struct LoaderState {
    version: i32,
    map: usize,
    breakpoint: usize,
    /// 0 while no library is added or removed.
    state: i32,
}

/// Gives the child of a fork a profile of its own.
pub(crate) fn in_child() {
    mode::in_child();
    APART.store(REFUSED, Relaxed);
    profile::in_child(live::process());
    show();
    guarded::in_child();
}

/// Allocates like `heap::alloc`, while samples are taken, a block that is not counted yet.
#[cold]
#[inline(never)]
pub(crate) extern "C" fn alloc_uncounted(size: usize) -> *mut u8 {
    gate::tick_if_needed();
    if let Some(mean) = profile::due(size) {
        // A program whose other calls are all fast looks for requests here.
        slab::tick();
        return alloc_sampled((size, ALIGN, false), mean, profile::here());
    }
    let block = alloc_behind(size);
    if block.is_null() {
        return heap::alloc_missed(size);
    }
    block
}

/// Allocates a block that is sampled. `mean` is what [`profile::due`] returned. `from` is in the
/// frame of the allocator's outermost function ([`profile::here`]).
#[cold]
#[inline(never)]
pub(crate) fn alloc_sampled(
    (size, align, zeroed): (usize, usize, bool),
    mean: u64,
    from: usize,
) -> *mut u8 {
    let what_for = mode::samples();
    let block = alloc_guarded(size, align, zeroed, from);
    let (block, is_known) = match what_for & !GUARD {
        0 if block.is_null() => (heap::alloc_aligned_plain(size, align, zeroed), false),
        0 => (block, false),
        _ if block.is_null() => alloc_known(size, align, zeroed),
        _ => (block, true),
    };
    if is_known && !block.is_null() {
        keep_errno(|| profile::allocated(block, size, mean, from));
    } else if !block.is_null() && what_for & !GUARD != 0 {
        profile::dropped();
    }
    block
}

/// Allocates a guarded block. Returns null if the block is not to be guarded.
fn alloc_guarded(size: usize, align: usize, zeroed: bool, from: usize) -> *mut u8 {
    if !is_guarding() {
        return null_mut();
    }
    let block = keep_errno(|| guarded::alloc(size, align, zeroed, from));
    if !block.is_null() {
        let class = kmalloc::class_of(size);
        count::allocated_class(class);
        count::requested_guarded(class, size);
    }
    block
}

/// Allocates a block whose free recognises that the block is sampled, and returns true with it. If
/// there is no memory for such a block, returns a plain one and false.
fn alloc_known(size: usize, align: usize, zeroed: bool) -> (*mut u8, bool) {
    let class = match align {
        ..=ALIGN => (size <= MAX_CLASS_SIZE).then(|| kmalloc::class_of(size)),
        _ => kmalloc::class_of_aligned(size, align),
    };
    let Some(class) = class else {
        return (heap::alloc_aligned_plain(size, align, zeroed), true);
    };
    let twin = kmalloc::sampled(class);
    let block = match zeroed {
        true => kmalloc::alloc_zeroed(twin, size),
        false => kmalloc::alloc_from(twin, size),
    };
    if block.is_null() {
        return (heap::alloc_aligned_plain(size, align, zeroed), false);
    }
    count::allocated_class(class);
    count::requested(block, size);
    (block, true)
}

/// Samples `block` of `size` bytes if a sample is due. For blocks that [`alloc`] did not make, and
/// whose free always looks in the table of sampled blocks.
#[cold]
pub(crate) fn made_large(block: *mut u8, size: usize) {
    if mode::is_sampling()
        && let Some(mean) = profile::due(size)
    {
        let from = profile::here();
        keep_errno(|| profile::allocated(block, size, mean, from));
    }
}

/// Reallocates by `f`, and keeps the sample of the block up to date. Samples a block without a
/// sample if its growth in place is due.
///
/// # Safety
///
/// `block` came from this crate and was not freed. `f` returns null and leaves the block unchanged,
/// or returns the block or another one of `size` bytes.
#[cold]
#[inline(never)]
pub(crate) unsafe fn realloc(block: *mut u8, size: usize, f: impl FnOnce() -> *mut u8) -> *mut u8 {
    let class = kmalloc::class_of_any(arena::entry(block as usize));
    if class.is_some_and(|class| !kmalloc::is_sampled(class)) {
        return f();
    }
    // The block's address may belong to another block as soon as the content has moved.
    let lifted = profile::lift(block);
    let grows = class.is_none() && counts_growth();
    if lifted.is_none() && !grows {
        return f();
    }
    let room = || match grows {
        // SAFETY: the caller promises that the block is in use before `f`. After `f`, this closure
        // runs only if `f` has returned the same block.
        true => unsafe { heap::usable_size(block) },
        false => 0,
    };
    let before = room();
    let moved = f();
    if moved != block {
        match lifted {
            Some(lifted) if moved.is_null() => profile::put_back(lifted, block, None),
            Some(lifted) => profile::drop_lifted(lifted),
            None => {}
        }
        return moved;
    }
    let room = class.is_none().then(|| (before, room()));
    let resize = Resize { size, room };
    match lifted {
        Some(lifted) => profile::put_back(lifted, block, Some(resize)),
        None => sample_growth(block, resize),
    }
    block
}

/// Returns whether the growth of blocks takes part in the countdown. If samples are taken for
/// guarding alone, only new blocks are sampled. If no samples are taken, a sample keeps its weight.
fn counts_growth() -> bool {
    mode::samples() & !GUARD != 0
}

/// Samples a block without a sample if its growth is due.
// Not inlined, so that its variables take no stack in `realloc`, which goes deep.
#[inline(never)]
fn sample_growth(block: *mut u8, resize: Resize) {
    let growth = resize.growth();
    if growth > 0
        && let Some(mean) = profile::due(growth)
    {
        let from = profile::here();
        keep_errno(|| profile::grown(block, resize, mean, from));
    }
}
