//! The C API: what `pinfold.h` declares. The malloc family under prefixed names, with the semantics of POSIX and glibc.
//!
//! Functions that fail return null and set errno: ENOMEM for want of memory and for sizes that overflow, EINVAL for bad
//! alignments.

use crate::heap::{self, set_errno};
use crate::init;
use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use pinfold::{page, slab};

/// `malloc`: a block of `size` bytes, aligned to 16. A size of 0 gives a block too.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn pinfold_malloc(size: usize) -> *mut c_void {
    heap::alloc(size).cast()
}

/// `free`: takes a block back; null is none. An address that is no block of Pinfold's ends the process with a message.
///
/// # Safety
///
/// The block came from this API, and nobody uses it any more.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn pinfold_free(block: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { heap::free(block.cast()) };
}

/// `calloc`: `count` objects of `size` bytes, zeroed.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_calloc(count: usize, size: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else {
        set_errno(libc::ENOMEM);
        return null_mut();
    };
    heap::alloc_zeroed(bytes).cast()
}

/// `realloc`: grows or shrinks a block. Null makes a new block; a size of 0 frees the block and returns null, as
/// glibc does. Shrinking never fails: when there is no smaller block, the old one stays.
///
/// # Safety
///
/// As for [`pinfold_free`], unless null comes back for want of memory: then the block is as it was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_realloc(block: *mut c_void, size: usize) -> *mut c_void {
    if block.is_null() {
        return pinfold_malloc(size);
    }
    if size == 0 {
        // SAFETY: the caller's promise.
        unsafe { pinfold_free(block) };
        return null_mut();
    }
    // SAFETY: the caller's promise.
    unsafe { heap::realloc(block.cast(), size).cast() }
}

/// `reallocarray`: [`pinfold_realloc`] for `count` objects of `size` bytes, failing when that overflows.
///
/// # Safety
///
/// As for [`pinfold_realloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_reallocarray(
    block: *mut c_void,
    count: usize,
    size: usize,
) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else {
        set_errno(libc::ENOMEM);
        return null_mut();
    };
    // SAFETY: the caller's promise.
    unsafe { pinfold_realloc(block, bytes) }
}

/// `free_sized` (C23): as [`pinfold_free`]. `size` is ignored: the block's address says its class.
///
/// # Safety
///
/// As for [`pinfold_free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_free_sized(block: *mut c_void, _size: usize) {
    // SAFETY: the caller's promise.
    unsafe { pinfold_free(block) };
}

/// `free_aligned_sized` (C23): as [`pinfold_free`]. `align` and `size` are ignored.
///
/// # Safety
///
/// As for [`pinfold_free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_free_aligned_sized(
    block: *mut c_void,
    _align: usize,
    _size: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { pinfold_free(block) };
}

/// `aligned_alloc`: a block of `size` bytes at a multiple of `align`; EINVAL unless `align` is a power of two.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_aligned_alloc(align: usize, size: usize) -> *mut c_void {
    if !align.is_power_of_two() {
        set_errno(libc::EINVAL);
        return null_mut();
    }
    heap::alloc_aligned(size, align).cast()
}

/// `memalign`: as [`pinfold_aligned_alloc`], with `align` rounded up to a power of two.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_memalign(align: usize, size: usize) -> *mut c_void {
    let Some(align) = align.max(1).checked_next_power_of_two() else {
        set_errno(libc::EINVAL);
        return null_mut();
    };
    heap::alloc_aligned(size, align).cast()
}

/// `posix_memalign`: stores a block at `*to`; returns 0, or EINVAL when `align` is no power of two or no multiple of a
/// pointer's size, or ENOMEM. Leaves errno and, when it fails, `*to` alone.
///
/// # Safety
///
/// `to` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_posix_memalign(
    to: *mut *mut c_void,
    align: usize,
    size: usize,
) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    let block = heap::keep_errno(|| heap::alloc_aligned(size, align));
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller's promise.
    unsafe { *to = block.cast() };
    0
}

