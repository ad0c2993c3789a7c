//! The anonymous files by which a process shows its statistics, and takes requests.

use crate::sys;
use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, AtomicU64};

/// The name of the segment's file, as `/proc/PID/fd` shows it behind `/memfd:`.
pub const FILE: &CStr = c"pinfold";
/// The name of the mailbox's file.
pub const MAILBOX_FILE: &CStr = c"pinfold-mailbox";
/// The name of the file with the records of a heap profile ([`crate::profile`]).
pub const PROFILE_FILE: &CStr = c"pinfold-heap";
/// The seal that forbids `write` and new writable mappings, from Linux 5.1 on. The mapping that the
/// process already has stays writable.
pub const F_SEAL_FUTURE_WRITE: i32 = 0x10;
/// The seals of a segment: its size stays, and no process gets a new way to write to it.
pub const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | F_SEAL_FUTURE_WRITE;

/// The value of [`Mailbox::magic`].
pub const MAIL_MAGIC: u64 = u64::from_le_bytes(*b"PINMAIL\x01");
/// The request that a child of a fork makes a segment of its own.
pub const MAKE: u32 = 1;

/// Where other processes of the same user ask a process, or a child that it forked, to do
/// something.
///
/// # Examples
///
/// ```
/// assert_eq!(size_of::<pinfold::segment::Mailbox>(), 4096);
/// ```
#[repr(C, align(4096))]
pub struct Mailbox {
    /// [`MAIL_MAGIC`].
    pub magic: AtomicU64,
    /// [`VERSION`](super::VERSION).
    pub version: AtomicU32,
    /// The requests: 0, or a [`Request`] in one word. The process that serves a request sets it to
    /// 0.
    pub requests: [AtomicU64; 32],
}

/// What a process is asked to do, and until when.
///
/// # Examples
///
/// ```
/// use pinfold::segment::{MAKE, Request, now_ms};
///
/// let request = Request::new(77, MAKE, 1000);
/// assert_eq!(Request::from_word(request.word()), request);
/// assert!(request.is_open(now_ms()) && !request.is_open(now_ms() + 3000));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The process, as it sees itself. Linux numbers processes up to 2²².
    pub pid: u32,
    /// [`MAKE`].
    pub what: u32,
    /// The milliseconds of the system's clock, modulo 2³⁴, from which on the request is ignored.
    until: u64,
}

const PID_BITS: u32 = 22;
const WHAT_BITS: u32 = 8;
const TIME: u64 = (1 << 34) - 1;
/// No request is open for longer, in milliseconds.
const LONGEST: u64 = 10_000;

impl Request {
    /// Makes a request that is open for `ms` milliseconds, at most 10 seconds.
    pub fn new(pid: u32, what: u32, ms: u64) -> Request {
        Request {
            pid: pid & ((1 << PID_BITS) - 1),
            what: what & ((1 << WHAT_BITS) - 1),
            until: (now_ms() + ms.min(LONGEST)) & TIME,
        }
    }

    /// Returns the request in one word, which is not 0.
    pub fn word(self) -> u64 {
        let what = u64::from(self.what) << PID_BITS;
        u64::from(self.pid) | what | self.until << (PID_BITS + WHAT_BITS)
    }

    /// Returns the request in a word that may hold anything.
    pub fn from_word(word: u64) -> Request {
        Request {
            pid: word as u32 & ((1 << PID_BITS) - 1),
            what: (word >> PID_BITS) as u32 & ((1 << WHAT_BITS) - 1),
            until: word >> (PID_BITS + WHAT_BITS),
        }
    }

    /// Returns whether the request is still to be served at `now`, in milliseconds.
    pub fn is_open(self, now: u64) -> bool {
        self.until.wrapping_sub(now) & TIME <= LONGEST
    }
}

/// Returns the system's clock in milliseconds. Makes no system call where the kernel offers a vDSO.
pub fn now_ms() -> u64 {
    now_ns() / 1_000_000
}

pub(super) fn now_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns whether the kernel counts every committed page, touched or not.
#[doc(hidden)]
pub fn commits_strictly() -> bool {
    sys::commits_strictly()
}
