//! The C API of the malloc family, with the semantics of POSIX and glibc.
//!
//! Functions that fail return null and set errno: ENOMEM if there is no memory or if a size
//! overflows, EINVAL for an invalid alignment.

use super::support::null_with;
use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use pinfold::internal::profile::keep_frame;
use pinfold::internal::{arena, heap, keep_errno};
use pinfold::slab;
use pinfold_rseq::kernel::page_size as os_page;

/// Allocates a block of `size` bytes, aligned to 16 (`malloc`). Also returns a block for a size of
/// 0.
///
/// Costs one critical section up to 32 KiB, if the CPU's sheaf has an object.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn pinfold_malloc(size: usize) -> *mut c_void {
    heap::alloc(size).cast()
}

/// Frees `block` (`free`). Does nothing if `block` is null.
///
/// Costs one critical section for blocks of a size class, if the CPU's sheaf has room. An address
/// outside Pinfold's memory ends the process with a message.
///
/// # Safety
///
/// `block` is null or came from this API, was not freed, and is not used after the call.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn pinfold_free(block: *mut c_void) {
    // SAFETY: the caller passes ownership of `block`, which is null or came from this API.
    unsafe { heap::free(block.cast()) };
}

/// Allocates a zeroed block for `count` objects of `size` bytes (`calloc`).
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_calloc(count: usize, size: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else {
        return null_with(libc::ENOMEM);
    };
    heap::alloc_zeroed(bytes).cast()
}

/// Changes the size of a block (`realloc`).
///
/// Allocates if `block` is null. Frees the block and returns null if `size` is 0, like glibc.
/// Returns null and leaves the block unchanged if there is no memory to grow it. Shrinking never
/// fails: if there is no memory for a smaller block, the old block stays.
///
/// # Safety
///
/// `block` is null, or came from this API and was not freed. If the call succeeds, `block` is not
/// used after the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_realloc(block: *mut c_void, size: usize) -> *mut c_void {
    if block.is_null() {
        return pinfold_malloc(size);
    }
    if size == 0 {
        // SAFETY: the caller passes ownership of `block`, which came from this API.
        unsafe { pinfold_free(block) };
        return null_mut();
    }
    // SAFETY: the caller owns `block`, which came from this API and is not null.
    unsafe { heap::realloc(block.cast(), size).cast() }
}

/// Changes the size of a block to `count` objects of `size` bytes (`reallocarray`), like
/// [`pinfold_realloc`].
///
/// # Safety
///
/// `block` is null, or came from this API and was not freed. If the call succeeds, `block` is not
/// used after the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_reallocarray(
    block: *mut c_void,
    count: usize,
    size: usize,
) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else {
        return null_with(libc::ENOMEM);
    };
    // SAFETY: the caller owns `block`, which is null or came from this API.
    unsafe { pinfold_realloc(block, bytes) }
}

/// Frees `block` (`free_sized` of C23), like [`pinfold_free`]. Hardened and debugged processes
/// report a size for which the block cannot have been allocated. Others ignore the size, because
/// finding the class by the address takes fewer instructions.
///
/// # Safety
///
/// `block` is null or came from this API, was not freed, and is not used after the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_free_sized(block: *mut c_void, size: usize) {
    if heap::fits(block.cast(), size, heap::ALIGN) {
        // SAFETY: the caller passes ownership of `block`, which is null or came from this API.
        unsafe { pinfold_free(block) };
    }
}

/// Frees `block` (`free_aligned_sized` of C23), like [`pinfold_free_sized`].
///
/// # Safety
///
/// `block` is null or came from this API, was not freed, and is not used after the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_free_aligned_sized(block: *mut c_void, align: usize, size: usize) {
    if heap::fits(block.cast(), size, align) {
        // SAFETY: the caller passes ownership of `block`, which is null or came from this API.
        unsafe { pinfold_free(block) };
    }
}

/// Allocates a block of `size` bytes at a multiple of `align` (`aligned_alloc`). Fails with EINVAL
/// if `align` is not a power of two.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_aligned_alloc(align: usize, size: usize) -> *mut c_void {
    keep_frame();
    if !align.is_power_of_two() {
        return null_with(libc::EINVAL);
    }
    heap::alloc_aligned(size, align).cast()
}

/// Allocates a block of `size` bytes at a multiple of `align` rounded up to a power of two
/// (`memalign`).
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_memalign(align: usize, size: usize) -> *mut c_void {
    keep_frame();
    let Some(align) = align.max(1).checked_next_power_of_two() else {
        return null_with(libc::EINVAL);
    };
    heap::alloc_aligned(size, align).cast()
}

/// Allocates a block of `size` bytes at a multiple of `align`, and stores it in `*to`
/// (`posix_memalign`).
///
/// Returns 0 after success. Returns EINVAL if `align` is not a power of two or not a multiple of a
/// pointer's size, and ENOMEM if there is no memory. Leaves errno unchanged. If the call fails,
/// leaves `*to` unchanged too.
///
/// # Safety
///
/// `to` is writable for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_posix_memalign(
    to: *mut *mut c_void,
    align: usize,
    size: usize,
) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    keep_frame();
    let block = keep_errno(|| heap::alloc_aligned(size, align));
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller promises that `to` is writable.
    unsafe { *to = block.cast() };
    0
}

/// Allocates a block at a multiple of the system's page size (`valloc`).
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_valloc(size: usize) -> *mut c_void {
    keep_frame();
    heap::alloc_aligned(size, os_page()).cast()
}

/// Allocates whole pages of the system for `size` bytes (`pvalloc`). For a size of 0, allocates one
/// page.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_pvalloc(size: usize) -> *mut c_void {
    keep_frame();
    let Some(whole) = size.max(1).checked_next_multiple_of(os_page()) else {
        return null_with(libc::ENOMEM);
    };
    heap::alloc_aligned(whole, os_page()).cast()
}

/// Returns how many bytes of `block` the program may use (`malloc_usable_size`): at least as many
/// as it asked for. Returns 0 if `block` is null.
///
/// # Safety
///
/// `block` is null, or came from this API and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_malloc_usable_size(block: *mut c_void) -> usize {
    // SAFETY: the caller owns `block`, which is null or came from this API.
    unsafe { heap::usable_size_checked(block.cast()) }
}

/// Gives all free memory back to the system (`malloc_trim`), including the free blocks that each
/// CPU keeps, and whole pages of free blocks in slabs that are in use. Returns 1 if any memory went
/// back. Ignores `pad`.
///
/// Interrupts the CPUs that run threads of this process, once. If the kernel has no call for this,
/// the blocks that CPUs keep stay. Makes a system call for each free run, and for each range of
/// free pages in slabs. Must not be called in a signal handler, because it waits
/// for locks.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_malloc_trim(_pad: usize) -> c_int {
    let before = arena::returned();
    // If the kernel cannot fence, the rest has gone back nevertheless.
    let _ = slab::shrink_all();
    c_int::from(arena::returned() > before)
}

/// Sets the soft limit on the memory that Pinfold holds, in bytes. 0 removes the limit. Never
/// fails. Costs a few stores.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_set_memory_limit(bytes: usize) {
    heap::ready();
    arena::set_memory_limit(Some(bytes).filter(|&bytes| bytes > 0));
}

/// Returns the soft limit on the memory that Pinfold holds, in bytes, or 0 if there is no limit.
/// Costs a few loads.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_memory_limit() -> usize {
    heap::ready();
    arena::memory_limit().unwrap_or(0)
}
