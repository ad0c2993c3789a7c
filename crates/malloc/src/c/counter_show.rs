//! The C API of counters that other processes can see.
//!
//! A counter that is shown and then destroyed is hidden first, so no tick reads freed memory. The
//! lifetime `'static` of a shown counter is not real: the C program promises that it stays until it
//! is hidden or destroyed.

use super::support::{answer, failed};
use super::text::str_of;
use core::ffi::{c_char, c_int};
use pinfold::counter::{EventCounter, PerCpuCounter};
use pinfold::internal::heap;
use pinfold::internal::segment::{self, Counted};

/// Shows `this` under `name`. Returns 0, or −1 with errno.
///
/// # Safety
///
/// `this` is initialised, and stays until it is hidden or destroyed. `name` is null or a C string.
unsafe fn show<C: Counted>(this: &'static C, name: *const c_char) -> c_int {
    // The first allocation makes the segment.
    let block = heap::alloc_aligned(16, 16);
    // SAFETY: the block is new, or null.
    unsafe { heap::free(block) };
    // SAFETY: the caller promises null or a C string.
    let Some(name) = (unsafe { str_of(name) }) else {
        return failed(libc::EINVAL);
    };
    answer(segment::show(name, this))
}

/// Shows a counter under `name`. Returns 0, or −1 with errno.
///
/// # Safety
///
/// `this` is initialised, and stays until it is hidden or destroyed. `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_counter_show(
    this: &'static PerCpuCounter,
    name: *const c_char,
) -> c_int {
    // SAFETY: the caller promises the counter's life and null or a C string.
    unsafe { show(this, name) }
}

/// Shows an event counter under `name`. Returns 0, or −1 with errno.
///
/// # Safety
///
/// `this` is initialised, and stays until it is hidden or destroyed. `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_event_show(
    this: &'static EventCounter,
    name: *const c_char,
) -> c_int {
    // SAFETY: the caller promises the counter's life and null or a C string.
    unsafe { show(this, name) }
}

/// Ends the showing of the counter `name`. Returns whether it was shown.
///
/// # Safety
///
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_hide(name: *const c_char) -> bool {
    // SAFETY: the caller promises null or a C string.
    unsafe { str_of(name) }.is_some_and(segment::hide)
}
