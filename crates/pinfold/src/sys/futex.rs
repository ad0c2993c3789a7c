//! Sleeping until a word changes.

use core::ptr::null;
use core::sync::atomic::AtomicU32;
use core::time::Duration;
use pinfold_rseq::syscall;

/// Marks a futex that no other process uses.
const PRIVATE: libc::c_int = libc::FUTEX_PRIVATE_FLAG;

/// Sleeps until a thread calls [`wake`] for `word`, or until `time` has passed. May return sooner.
/// Returns at once if `word` differs from `value`.
pub(crate) fn wait_for_change(word: &AtomicU32, value: u32, time: Duration) {
    wait(word, libc::FUTEX_WAIT | PRIVATE, value, time);
}

/// Does what [`wait_for_change`] does, for a word in memory that processes share. [`wake_shared`]
/// ends the sleep.
pub(crate) fn wait_for_shared_change(word: &AtomicU32, value: u32, time: Duration) {
    wait(word, libc::FUTEX_WAIT, value, time);
}

fn wait(word: &AtomicU32, operation: libc::c_int, value: u32, time: Duration) {
    let time = libc::timespec {
        tv_sec: time.as_secs().min(1 << 30) as _,
        tv_nsec: libc::c_long::from(time.subsec_nanos() as i32),
    };
    futex(word.as_ptr(), operation, value, &raw const time);
}

/// Wakes all threads of this process that wait for a change of `word`.
pub(crate) fn wake(word: &AtomicU32) {
    let operation = libc::FUTEX_WAKE | PRIVATE;
    futex(word.as_ptr(), operation, i32::MAX as u32, null());
}

/// Wakes a thread of this process that waits for a change of `word`, if there is one.
pub(crate) fn wake_one(word: &AtomicU32) {
    futex(word.as_ptr(), libc::FUTEX_WAKE | PRIVATE, 1, null());
}

/// Wakes all threads of all processes that wait for a change of `word`, which they share.
pub(crate) fn wake_shared(word: &AtomicU32) {
    futex(word.as_ptr(), libc::FUTEX_WAKE, i32::MAX as u32, null());
}

/// Makes a futex call. `operation` is `FUTEX_WAIT` or `FUTEX_WAKE`, with or without [`PRIVATE`].
/// `time` limits a wait, and is null or the address of a time.
fn futex(word: *const u32, operation: libc::c_int, value: u32, time: *const libc::timespec) {
    let (word, time) = (word as usize, time as usize);
    // SAFETY: both operations only read `word` and `time`. The kernel refuses an address that it
    // cannot read.
    let _ = unsafe {
        syscall(
            libc::SYS_futex,
            [word, operation as usize, value as usize, time],
        )
    };
}
