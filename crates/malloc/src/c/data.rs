//! The malloc family for blocks without pointers (`heap::Content`). The functions of allocation
//! tokens call it. Each function does what the one of `malloc` does that it is named after.

use super::malloc::{pinfold_free, pinfold_malloc};
use super::support::null_with;
use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use pinfold::internal::heap::{self, Content};
use pinfold::internal::keep_errno;
use pinfold::internal::profile::keep_frame;
use pinfold_rseq::kernel::page_size as os_page;

/// Allocates like [`pinfold_malloc`].
#[inline(always)]
pub fn malloc(size: usize) -> *mut c_void {
    heap::alloc_data(size).cast()
}

/// Allocates like [`pinfold_calloc`](super::pinfold_calloc).
#[inline]
pub fn calloc(count: usize, size: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else {
        return null_with(libc::ENOMEM);
    };
    heap::alloc_data_zeroed(bytes).cast()
}

/// Resizes like [`pinfold_realloc`](super::pinfold_realloc). `data` says whether the block holds no
/// pointers. If `data` is false, a block that lies among blocks without pointers moves away from
/// them.
///
/// # Safety
///
/// The same as for [`pinfold_realloc`](super::pinfold_realloc).
#[inline]
pub unsafe fn realloc(block: *mut c_void, size: usize, data: bool) -> *mut c_void {
    if block.is_null() {
        return match data {
            true => malloc(size),
            false => pinfold_malloc(size),
        };
    }
    if size == 0 {
        // SAFETY: the caller passes ownership of `block`, which came from this API.
        unsafe { pinfold_free(block) };
        return null_mut();
    }
    let content = match data {
        true => Content::Data,
        false => Content::Pointers,
    };
    // SAFETY: the caller owns `block`, which came from this API and is not null.
    unsafe { heap::realloc_as(block.cast(), size, content).cast() }
}

/// Resizes like [`pinfold_reallocarray`](super::pinfold_reallocarray), and as [`realloc`] does.
///
/// # Safety
///
/// The same as for [`pinfold_realloc`](super::pinfold_realloc).
#[inline]
pub unsafe fn reallocarray(
    block: *mut c_void,
    count: usize,
    size: usize,
    data: bool,
) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else {
        return null_with(libc::ENOMEM);
    };
    // SAFETY: the caller owns `block`, which is null or came from this API.
    unsafe { realloc(block, bytes, data) }
}

/// Allocates like [`pinfold_aligned_alloc`](super::pinfold_aligned_alloc).
pub extern "C-unwind" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    keep_frame();
    if !align.is_power_of_two() {
        return null_with(libc::EINVAL);
    }
    heap::alloc_data_aligned(size, align).cast()
}

/// Allocates like [`pinfold_memalign`](super::pinfold_memalign).
pub fn memalign(align: usize, size: usize) -> *mut c_void {
    keep_frame();
    let Some(align) = align.max(1).checked_next_power_of_two() else {
        return null_with(libc::EINVAL);
    };
    heap::alloc_data_aligned(size, align).cast()
}

/// Allocates like [`pinfold_posix_memalign`](super::pinfold_posix_memalign).
///
/// # Safety
///
/// `to` is writable for a pointer.
pub unsafe fn posix_memalign(to: *mut *mut c_void, align: usize, size: usize) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    keep_frame();
    let block = keep_errno(|| heap::alloc_data_aligned(size, align));
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller promises that `to` is writable.
    unsafe { *to = block.cast() };
    0
}

/// Allocates like [`pinfold_valloc`](super::pinfold_valloc).
pub fn valloc(size: usize) -> *mut c_void {
    keep_frame();
    heap::alloc_data_aligned(size, os_page()).cast()
}

/// Allocates like [`pinfold_pvalloc`](super::pinfold_pvalloc).
pub fn pvalloc(size: usize) -> *mut c_void {
    keep_frame();
    let Some(whole) = size.max(1).checked_next_multiple_of(os_page()) else {
        return null_with(libc::ENOMEM);
    };
    heap::alloc_data_aligned(whole, os_page()).cast()
}
