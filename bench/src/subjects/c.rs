//! The peers, called through their C functions `malloc(size)` and `free(pointer)`.
//!
//! All allocators are linked statically and called under their own names. None replaces the
//! process's `malloc`.

use core::ffi::c_void;
use pinfold_lab::MallocApi;

unsafe extern "C" {
    // glibc's own names, because another crate of a workspace build may define `malloc`.
    fn __libc_malloc(size: usize) -> *mut c_void;
    fn __libc_free(block: *mut c_void);
    // The names of tcmalloc's functions in its build for Rust.
    fn TCMallocInternalMalloc(size: usize) -> *mut c_void;
    fn TCMallocInternalFree(block: *mut c_void);
    fn MallocExtension_Internal_GetPerCpuCachesActive() -> bool;
}

// Links tcmalloc, whose crate binds only the aligned functions.
use libtcmalloc_sys as _;

/// The system's C library.
pub struct Glibc;

impl MallocApi for Glibc {
    #[inline(always)]
    fn malloc(size: usize) -> *mut c_void {
        // SAFETY: malloc takes any size.
        unsafe { __libc_malloc(size) }
    }

    #[inline(always)]
    unsafe fn free(block: *mut c_void) {
        // SAFETY: the caller promises that the block came from `__libc_malloc` and is unused.
        unsafe { __libc_free(block) };
    }
}

/// mimalloc 3, without its secure mode.
pub struct Mimalloc;

impl MallocApi for Mimalloc {
    #[inline(always)]
    fn malloc(size: usize) -> *mut c_void {
        // SAFETY: malloc takes any size.
        unsafe { libmimalloc_sys::mi_malloc(size) }
    }

    #[inline(always)]
    unsafe fn free(block: *mut c_void) {
        // SAFETY: the caller promises that the block came from `mi_malloc` and is unused.
        unsafe { libmimalloc_sys::mi_free(block) };
    }
}

/// jemalloc 5.3 with its default options.
pub struct Jemalloc;

impl MallocApi for Jemalloc {
    #[inline(always)]
    fn malloc(size: usize) -> *mut c_void {
        // SAFETY: malloc takes any size.
        unsafe { tikv_jemalloc_sys::malloc(size) }
    }

    #[inline(always)]
    unsafe fn free(block: *mut c_void) {
        // SAFETY: the caller promises that the block came from this `malloc` and is unused.
        unsafe { tikv_jemalloc_sys::free(block) };
    }
}

/// snmalloc 0.7 without its checks.
pub struct Snmalloc;

impl MallocApi for Snmalloc {
    #[inline(always)]
    fn malloc(size: usize) -> *mut c_void {
        // SAFETY: malloc takes any size.
        unsafe { snmalloc_sys::sn_malloc(size) }
    }

    #[inline(always)]
    unsafe fn free(block: *mut c_void) {
        // SAFETY: the caller promises that the block came from `sn_malloc` and is unused.
        unsafe { snmalloc_sys::sn_free(block) };
    }
}

/// rpmalloc 1.4 with its thread and global caches.
pub struct Rpmalloc;

impl MallocApi for Rpmalloc {
    /// Registers the thread with rpmalloc. The first call also initialises the process.
    fn enter_thread() {
        // SAFETY: the function takes no argument and may be called repeatedly.
        let result = unsafe { rpmalloc_sys::rpmalloc_initialize() };
        assert_eq!(result, 0, "rpmalloc_initialize failed");
        // SAFETY: rpmalloc was initialised above. This call reads the thread's own state.
        if unsafe { rpmalloc_sys::rpmalloc_is_thread_initialized() } == 0 {
            // SAFETY: the check above shows that this thread is not yet registered.
            unsafe { rpmalloc_sys::rpmalloc_thread_initialize() };
        }
    }

    #[inline(always)]
    fn malloc(size: usize) -> *mut c_void {
        // SAFETY: this thread called `enter_thread`.
        unsafe { rpmalloc_sys::rpmalloc(size) }
    }

    #[inline(always)]
    unsafe fn free(block: *mut c_void) {
        // SAFETY: the caller promises that the block came from `rpmalloc` and is unused, and this
        // thread called `enter_thread`.
        unsafe { rpmalloc_sys::rpfree(block) };
    }
}

/// Google's tcmalloc. Its caches are per thread or per CPU, depending on the process.
pub struct Tcmalloc;

impl MallocApi for Tcmalloc {
    #[inline(always)]
    fn malloc(size: usize) -> *mut c_void {
        // SAFETY: malloc takes any size.
        unsafe { TCMallocInternalMalloc(size) }
    }

    #[inline(always)]
    unsafe fn free(block: *mut c_void) {
        // SAFETY: the caller promises that the block came from `TCMallocInternalMalloc` and is
        // unused.
        unsafe { TCMallocInternalFree(block) };
    }
}

/// Returns whether tcmalloc keeps its caches per CPU. It decides at its first allocation.
pub fn tcmalloc_is_percpu() -> bool {
    // SAFETY: the block came from this allocator just now, and this is its only free.
    unsafe { Tcmalloc::free(Tcmalloc::malloc(8)) };
    // SAFETY: the function only reads a flag.
    unsafe { MallocExtension_Internal_GetPerCpuCachesActive() }
}
