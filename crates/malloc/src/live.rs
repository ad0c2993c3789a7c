//! The statistics segment that every process has, unless it has a file (`count`): shared memory
//! that other processes of the same user can read, at `/proc/PID/fd`.
//!
//! At the start, the process makes two anonymous files:
//!
//! * The **segment** (`pinfold::segment`). It is sealed: only this process can write to it, and its
//!   size never changes.
//! * The **mailbox**, one page. Another process of the same user writes a request there. The
//!   process looks at it in the shepherd's ticks ([`look`]).
//!
//! Both descriptors have numbers from 240 on, where a program expects none, and `exec` closes them.
//! Nothing stays behind when the process ends. If the program closes the descriptors, the memory
//! stays mapped, and only root can open it, at `/proc/PID/map_files`.
//!
//! # Forks
//!
//! A child must not count in its parent's segment. But it must make no other system calls than
//! malloc does, because it may be in a sandbox. So it puts private memory in the place of the
//! segment, with the counts that the parent had at the fork. It keeps the parent's mailbox.
//!
//! A process that wants to read the child puts a request ([`MAKE`]) into the mailbox. The child's
//! thread that finds the request waits until the asking process has found that no filter forbids
//! the child system calls ([`Mailbox::want_consent`]). Then it makes a segment of the child's own.
//!
//! | the memory is | and becomes | when |
//! |---|---|---|
//! | shared: a segment | private | in the child of a fork |
//! | private | shared | when the process serves its first [`MAKE`] request |

use crate::{background, control, heap};
use core::ffi::CStr;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};
use core::time::Duration;
use pinfold::segment::{
    self, Answer, CacheRow, Code, Consent, MAKE, Mailbox, NodeEvents, Parts, Segment, Taken,
};
use pinfold::{arena, fork, shepherd, slab};
use pinfold_rseq::env;

/// The environment variable that says whether a process shows its statistics: `on` or `off`.
pub const VARIABLE: &str = "PINFOLD_SEGMENT";

/// Returns whether the variable's value means `on`. Returns `None` for an invalid value.
pub(crate) fn parse(value: &[u8]) -> Option<bool> {
    match value {
        b"on" => Some(true),
        b"off" => Some(false),
        _ => None,
    }
}

/// The start of the segment, or of the private memory in its place. Null before the start, and
/// where the system refuses a segment.
static HEAD: AtomicPtr<u8> = AtomicPtr::new(null_mut());
/// Whether the memory at [`HEAD`] is shared, or a thread is about to share it.
static IS_SHARED: AtomicBool = AtomicBool::new(false);
/// A copy of the segment from just before a fork. Null before the first fork.
static COPY: AtomicPtr<u8> = AtomicPtr::new(null_mut());
static MAILBOX: AtomicPtr<Mailbox> = AtomicPtr::new(null_mut());
/// This process's number. 0 before the start, or if the C library does not tell it.
static PID: AtomicU32 = AtomicU32::new(0);

/// The descriptors are moved to the first free numbers from this one on. A process that may not
/// have so many descriptors has no segment, because it may need all of them itself.
const HIGH: libc::rlim_t = 240;

/// Makes the process's segment and mailbox. Changes nothing if the system refuses. Runs at the
/// process's start, after the first cache was made.
#[cold]
#[inline(never)]
pub(crate) fn start() {
    if !HEAD.load(Relaxed).is_null() {
        return;
    }
    let parts = Parts::here();
    let Some(head) = shared_memory(segment::FILE, parts.end) else {
        return;
    };
    // SAFETY: `getpid` has no preconditions.
    PID.store(unsafe { libc::getpid() } as u32, Relaxed);
    HEAD.store(head, Relaxed);
    IS_SHARED.store(true, Relaxed);
    // SAFETY: `head` is a zeroed mapping of this size, which stays mapped.
    unsafe { segment::install(head.cast()) };
    slab::show_all();
    arena::publish();
    publish(head, parts);
    make_mailbox();
}

/// Writes the head of a segment that has its content.
fn publish(head: *mut u8, parts: Parts) {
    // SAFETY: `head` is a mapping with a segment's head, which stays mapped.
    let head: &'static Segment = unsafe { &*head.cast() };
    head.fill_in(parts);
    head.pid.store(PID.load(Relaxed), Relaxed);
    // Release pairs with the acquire of a process that reads the segment: it sees all stores above.
    head.magic.store(segment::MAGIC, Release);
}

fn make_mailbox() {
    let size = size_of::<Mailbox>();
    let Some(file) = File::make(segment::MAILBOX_FILE, size) else {
        return;
    };
    let mailbox = file.map(size).cast::<Mailbox>();
    // SAFETY: a mapping of this size, all zeroes, which stays mapped.
    if let Some(shared) = unsafe { mailbox.cast_const().as_ref() } {
        file.keep(MAILBOX_MODE, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW);
        shared.fill_in();
        // Release pairs with the acquire in `look`.
        MAILBOX.store(mailbox, Release);
        shepherd::register(look);
        shepherd::sleep_on(&shared.bell);
    }
}

