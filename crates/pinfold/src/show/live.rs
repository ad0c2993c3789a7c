//! The statistics segment that every process has, unless it has a file (`file`): shared memory
//! that other processes may read.
//!
//! At the start, the process lays out one range of addresses:
//!
//! | part | size | what it is | in the child of a fork |
//! |---|---|---|---|
//! | the mark | a page | an empty file without a name, mapped without any access | stays |
//! | the mailbox | a page | a file: requests from other processes ([`look`]) | private memory |
//! | the segment | [`Parts::end`] | a file: the statistics (`segment`), sealed | private memory |
//!
//! Another process finds the mailbox and the segment in one of two ways:
//!
//! * By the descriptors of their files, in `/proc/PID/fd`. The descriptors have numbers from 240
//!   on, where a program expects none, and `exec` closes them.
//! * By the mark. Its line in `/proc/PID/maps` names it in every process of this program, in forked
//!   children and after the program has closed all descriptors. A process that may trace this one
//!   reads the parts behind the mark in `/proc/PID/mem`.
//!
//! Nothing stays behind when the process ends.
//!
//! # What a child inherits
//!
//! A forked child may drop its privileges. It must then not be able to command its parent, so it
//! inherits no right to the parent's files:
//!
//! * The descriptors are `O_PATH` descriptors. They only name the files. To open one of the files,
//!   the child must pass the kernel's check of the file's owner and mode.
//! * The child puts private memory in the place of the mailbox and the segment. This memory begins
//!   with the counts that the parent had at the fork. The child makes no system call for this that
//!   malloc does not make, because it may be in a sandbox.

use super::memory::{File, HIGH, limit, map, map_private, unmap};
use super::{announce, begin, server};
use crate::segment::{
    self, Answer, CacheRow, Code, Consent, Mailbox, NodeEvents, Parts, Segment, SplitRow, Taken,
};
use crate::shepherd;
use crate::sys::{coarse_milliseconds, keep_errno, uncancelled};
use core::ffi::CStr;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};
use core::time::Duration;
use pinfold_rseq::env;
use pinfold_rseq::kernel::{self, page_size as page};

/// The environment variable that says whether a process shows its statistics: `on` or `off`.
pub const VARIABLE: &str = "PINFOLD_SEGMENT";

/// Returns whether the variable's value means `on`. Returns `None` for an invalid value.
pub fn parse(value: &[u8]) -> Option<bool> {
    match value {
        b"on" => Some(true),
        b"off" => Some(false),
        _ => None,
    }
}

/// The start of the segment, or of the private memory in its place. Null before the start, and
/// where the system refuses a segment.
static HEAD: AtomicPtr<u8> = AtomicPtr::new(null_mut());
/// Whether the memory at [`HEAD`] is shared with other processes.
static IS_SHARED: AtomicBool = AtomicBool::new(false);
/// A copy of the segment from just before a fork. Null before the first fork.
static COPY: AtomicPtr<u8> = AtomicPtr::new(null_mut());
/// The mailbox. Null before the start, and in a child that got no memory for its own.
static MAILBOX: AtomicPtr<Mailbox> = AtomicPtr::new(null_mut());
/// This process's PID. 0 before the start, or if the C library does not tell it.
static PID: AtomicU32 = AtomicU32::new(0);

/// Makes the process's mark, mailbox and segment. Changes nothing if the system refuses. Runs at
/// the process's start, after the first cache was made.
#[cold]
#[inline(never)]
pub(crate) fn start() {
    if !HEAD.load(Relaxed).is_null() || !may_show() {
        return;
    }
    let parts = Parts::here();
    let Some(head) = lay_out(parts) else {
        return;
    };
    PID.store(kernel::process() as u32, Relaxed);
    HEAD.store(head, Relaxed);
    IS_SHARED.store(true, Relaxed);
    begin(head);
    publish(head);
    shepherd::register(look);
}

/// Maps the mark, the mailbox and the segment, and returns where the segment begins. Maps nothing
/// and returns `None` if the system refuses one of them.
fn lay_out(parts: Parts) -> Option<*mut u8> {
    let size = 2 * page() + parts.end();
    let mark = map_mark(size)?;
    let (mailbox, head) = (mark.wrapping_add(page()), mark.wrapping_add(2 * page()));
    let make = |name, size, place, mode, seals| {
        let file = File::make(name, size)?;
        file.map(place, size).map(|_| file.keep(mode, seals))
    };
    let (size_of_mail, stays) = (
        size_of::<Mailbox>(),
        libc::F_SEAL_SHRINK | libc::F_SEAL_GROW,
    );
    let (name, mode) = (segment::MAILBOX_FILE, MAILBOX_MODE);
    let made = make(name, size_of_mail, mailbox, mode, stays).and_then(|()| {
        let (name, mode) = (segment::FILE, SEGMENT_MODE);
        make(name, parts.end(), head, mode, segment::SEALS)
    });
    if made.is_none() {
        unmap(mark, size);
    }
    made.map(|()| head)
}

