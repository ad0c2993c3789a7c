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

/// Declares a peer by its two functions, and by what a thread does before it uses them.
macro_rules! peer {
    ($(#[$about:meta])* $peer:ident, $malloc:path, $free:path $(, $enter:path)?) => {
        $(#[$about])*
        pub struct $peer;

        impl MallocApi for $peer {
            $(fn enter_thread() {
                $enter();
            })?

            #[inline(always)]
            fn malloc(size: usize) -> *mut c_void {
                // SAFETY: malloc takes any size, and this thread called `enter_thread`.
                unsafe { $malloc(size) }
            }

            #[inline(always)]
            unsafe fn free(block: *mut c_void) {
                // SAFETY: the caller promises that the block came from this `malloc` and is unused,
                // and this thread called `enter_thread`.
                unsafe { $free(block) };
            }
        }
    };
}

peer!(
    /// The system's C library.
    Glibc,
    __libc_malloc,
    __libc_free
);
peer!(
    /// mimalloc 3, without its secure mode.
    Mimalloc,
    libmimalloc_sys::mi_malloc,
    libmimalloc_sys::mi_free
);
peer!(
    /// jemalloc 5.3 with its default options.
    Jemalloc,
    tikv_jemalloc_sys::malloc,
    tikv_jemalloc_sys::free
);
peer!(
    /// snmalloc 0.7 without its checks.
    Snmalloc,
    snmalloc_sys::sn_malloc,
    snmalloc_sys::sn_free
);
peer!(
    /// rpmalloc 1.4 with its thread and global caches.
    Rpmalloc,
    rpmalloc_sys::rpmalloc,
    rpmalloc_sys::rpfree,
    enter_rpmalloc
);
peer!(
    /// Google's tcmalloc. Its caches are per thread or per CPU, depending on the process.
    Tcmalloc,
    TCMallocInternalMalloc,
    TCMallocInternalFree
);

/// Registers the thread with rpmalloc. The first call also initialises the process.
fn enter_rpmalloc() {
    // SAFETY: the function takes no argument and may be called repeatedly.
    let result = unsafe { rpmalloc_sys::rpmalloc_initialize() };
    assert_eq!(result, 0, "rpmalloc_initialize failed");
    // SAFETY: rpmalloc was initialised above. This call reads the thread's own state.
    if unsafe { rpmalloc_sys::rpmalloc_is_thread_initialized() } == 0 {
        // SAFETY: the check above shows that this thread is not yet registered.
        unsafe { rpmalloc_sys::rpmalloc_thread_initialize() };
    }
}

/// Returns whether tcmalloc keeps its caches per CPU. It decides at its first allocation.
pub fn tcmalloc_is_percpu() -> bool {
    // SAFETY: the block came from this allocator just now, and this is its only free.
    unsafe { Tcmalloc::free(Tcmalloc::malloc(8)) };
    // SAFETY: the function only reads a flag.
    unsafe { MallocExtension_Internal_GetPerCpuCachesActive() }
}
