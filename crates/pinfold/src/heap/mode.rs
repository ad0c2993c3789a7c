//! The mode of malloc: the words that say which way a call takes, and how they change.
//!
//! | word | says |
//! |---|---|
//! | `stage` | whether the allocator is started, and whether slow paths have other work first |
//! | `samples` | what samples are taken for: [`PROFILE`], [`TRACER`], [`GUARD`] |
//! | `reports` | what the slow paths report: [`CALLS`], [`SAMPLED`] |
//! | `is_changing` | whether a thread is starting or stopping samples |
//! | `has_scopes` | whether a thread ever began a scope (`scope`) |
//! | [`Paths`] | which fast paths are open |
//!
//! The fast paths must compare the size or the address with the words of [`Paths`] anyway. While
//! such a word is 0, the comparison sends every call to the slow path: the fast path is *closed*.
//!
//! Another process may store 0 to `limit` and `counted` at any time. Besides:
//!
//! | word | is 0 |
//! |---|---|
//! | `limit` | while the next two are 0, during samples, and after the first scope |
//! | `window`, `count` | before the first allocation, while calls are counted, without rseq |
//! | `counted` | while no samples are taken, and while the two words above are 0 |
//!
//! # Threads that change the mode at the same time
//!
//! Two threads that would undo each other's change write a word and then read the other's word,
//! with a fence between both steps. So at least one of them sees the other's change, and acts on
//! it.
//!
//! | a thread that | writes | then reads | so that |
//! |---|---|---|---|
//! | starts the allocator | `stage` | `samples` | samples close the fast path, in either order |
//! | starts samples | `samples` | `stage` | |
//! | opens the fast path | `limit` | `samples` | the fast path is closed while samples are taken |
//! | starts samples | `samples` | writes 0 to `limit` | |
//! | opens the path that counts | `counted` | `samples` | this path is closed without samples |
//! | ends samples | `samples` | writes 0 to `counted` | |
//! | begins the first scope | `has_scopes` | exchanges `stage` | slow paths look for scopes |
//! | ends samples | exchanges `stage` | `has_scopes` | |
//! | begins the first scope | `has_scopes` | writes 0 to `limit` | the fast path stays closed |

use crate::slab::kmalloc::{self, MAX_SMALL_SIZE};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, fence};

struct Mode {
    stage: AtomicU8,
    samples: AtomicU8,
    reports: AtomicU8,
    is_changing: AtomicBool,
    has_scopes: AtomicBool,
}

static MODE: Mode = Mode {
    stage: AtomicU8::new(NOT_YET),
    samples: AtomicU8::new(0),
    reports: AtomicU8::new(0),
    is_changing: AtomicBool::new(false),
    has_scopes: AtomicBool::new(false),
};

// Values of `stage`.
const NOT_YET: u8 = 0;
const UNDER_WAY: u8 = 1;
const DONE: u8 = 2;
/// The allocator is started, and samples are taken or there are scopes. So one comparison with
/// `DONE` finds all reasons for which a slow path has other work first: these, and that the start
/// is not over.
const UNUSUAL: u8 = 3;

/// Samples are taken for a heap profile.
pub(super) const PROFILE: u8 = 1;
/// Samples are taken for a tracer that is attached to the probes.
pub(super) const TRACER: u8 = 2;
/// Samples are taken for guarded blocks.
pub(super) const GUARD: u8 = 4;

/// Calls are counted.
const CALLS: u8 = 1;
/// There may be sampled blocks, so frees look for their samples.
const SAMPLED: u8 = 2;

/// The words that the fast paths read. They lie beside the CPUs' memory ([`kmalloc::beside`]).
pub(super) struct Paths {
    /// One more than the largest size of the fast path of malloc.
    pub(super) limit: &'static AtomicUsize,
    /// The address of the arenas' window.
    pub(super) window: &'static AtomicUsize,
    /// How many granules of the window have entries ([`arena::watch_count`]).
    pub(super) count: &'static AtomicUsize,
    /// The largest size of the path that counts bytes for a heap profile.
    pub(super) counted: &'static AtomicUsize,
}

#[inline(always)]
pub(super) fn paths() -> Paths {
    let [limit, window, count, counted] = kmalloc::beside();
    Paths {
        limit,
        window,
        count,
        counted,
    }
}

/// Returns whether the allocator is started, no samples are taken, and there are no scopes. One
/// load.
#[inline]
pub(super) fn is_plain() -> bool {
    // Acquire pairs with the store in `started`.
    MODE.stage.load(Acquire) == DONE
}

/// Returns whether the allocator is started.
pub(super) fn is_started() -> bool {
    MODE.stage.load(Acquire) >= DONE
}

/// Notes that this thread starts the allocator. Returns false if another thread does or did.
pub(super) fn begin_start() -> bool {
    let claimed = MODE
        .stage
        .compare_exchange(NOT_YET, UNDER_WAY, Acquire, Relaxed);
    claimed.is_ok()
}

/// Notes that the start failed for lack of memory. A later call may try again.
pub(super) fn start_failed() {
    MODE.stage.store(NOT_YET, Release);
}

/// Notes that the allocator is started.
pub(super) fn started() {
    // Also pairs with the acquire in `is_plain`.
    MODE.stage.store(DONE, SeqCst);
    // If another thread started samples meanwhile, it could not close the fast path, so this thread
    // does.
    if MODE.samples.load(SeqCst) != 0 {
        close_for_samples();
    }
}