/// Makes zeroed memory of `size` bytes that the same user can read, behind a descriptor with this
/// name. Returns `None` if the system refuses, or if the process shows nothing.
pub(crate) fn shared_memory(name: &CStr, size: usize) -> Option<*mut u8> {
    let file = may_show().then(|| File::make(name, size)).flatten()?;
    let memory = file.map(size);
    if memory.is_null() {
        return None;
    }
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

/// An anonymous file. Dropping it closes its descriptor.
struct File(libc::c_int);

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: this value owns the descriptor.
        unsafe { libc::close(self.0) };
    }
}

impl File {
    /// Makes a file of `size` zero bytes, whose descriptor is out of the program's way. Returns
    /// `None` if the system refuses.
    fn make(name: &CStr, size: usize) -> Option<File> {
        // A larger file than the limit allows would get the process a signal. A forked child may
        // have a lower limit than its parent.
        if limit(libc::RLIMIT_FSIZE) < size as libc::rlim_t {
            return None;
        }
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // Newer kernels want to be told that nobody executes the file. Older ones refuse the flag.
        let mut fd = memory_file(name, flags | libc::MFD_NOEXEC_SEAL);
        if fd < 0 {
            fd = memory_file(name, flags);
        }
        let low = (fd >= 0).then_some(File(fd))?;
        // The program may rely on the lowest free numbers, so the low one is closed at once.
        // SAFETY: the call uses no memory of this process.
        let high = unsafe { libc::fcntl(low.0, libc::F_DUPFD_CLOEXEC, HIGH as libc::c_int) };
        drop(low);
        let file = (high >= 0).then_some(File(high))?;
        // SAFETY: `ftruncate` and `posix_fallocate` use no memory of this process.
        let has_size = unsafe {
            if segment::commits_strictly() {
                // The kernel may refuse a page later, which would be a signal.
                libc::posix_fallocate(file.0, 0, size as libc::off_t) == 0
            } else {
                libc::ftruncate(file.0, size as libc::off_t) == 0
            }
        };
        has_size.then_some(file)
    }

    /// Maps the file. Returns null if the system refuses.
    fn map(&self, size: usize) -> *mut u8 {
        let (place, flags) = (null_mut(), libc::MAP_SHARED);
        // SAFETY: the kernel chooses the place.
        let at = unsafe { libc::mmap(place, size, READ_WRITE, flags, self.0, 0) };
        if at == libc::MAP_FAILED {
            return null_mut();
        }
        at.cast()
    }

    /// Sets the file's mode, seals it, and leaves its descriptor open.
    fn keep(self, mode: libc::mode_t, seals: libc::c_int) {
        // SAFETY: the calls use no memory of this process.
        unsafe {
            libc::fchmod(self.0, mode);
            // Kernels before 5.1 do not know the seal against later writers.
            if libc::fcntl(self.0, libc::F_ADD_SEALS, seals | libc::F_SEAL_SEAL) != 0 {
                let known = seals & !segment::F_SEAL_FUTURE_WRITE;
                libc::fcntl(self.0, libc::F_ADD_SEALS, known | libc::F_SEAL_SEAL);
            }
        }
        // The descriptor stays open until the process ends.
        core::mem::forget(self);
    }
}

/// Unmaps a mapping of this module that nothing uses.
fn unmap(at: *mut u8, size: usize) {
    // SAFETY: the caller made the mapping, and nothing uses it.
    unsafe { libc::munmap(at.cast(), size) };
}

const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

fn memory_file(name: &CStr, flags: libc::c_uint) -> libc::c_int {
    // SAFETY: the name is a C string.
    unsafe { libc::memfd_create(name.as_ptr(), flags) }
}

fn limit(resource: libc::__rlimit_resource_t) -> libc::rlim_t {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is writable.
    unsafe { libc::getrlimit(resource, &raw mut limit) };
    limit.rlim_cur
}