/// Maps an empty file whose name is that of the mark to `size` bytes, without any access. The
/// mailbox and the segment replace all but the first page.
fn map_mark(size: usize) -> Option<*mut u8> {
    let file = File::anonymous(segment::MARK_FILE, libc::MFD_CLOEXEC)?;
    // SAFETY: the kernel chooses the address, so nothing is replaced.
    unsafe {
        map(
            null_mut(),
            size,
            libc::PROT_NONE,
            libc::MAP_PRIVATE,
            Some(&file),
        )
    }
}

/// Returns the start of the mailbox's page, for a segment that [`lay_out`] has made.
fn mailbox_of(head: *mut u8) -> *mut u8 {
    head.wrapping_sub(page())
}

/// Writes the heads of the segment and of the mailbox, and has the shepherd sleep on the mailbox's
/// bell. The rest of the segment has its content.
fn publish(head: *mut u8) {
    let mailbox = mailbox_of(head).cast::<Mailbox>();
    // SAFETY: `head` is a mapping with a segment's head, and the mailbox lies before it. Both stay
    // mapped, and all their fields are atomics.
    let (head, shared): (&'static Segment, &'static Mailbox) =
        unsafe { (&*head.cast(), &*mailbox) };
    announce(head, PID.load(Relaxed));
    shared.fill_in();
    // Release pairs with the acquire in `look`.
    MAILBOX.store(mailbox, Release);
    shepherd::sleep_on(Some(&shared.bell));
}

/// Makes zeroed memory of `size` bytes that the same user can read, behind a descriptor with this
/// name. Returns `None` if the system refuses, or if the process shows nothing.
pub(crate) fn shared_memory(name: &CStr, size: usize) -> Option<*mut u8> {
    let file = may_show().then(|| File::make(name, size)).flatten()?;
    let memory = file.map(null_mut(), size)?;
    file.keep(SEGMENT_MODE, segment::SEALS);
    Some(memory)
}

/// Returns whether this process may show files: the user allows it, and at least 256 descriptors
/// are allowed.
fn may_show() -> bool {
    env::parsed(VARIABLE, parse) != Some(false) && limit(libc::RLIMIT_NOFILE) >= HIGH + 16
}

/// Only the owner may open the segment, for reading.
const SEGMENT_MODE: libc::mode_t = 0o400;
/// Only the owner may open the mailbox.
const MAILBOX_MODE: libc::mode_t = 0o600;

/// Copies the used parts of a segment, word by word, because other threads may write to it. Leaves
/// out the first word, `magic`, which [`publish`] stores last. Both addresses are those of mappings
/// of `parts.end()` bytes.
fn copy(from: *const u8, to: *mut u8, parts: Parts) {
    // SAFETY: the mapping begins with a segment's head.
    let head = unsafe { &*from.cast::<Segment>() };
    let used = (head.caches_used.load(Relaxed) as usize).min(segment::CACHES);
    let splits = (head.splits_used.load(Relaxed) as usize).min(parts.split_rows());
    let ranges = [
        (8, parts.caches + used * size_of::<CacheRow>() - 8),
        (parts.events, used * parts.nodes * size_of::<NodeEvents>()),
        (parts.splits, splits * size_of::<SplitRow>()),
    ];
    for (at, bytes) in ranges {
        for at in (at..at + bytes).step_by(8) {
            // SAFETY: all ranges end before `parts.end()`, and begin and end at multiples of 8. All
            // accesses to the words are atomic.
            unsafe {
                let word = (*from.add(at).cast::<AtomicU64>()).load(Relaxed);
                (*to.add(at).cast::<AtomicU64>()).store(word, Relaxed);
            }
        }
    }
}