/// Returns whether a thread ever began a scope.
#[inline]
pub(super) fn has_scopes() -> bool {
    MODE.has_scopes.load(Relaxed)
}

/// Closes the fast path of malloc for good, so that calls look for the thread's scope. Costs three
/// loads after the first call. The allocator is started.
///
/// A thread that opens the fast path at this moment, after it has served a request of another
/// process, may leave the path open for some instructions.
pub(super) fn open_scopes() {
    if has_scopes() && !is_plain() && paths().limit.load(Relaxed) == 0 {
        return;
    }
    MODE.has_scopes.store(true, SeqCst);
    close_malloc();
    set_unusual(true);
}

/// Returns whether allocations are sampled.
#[inline]
pub fn is_sampling() -> bool {
    MODE.samples.load(Relaxed) != 0
}

/// Returns what samples are taken for.
#[inline]
pub(super) fn samples() -> u8 {
    MODE.samples.load(Relaxed)
}

/// Starts to sample allocations for `what`.
pub(super) fn sample_for(what: u8) {
    // The frees must look for sampled blocks before there is one.
    MODE.reports.fetch_or(SAMPLED, Release);
    MODE.samples.fetch_or(what, SeqCst);
    close_for_samples();
}

fn close_for_samples() {
    set_unusual(true);
    close_malloc();
    count_bytes(true);
}

/// Stops sampling for `what`.
pub(super) fn sample_no_more_for(what: u8) {
    if MODE.samples.fetch_and(!what, Relaxed) == what {
        count_bytes(false);
        set_unusual(false);
        // A thread that begins the first scope has stored its word before it looked at the stage.
        if MODE.has_scopes.load(SeqCst) {
            set_unusual(true);
        }
        if is_malloc_closed() {
            open_malloc();
        }
    }
}

/// Sets whether samples are taken or there are scopes. Does nothing before the allocator is
/// started.
fn set_unusual(unusual: bool) {
    let (from, to) = if unusual {
        (DONE, UNUSUAL)
    } else {
        (UNUSUAL, DONE)
    };
    let _ = MODE.stage.compare_exchange(from, to, SeqCst, SeqCst);
}

/// Returns whether a thread is starting or stopping samples.
pub fn is_changing() -> bool {
    MODE.is_changing.load(Relaxed)
}

/// Runs `f` while no other thread starts or stops samples. Returns false, and does not run `f`, if
/// another thread is doing so.
pub(super) fn exclusively(f: impl FnOnce() -> bool) -> bool {
    // Acquire and the release below pair: this thread sees what the last one did.
    let claimed = MODE
        .is_changing
        .compare_exchange(false, true, Acquire, Relaxed);
    if claimed.is_err() {
        return false;
    }
    let done = f();
    MODE.is_changing.store(false, Release);
    done
}

/// Forgets the thread of the parent that was starting or stopping samples, in the child of a fork.
pub(super) fn in_child() {
    MODE.is_changing.store(false, Relaxed);
}

/// Returns whether calls are counted, or sampled blocks are looked for.
#[inline]
pub(super) fn reports() -> bool {
    MODE.reports.load(Relaxed) != 0
}

/// Returns whether calls are counted.
pub fn counts_calls() -> bool {
    MODE.reports.load(Relaxed) & CALLS != 0
}

/// Has the slow paths count calls.
pub(super) fn count_calls() {
    MODE.reports.fetch_or(CALLS, Release);
}

/// Opens the fast path of malloc. Does nothing if there are scopes.
pub(super) fn open_malloc() {
    if has_scopes() {
        return;
    }
    let limit = paths().limit;
    // Release pairs with the acquire in `gate::alloc_fast`: a thread that sees the limit also sees
    // the offsets that its critical section uses.
    limit.store(MAX_SMALL_SIZE + 1, SeqCst);
    fence(SeqCst);
    if is_sampling() || has_scopes() {
        limit.store(0, Relaxed);
    }
}

/// Closes the fast path of malloc. The caller has set the word that keeps it closed.
fn close_malloc() {
    fence(SeqCst);
    paths().limit.store(0, Relaxed);
}

/// Opens or closes the path of malloc that counts bytes for a heap profile.
fn count_bytes(on: bool) {
    // Acquire pairs with the release in `gate::open`, and the release with the acquire in
    // `gate::alloc_counted`: a thread that sees this word also sees the offsets that its critical
    // section uses.
    let is_open = on && paths().window.load(Acquire) != 0;
    let limit = if is_open { MAX_SMALL_SIZE } else { 0 };
    fence(SeqCst);
    paths().counted.store(limit, Release);
}

/// Opens the path of malloc that counts bytes, after another process has closed it.
pub(super) fn open_counted_again() {
    count_bytes(true);
    fence(SeqCst);
    if !is_sampling() {
        paths().counted.store(0, Relaxed);
    }
}

/// Returns whether the fast path of malloc is closed.
pub(super) fn is_malloc_closed() -> bool {
    is_closed(paths().limit)
}

/// Returns whether the path that counts bytes is closed.
pub(super) fn is_counted_closed() -> bool {
    is_closed(paths().counted)
}

/// Returns whether the path of malloc with this word is closed, where there are fast paths.
fn is_closed(word: &AtomicUsize) -> bool {
    word.load(Relaxed) == 0 && paths().window.load(Relaxed) != 0
}
