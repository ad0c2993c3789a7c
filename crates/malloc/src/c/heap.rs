//! The C API of heap profiles.

use crate::heap_profile::{self, MAX_INTERVAL};
use core::ffi::{CStr, c_char, c_int};
use pinfold::internal::{heap, set_errno};

/// Calls `start` with an interval in bytes. Returns 0, or -1 with EINVAL, ENOMEM or EBUSY.
pub(super) fn started(interval: u64, start: fn(u64) -> bool) -> c_int {
    if !(1..=MAX_INTERVAL).contains(&interval) {
        return answer(false, libc::EINVAL);
    }
    let done = start(interval);
    let busy = heap::is_changing();
    answer(done, if busy { libc::EBUSY } else { libc::ENOMEM })
}

pub(super) fn answer(done: bool, errno: c_int) -> c_int {
    if done {
        return 0;
    }
    set_errno(errno);
    -1
}

/// Starts a heap profile, or changes its interval. Returns 0, or -1 with EINVAL, ENOMEM or EBUSY.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_heap_start(interval: u64) -> c_int {
    started(interval, heap_profile::start)
}

/// Stops the heap profile. Returns 0, or -1 with EBUSY.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_heap_stop() -> c_int {
    answer(heap_profile::stop(), libc::EBUSY)
}

/// Writes the heap profile to a file. Returns 0, or -1 with ENODATA or the system's errno.
///
/// # Safety
///
/// `path` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_write(path: *const c_char) -> c_int {
    if !heap_profile::exists() {
        return answer(false, libc::ENODATA);
    }
    // SAFETY: the caller passes a C string.
    let path = unsafe { CStr::from_ptr(path) };
    if heap_profile::write(path) { 0 } else { -1 }
}

/// Writes the heap profile to an open file. Returns 0, or -1 with ENODATA or the system's errno.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_heap_write_fd(file: c_int) -> c_int {
    if !heap_profile::exists() {
        return answer(false, libc::ENODATA);
    }
    if heap_profile::write_to(file) { 0 } else { -1 }
}
