//! The C malloc family under the C library's names, and C++'s operators. These definitions replace
//! the system's when a program is linked with `libpinfold.so` or `libpinfold.a`, or preloads
//! `libpinfold.so`.
//!
//! Each C name does the same as its prefixed counterpart in [`c`]. Names that begin with `__libc_`
//! are glibc's own: a program that defines `malloc` itself calls them to allocate.
#![no_std]

// Provides the panic handler that a library for C needs. No path that allocates calls into `std`.
extern crate std;

use core::ffi::{c_int, c_void};
use pinfold_malloc::c::{self, Mallinfo, Mallinfo2};
use pinfold_malloc::inlined;

#[doc(hidden)]
pub mod operators;
pub mod tokens;

/// The name in the note below, with its final NUL.
#[doc(hidden)]
pub const NOTE: &[u8; 8] = b"Pinfold\0";

// A note without content, in each file that contains this crate. By this note, a preloaded
// `libpinfold.so` knows that the program's own `malloc` is Pinfold's.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
core::arch::global_asm!(
    ".pushsection .note.pinfold, \"a\", @note",
    ".balign 4",
    ".long 8, 0, 1",
    ".asciz \"Pinfold\"",
    ".popsection",
);

macro_rules! own_names {
    ($($name:ident = $target:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        #[doc = concat!("Calls [`", stringify!($target), "`](c::", stringify!($target), ").")]
        ///
        /// # Safety
        ///
        /// The arguments meet the requirements of the called function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) $(-> $result)? {
            #[allow(unused_unsafe, reason = "some of the targets are safe")]
            // SAFETY: the caller promises arguments that the called function requires.
            unsafe { c::$target($($arg),*) }
        }
    )*};
}

own_names! {
    calloc = pinfold_calloc(count: usize, size: usize) -> *mut c_void;
    realloc = pinfold_realloc(block: *mut c_void, size: usize) -> *mut c_void;
    reallocarray = pinfold_reallocarray(block: *mut c_void, count: usize, size: usize) -> *mut c_void;
    free_sized = pinfold_free_sized(block: *mut c_void, size: usize);
    free_aligned_sized = pinfold_free_aligned_sized(block: *mut c_void, align: usize, size: usize);
    aligned_alloc = pinfold_aligned_alloc(align: usize, size: usize) -> *mut c_void;
    memalign = pinfold_memalign(align: usize, size: usize) -> *mut c_void;
    posix_memalign = pinfold_posix_memalign(to: *mut *mut c_void, align: usize, size: usize) -> c_int;
    valloc = pinfold_valloc(size: usize) -> *mut c_void;
    pvalloc = pinfold_pvalloc(size: usize) -> *mut c_void;
    malloc_usable_size = pinfold_malloc_usable_size(block: *mut c_void) -> usize;
    malloc_trim = pinfold_malloc_trim(pad: usize) -> c_int;
    mallinfo = pinfold_mallinfo() -> Mallinfo;
    mallinfo2 = pinfold_mallinfo2() -> Mallinfo2;
    malloc_stats = pinfold_malloc_stats();
    mallopt = pinfold_mallopt(parameter: c_int, value: c_int) -> c_int;
    malloc_info = pinfold_malloc_info(options: c_int, stream: *mut libc::FILE) -> c_int;
    cfree = pinfold_free(block: *mut c_void);
    __libc_malloc = pinfold_malloc(size: usize) -> *mut c_void;
    __libc_free = pinfold_free(block: *mut c_void);
    __libc_cfree = pinfold_free(block: *mut c_void);
    __libc_calloc = pinfold_calloc(count: usize, size: usize) -> *mut c_void;
    __libc_realloc = pinfold_realloc(block: *mut c_void, size: usize) -> *mut c_void;
    __libc_reallocarray =
        pinfold_reallocarray(block: *mut c_void, count: usize, size: usize) -> *mut c_void;
    __libc_memalign = pinfold_memalign(align: usize, size: usize) -> *mut c_void;
    __libc_valloc = pinfold_valloc(size: usize) -> *mut c_void;
    __libc_pvalloc = pinfold_pvalloc(size: usize) -> *mut c_void;
    __posix_memalign =
        pinfold_posix_memalign(to: *mut *mut c_void, align: usize, size: usize) -> c_int;
}

/// Allocates like [`pinfold_malloc`](c::pinfold_malloc), which is inlined here (`heap/entry.rs`).
#[unsafe(no_mangle)]
pub extern "C" fn malloc(size: usize) -> *mut c_void {
    inlined::alloc(size).cast()
}

/// Frees like [`pinfold_free`](c::pinfold_free), which is inlined here (`heap/entry.rs`).
///
/// # Safety
///
/// `block` is null or came from this library, was not freed, and is not used after the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(block: *mut c_void) {
    // SAFETY: the caller passes ownership of `block`, which is null or came from this library.
    unsafe { inlined::free(block.cast()) };
}