/// Copies the segment for the child. The caller holds all locks.
pub(crate) fn before_fork() {
    if !IS_SHARED.load(Relaxed) {
        // The child gets its own copy of private memory.
        return;
    }
    let parts = Parts::here();
    if COPY.load(Relaxed).is_null() {
        COPY.store(map_private(null_mut(), parts.end()), Relaxed);
    }
    let to = COPY.load(Relaxed);
    if !to.is_null() {
        copy(HEAD.load(Relaxed), to, parts);
    }
}

/// Puts private memory in the place of the parent's mailbox and segment, in the child of a fork.
pub(crate) fn in_child() {
    PID.store(pid(), Relaxed);
    let (head, parts) = (HEAD.load(Relaxed), Parts::here());
    if head.is_null() || MAILBOX.load(Relaxed).is_null() {
        return;
    }
    // The child of a child has private memory already.
    if IS_SHARED.load(Relaxed) && !replace(head, parts) {
        return;
    }
    publish(head);
}

/// Puts private memory in the place of the mailbox and the segment, with the counts of [`COPY`].
/// Returns false if the system refuses. Then the process has no mailbox, and goes on in its
/// parent's segment, so that the parent's numbers are wrong from then on.
fn replace(head: *mut u8, parts: Parts) -> bool {
    let mailbox = mailbox_of(head);
    let private = map_private(mailbox, page() + parts.end());
    if private.is_null() {
        MAILBOX.store(null_mut(), Relaxed);
        shepherd::sleep_on(None);
        unmap(mailbox, page());
        return false;
    }
    IS_SHARED.store(false, Relaxed);
    let from = COPY.load(Relaxed);
    if !from.is_null() {
        copy(from, head, parts);
    }
    true
}

/// Shows the present settings, and serves the requests in the mailbox. The shepherd's ticks call
/// this function. Without a request, it costs a store for each setting and a load for each slot.
fn look(reach: shepherd::Reach) {
    let Some(server) = server() else {
        return;
    };
    (server.publish)();
    // Acquire pairs with the release in `publish`.
    // SAFETY: the address is null, or that of the mailbox, which stays mapped.
    let Some(mailbox) = (unsafe { MAILBOX.load(Acquire).as_ref() }) else {
        return;
    };
    let mut consent = Wait::default();
    // A bound, because a hostile process could post requests without end.
    for _ in 0..segment::SLOTS {
        let Some(request) = mailbox.take(PID.load(Relaxed)) else {
            return;
        };
        let (what, argument) = (request.what(), request.argument);
        let makes_new_calls = (server.makes_new_calls)(what, argument);
        let serve = || match makes_new_calls && !consent.to(mailbox, request) {
            true => Answer::new(Code::NoConsent, 0),
            false => (server.serve)(what, argument, reach),
        };
        // An allocation is no cancellation point, but some calls for a request are. So cancellation
        // is disabled.
        let answer = keep_errno(|| uncancelled(serve));
        mailbox.answer(request, answer);
    }
}

/// Milliseconds for which one call of [`look`] waits for consents, to all its requests together. An
/// asking process checks every few milliseconds whether its consent is wanted.
const CONSENT_MS: u64 = 100;

/// The waits of one call of [`look`] for consents.
#[derive(Default)]
struct Wait {
    /// When the first wait began, in milliseconds of the coarse clock.
    begin: Option<u64>,
}

impl Wait {
    /// Waits until the asking process has found that this thread has no seccomp filter. Returns
    /// false if it does not give its consent in time.
    #[cold]
    fn to(&mut self, mailbox: &Mailbox, request: Taken) -> bool {
        let begin = *self.begin.get_or_insert_with(coarse_milliseconds);
        let is_early = || coarse_milliseconds() - begin < CONSENT_MS;
        mailbox.want_consent(request);
        while mailbox.consent(request) == Consent::Awaited && is_early() {
            shepherd::nap(Duration::from_micros(100));
        }
        mailbox.consent(request) == Consent::Given
    }
}

/// Returns this process's PID, or 0 before [`start`] has stored it. One load.
pub(crate) fn process() -> u32 {
    PID.load(Relaxed)
}

/// Returns this process's PID. Called in a child by the thread that returned from `fork`, because
/// this thread's id is the PID.
///
/// Makes no system call, because a child may be in a sandbox that forbids `getpid`: the C library
/// knows the thread's id, and the id of the thread's CPU clock contains it.
fn pid() -> u32 {
    let mut clock = 0;
    // SAFETY: `clock` is writable, and the thread is the calling one.
    let error = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
    // From the kernel's `posix-timers.h`: the complement of the thread's id, above three bits.
    if error == 0 { !(clock >> 3) as u32 } else { 0 }
}