fn os_page() -> usize {
    // SAFETY: no preconditions.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// `valloc`: a block at a multiple of the OS page.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_valloc(size: usize) -> *mut c_void {
    heap::alloc_aligned(size, os_page()).cast()
}

/// `pvalloc`: whole OS pages.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_pvalloc(size: usize) -> *mut c_void {
    let Some(whole) = size.max(1).checked_next_multiple_of(os_page()) else {
        set_errno(libc::ENOMEM);
        return null_mut();
    };
    heap::alloc_aligned(whole, os_page()).cast()
}

/// `malloc_usable_size`: bytes that may be used of a block, at least what was asked for; 0 for null.
///
/// # Safety
///
/// The block came from this API.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_malloc_usable_size(block: *mut c_void) -> usize {
    // SAFETY: the caller's promise.
    unsafe { heap::usable_size(block.cast()) }
}

/// `malloc_trim`: gives all free memory back to the system, what CPUs have cached included; 1 when there was any.
/// `pad` is not needed. Interrupts the CPUs that run threads of this process, once.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_malloc_trim(_pad: usize) -> c_int {
    c_int::from(slab::shrink_all().unwrap_or_else(|_| page::trim()) > 0)
}

/// Sets the soft limit on the memory that Pinfold holds, in bytes; 0 removes it. Never fails. A few
/// stores.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_memory_set_limit(bytes: usize) {
    init::ready();
    page::set_memory_limit(Some(bytes).filter(|&bytes| bytes > 0));
}

/// The soft limit on the memory that Pinfold holds, in bytes; 0 if there is none. A few loads.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_memory_limit() -> usize {
    init::ready();
    page::memory_limit().unwrap_or(0)
}

/// What `mallinfo2` tells, in bytes; the fields that mean nothing here are 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Mallinfo2 {
    /// Held from the system without huge blocks.
    pub arena: usize,
    /// 0.
    pub ordblks: usize,
    /// 0.
    pub smblks: usize,
    /// 0.
    pub hblks: usize,
    /// In huge blocks.
    pub hblkhd: usize,
    /// 0.
    pub usmblks: usize,
    /// 0.
    pub fsmblks: usize,
    /// In blocks in use, CPUs' caches included.
    pub uordblks: usize,
    /// Held and free.
    pub fordblks: usize,
    /// Could be given back by `malloc_trim`.
    pub keepcost: usize,
}

/// `mallinfo2`. Walks the partial slabs under their locks.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_mallinfo2() -> Mallinfo2 {
    let huge = page::huge_total();
    let held = page::held() as usize;
    let in_use = slab::kmalloc::in_use() + page::large_in_use();
    let free = (held - huge.min(held)).saturating_sub(in_use);
    Mallinfo2 {
        arena: held - huge.min(held),
        hblkhd: huge,
        uordblks: in_use,
        fordblks: free,
        keepcost: free,
        ..Mallinfo2::default()
    }
}

/// `malloc_info`: writes an XML description to `stream`; `options` must be 0, else EINVAL and −1.
///
/// # Safety
///
/// `stream` is an open C stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_malloc_info(options: c_int, stream: *mut libc::FILE) -> c_int {
    if options != 0 {
        set_errno(libc::EINVAL);
        return -1;
    }
    let info = pinfold_mallinfo2();
    // SAFETY: the caller's promise; the format takes four sizes.
    let written = unsafe {
        libc::fprintf(
            stream,
            c"<malloc version=\"pinfold-1\">\n<system type=\"current\" size=\"%zu\"/>\n<total type=\"inuse\" size=\"%zu\"/>\n<total type=\"rest\" size=\"%zu\"/>\n<total type=\"mmap\" size=\"%zu\"/>\n</malloc>\n".as_ptr(),
            info.arena + info.hblkhd,
            info.uordblks,
            info.fordblks,
            info.hblkhd,
        )
    };
    if written < 0 { -1 } else { 0 }
}
