//! `libpinfold.so`: the C malloc family under its own names (`pinfold-names`), and what a shared library can do besides: notice
//! that the program makes threads, and then give the shepherd one.
#![no_std]

// Only for the panic handler that a shared library needs; no path that allocates calls into it.
extern crate std;

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Release};
use pinfold_malloc::background;
// For its names.
use pinfold_names as _;

/// Runs when the library is loaded, before the program's `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;

extern "C" fn loaded() {
    background::library_loaded();
}

type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    extern "C" fn(*mut c_void) -> *mut c_void,
    *mut c_void,
) -> c_int;

/// The C library's `pthread_create`; null when there is none behind this library.
fn next_create() -> *mut c_void {
    static NEXT: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let known = NEXT.load(Acquire);
    if !known.is_null() {
        return known;
    }
    // SAFETY: the name is a literal with NUL.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr()) };
    NEXT.store(found, Release);
    found
}

/// The C library's `pthread_create`. Afterwards the program has threads, and the shepherd may have one too.
///
/// # Safety
///
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    let next = next_create();
    if next.is_null() {
        return libc::EAGAIN;
    }
    // SAFETY: the C library's function of that name has this type.
    let next: Create = unsafe { core::mem::transmute::<*mut c_void, Create>(next) };
    // SAFETY: the caller's promise.
    let error = unsafe { next(thread, attributes, start, argument) };
    if error == 0 {
        background::program_made_thread();
    }
    error
}
