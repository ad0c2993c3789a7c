//! The C API of counters in shared memory.
//!
//! A C handle is a `SharedCounters` in a block from `heap`. Functions that fail set errno: EINVAL
//! for a number out of range, for a file that is too small and for one with another content, and
//! the kernel's errno for a file that cannot be mapped.

use super::support::{boxed_or_errno, failed, unboxed};
use core::ffi::c_int;
use pinfold::counter::SharedCounters;

/// Maps `count` counters in the file `fd`. Returns null with errno if it fails.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_shared_counters_create(fd: c_int, count: usize) -> *mut SharedCounters {
    boxed_or_errno(SharedCounters::in_shared(fd, count))
}

/// Adds `n` to counter number `nth`. Returns 0, or −1 with EINVAL.
///
/// # Safety
///
/// `this` came from `pinfold_shared_counters_create`, and has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shared_counters_add(
    this: &SharedCounters,
    nth: usize,
    n: i64,
) -> c_int {
    match this.add(nth, n) {
        true => 0,
        false => failed(libc::EINVAL),
    }
}

/// Stores the approximate value of counter number `nth`. Returns 0, or −1 with EINVAL.
///
/// # Safety
///
/// `this` came from `pinfold_shared_counters_create`, and has not been destroyed. `value` is
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shared_counters_read(
    this: &SharedCounters,
    nth: usize,
    value: *mut i64,
) -> c_int {
    // SAFETY: the caller promises counters that have not been destroyed, and a writable number.
    unsafe { store(this.read(nth), value) }
}

/// Stores the exact value of counter number `nth` at one moment during the call. Returns 0, or −1
/// with EINVAL.
///
/// # Safety
///
/// `this` came from `pinfold_shared_counters_create`, and has not been destroyed. `value` is
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shared_counters_sum(
    this: &SharedCounters,
    nth: usize,
    value: *mut i64,
) -> c_int {
    // SAFETY: the caller promises counters that have not been destroyed, and a writable number.
    unsafe { store(this.sum(nth), value) }
}

/// Stores a value, if there is one.
///
/// # Safety
///
/// `at` is writable.
unsafe fn store(value: Option<i64>, at: *mut i64) -> c_int {
    let Some(value) = value else {
        return failed(libc::EINVAL);
    };
    // SAFETY: the caller promises that `at` is writable.
    unsafe { at.write(value) };
    0
}

/// Unmaps the counters. The file keeps the counts. Does nothing if `this` is null.
///
/// # Safety
///
/// `this` is null, or came from `pinfold_shared_counters_create` and has not been destroyed. It is
/// not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shared_counters_destroy(this: *mut SharedCounters) {
    // SAFETY: the caller promises null or a value of this API, which came from `boxed`, and gives
    // it up.
    unsafe { unboxed(this) };
}
