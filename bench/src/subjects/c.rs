//! Allocators by their C functions: `malloc(size)` and `free(pointer)`, neither inlined nor told the size at free.
//!
//! All are linked statically and called directly, under their own names: none replaces the process's `malloc`.

use super::Subject;
use anyhow::Result;
use core::ffi::c_void;
use core::marker::PhantomData;

/// A C allocator's two functions.
pub trait MallocApi: Send + Sync + 'static {
    /// Called by a thread before it uses the allocator, any number of times.
    fn enter_thread() {}

    /// `malloc`.
    fn malloc(size: usize) -> *mut c_void;

    /// `free`.
    ///
    /// # Safety
    ///
    /// The block came from this allocator's `malloc` and nobody uses it any more.
    unsafe fn free(block: *mut c_void);
}

/// Objects of one size from a C allocator.
pub struct CMalloc<A> {
    size: usize,
    api: PhantomData<A>,
}

impl<A: MallocApi> Subject for CMalloc<A> {
    fn new(size: usize) -> Result<Self> {
        Ok(CMalloc {
            size,
            api: PhantomData,
        })
    }

    fn enter_thread() {
        A::enter_thread();
    }

    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        A::malloc(self.size).cast()
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { A::free(object.cast()) };
    }
}

unsafe extern "C" {
    // glibc's own names: `malloc` may mean another allocator's in a workspace build.
    fn __libc_malloc(size: usize) -> *mut c_void;
    fn __libc_free(block: *mut c_void);
    // tcmalloc's functions as its build for Rust names them.
    fn TCMallocInternalMalloc(size: usize) -> *mut c_void;
    fn TCMallocInternalFree(block: *mut c_void);
    fn MallocExtension_Internal_GetPerCpuCachesActive() -> bool;
}

// Links tcmalloc, whose crate binds only the aligned functions.
use libtcmalloc_sys as _;

/// The system's.
pub struct Glibc;

impl MallocApi for Glibc {
    #[inline(always)]
    fn malloc(size: usize) -> *mut c_void {
        // SAFETY: malloc takes any size.
        unsafe { __libc_malloc(size) }
    }

    #[inline(always)]
    unsafe fn free(block: *mut c_void) {
        // SAFETY: the caller's promise.
        unsafe { __libc_free(block) };
    }
}

/// mimalloc 3, not its secure mode.
pub struct Mimalloc;

impl MallocApi for Mimalloc {
    #[inline(always)]
    fn malloc(size: usize) -> *mut c_void {
        // SAFETY: malloc takes any size.
        unsafe { libmimalloc_sys::mi_malloc(size) }
    }

    #[inline(always)]
    unsafe fn free(block: *mut c_void) {
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        unsafe { snmalloc_sys::sn_free(block) };
    }
}

/// rpmalloc 1.4 with its thread and global caches.
pub struct Rpmalloc;

impl MallocApi for Rpmalloc {
    /// rpmalloc wants to be told of each thread; the first call also initialises the process.
    fn enter_thread() {
        // SAFETY: takes no argument and may be called again.
        let result = unsafe { rpmalloc_sys::rpmalloc_initialize() };
        assert_eq!(result, 0, "rpmalloc cannot start");
        // SAFETY: initialised just above; reads the thread's own state.
        if unsafe { rpmalloc_sys::rpmalloc_is_thread_initialized() } == 0 {
            // SAFETY: once for this thread, as just checked.
            unsafe { rpmalloc_sys::rpmalloc_thread_initialize() };
        }
    }

    #[inline(always)]
    fn malloc(size: usize) -> *mut c_void {
        // SAFETY: `enter_thread` was called by this thread.
        unsafe { rpmalloc_sys::rpmalloc(size) }
    }

    #[inline(always)]
    unsafe fn free(block: *mut c_void) {
        // SAFETY: the caller's promise; `enter_thread` was called by this thread.
        unsafe { rpmalloc_sys::rpfree(block) };
    }
}

/// Google's tcmalloc, with caches per thread or per CPU as its process allows.
pub struct Tcmalloc;

impl MallocApi for Tcmalloc {
    #[inline(always)]
    fn malloc(size: usize) -> *mut c_void {
        // SAFETY: malloc takes any size.
        unsafe { TCMallocInternalMalloc(size) }
    }

    #[inline(always)]
    unsafe fn free(block: *mut c_void) {
        // SAFETY: the caller's promise.
        unsafe { TCMallocInternalFree(block) };
    }
}

/// Whether tcmalloc keeps its caches per CPU; it decides at its first allocation.
pub fn tcmalloc_is_percpu() -> bool {
    // SAFETY: a block of its own, given back at once.
    unsafe { Tcmalloc::free(Tcmalloc::malloc(8)) };
    // SAFETY: only reads a flag.
    unsafe { MallocExtension_Internal_GetPerCpuCachesActive() }
}

/// Pinfold as the C library offers it.
pub struct PinfoldMalloc;

impl MallocApi for PinfoldMalloc {
    #[inline(always)]
    fn malloc(size: usize) -> *mut c_void {
        pinfold_malloc::c::pinfold_malloc(size)
    }

    #[inline(always)]
    unsafe fn free(block: *mut c_void) {
        // SAFETY: the caller's promise.
        unsafe { pinfold_malloc::c::pinfold_free(block) };
    }
}