/// Maps private memory of `size` bytes, anywhere or in the place of the mapping at `place`. Returns
/// null if the system refuses.
fn map_private(place: *mut u8, size: usize) -> *mut u8 {
    let fixed = if place.is_null() { 0 } else { libc::MAP_FIXED };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
    // SAFETY: `place` is null, or the start of a mapping of this size whose content is copied.
    let at = unsafe { libc::mmap(place.cast(), size, READ_WRITE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return null_mut();
    }
    at.cast()
}

/// Copies what is in use of a segment, word by word, because other threads may write to it. Leaves
/// out the first word, `magic`, which [`publish`] stores last. Both addresses are those of mappings
/// of `parts.end` bytes.
fn copy(from: *const u8, to: *mut u8, parts: Parts) {
    // SAFETY: the mapping begins with a segment's head.
    let head = unsafe { &*from.cast::<Segment>() };
    let used = (head.caches_used.load(Relaxed) as usize).min(segment::CACHES);
    let ranges = [
        (8, parts.caches + used * size_of::<CacheRow>() - 8),
        (parts.events, used * parts.nodes * size_of::<NodeEvents>()),
    ];
    for (at, bytes) in ranges {
        for at in (at..at + bytes).step_by(8) {
            // SAFETY: both ranges end before `parts.end`, and begin and end at multiples of 8. All
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
        COPY.store(map_private(null_mut(), parts.end), Relaxed);
    }
    let to = COPY.load(Relaxed);
    if !to.is_null() {
        copy(HEAD.load(Relaxed), to, parts);
    }
}

/// Puts private memory in the place of the parent's segment, in the child of a fork.
pub(crate) fn in_child() {
    PID.store(pid(), Relaxed);
    if !IS_SHARED.load(Relaxed) {
        return;
    }
    let (head, parts) = (HEAD.load(Relaxed), Parts::here());
    // If the system refuses, the child goes on in the parent's segment, and the parent's numbers
    // are wrong from then on.
    let private = heap::keep_errno(|| map_private(head, parts.end));
    if !private.is_null() {
        IS_SHARED.store(false, Relaxed);
        let from = COPY.load(Relaxed);
        if !from.is_null() {
            copy(from, private, parts);
        }
    }
}

/// Serves the requests in the mailbox. The shepherd's ticks call it. Without a request, costs a
/// load for each slot.
fn look(reach: shepherd::Reach) {
    // Acquire pairs with the release in `make_mailbox`.
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
        let makes_new_calls = match what {
            MAKE => !IS_SHARED.load(Relaxed),
            what => control::makes_new_calls(what, argument),
        };
        let serve = || match what {
            _ if makes_new_calls && !consent.to(mailbox, request) => {
                Answer::new(Code::NoConsent, 0)
            }
            MAKE => make_in_child(),
            what => control::serve(what, argument, reach),
        };
        // An allocation is no cancellation point, but some calls for a request are.
        let answer = heap::keep_errno(|| background::uncancelled(serve));
        mailbox.answer(request, answer);
    }
}

/// How long a look waits for the consent to all its requests, in milliseconds. A process that asks
/// looks every few milliseconds.
const CONSENT_MS: u32 = 100;

/// A look's wait for consent.
#[derive(Default)]
struct Wait {
    /// When the look has begun to wait, by `background::now`.
    begin: Option<u32>,
}

impl Wait {
    /// Waits until the asking process has found that this thread has no seccomp filter. Returns
    /// false if it does not say so in time.
    #[cold]
    fn to(&mut self, mailbox: &Mailbox, request: Taken) -> bool {
        let begin = *self.begin.get_or_insert_with(background::now);
        let is_early = || background::now().wrapping_sub(begin) < CONSENT_MS;
        mailbox.want_consent(request);
        while mailbox.consent(request) == Consent::Awaited && is_early() {
            shepherd::nap(Duration::from_micros(100));
        }
        mailbox.consent(request) == Consent::Given
    }
}

/// Returns the number of this process, or 0 before the process's start has shown it. One load.
pub(crate) fn process() -> u32 {
    PID.load(Relaxed)
}

/// Finds the number of this process. Called by the process's first thread, or in a child by the
/// thread that returned from `fork`. This thread's number is the process's number.
///
/// Makes no system call, because a child may be in a sandbox that forbids `getpid`: the C library
/// knows the thread's number, and the number of the thread's clock holds it.
fn pid() -> u32 {
    let mut clock = 0;
    // SAFETY: `clock` is writable, and the thread is the calling one.
    let error = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
    // From the kernel's `posix-timers.h`: the complement of the number, above three bits.
    if error == 0 { !(clock >> 3) as u32 } else { 0 }
}

/// Makes a segment for a child of a fork, which has private memory in its place.
#[cold]
fn make_in_child() -> Answer {
    let (head, parts) = (HEAD.load(Relaxed), Parts::here());
    if IS_SHARED.swap(true, Relaxed) {
        return Answer::new(Code::Done, 0);
    }
    let refused = || {
        IS_SHARED.store(false, Relaxed);
        Answer::new(Code::Refused, 0)
    };
    let Some(file) = File::make(segment::FILE, parts.end) else {
        return refused();
    };
    let fresh = file.map(parts.end);
    if fresh.is_null() {
        return refused();
    }
    // While this thread holds all locks, no other thread counts an event that needs a lock. Some of
    // the other events may be lost.
    if !fork::try_prepare() {
        unmap(fresh, parts.end);
        return refused();
    }
    copy(head, fresh, parts);
    publish(fresh, parts);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: both mappings have this size, and belong to this module. The exchange is atomic for
    // threads that count at the old place.
    let moved = unsafe { libc::mremap(fresh.cast(), parts.end, parts.end, flags, head) };
    if moved == libc::MAP_FAILED {
        // The kernel may have unmapped the old place before it failed. The locks keep most threads
        // away from that place until it has memory again.
        let private = map_private(head, parts.end);
        if private.is_null() {
            pinfold::abort(format_args!("the system has no memory for the statistics"));
        }
        copy(fresh, private, parts);
        unmap(fresh, parts.end);
    } else {
        file.keep(SEGMENT_MODE, segment::SEALS);
    }
    fork::parent();
    if moved == libc::MAP_FAILED {
        return refused();
    }
    Answer::new(Code::Done, 0)
}
