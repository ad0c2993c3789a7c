//! `libpinfold.so`: the C malloc family under the C library's names (`pinfold-names`), and a count
//! of the program's threads. The library starts and stops a thread of its own, the shepherd, by
//! this count (see `pinfold_malloc::background`).
//!
//! * `threads` replaces `pthread_create`, and calls the C library's.
//! * `operators` exports C++'s `operator new` and `operator delete`.
//! * `jemalloc` exports jemalloc's functions that allocate and free.
//! * `deepbind` replaces `dlopen`, to leave out `RTLD_DEEPBIND`.
//! * `copies` keeps this library idle in a program that contains another copy of Pinfold's malloc.
//! * `policies` replaces the functions that give a thread a real-time policy or a memory policy.
//! * `sandbox` replaces `prctl`, to notice that the program enters a sandbox.
//! * `unwind` loads the unwinder's library only when a function of it is called.
//! * `frames` ends walks of the stack once the program registers unwinding tables.
//! * `next` finds the C library's functions that the functions here replace.
#![no_std]

// Provides the panic handler that a shared library needs. No path that allocates calls into `std`.
extern crate std;

mod copies;
mod deepbind;
mod frames;
mod jemalloc;
mod next;
mod operators;
mod policies;
mod sandbox;
mod threads;
mod unwind;

use pinfold_malloc::{background, settings};

/// Runs when the library is loaded, before the program's `main`, and before this library's other
/// constructors.
#[used]
#[unsafe(link_section = ".init_array.00101")]
static LOADED: extern "C" fn() = loaded;

extern "C" fn loaded() {
    let replaced = operators::open_fast_paths();
    if !replaced.is_null() && copies::stay_idle_beside(replaced) {
        return;
    }
    settings::tell();
    background::library_loaded();
    threads::this_thread_begins();
    background::adjust();
}
