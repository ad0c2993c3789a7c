//! `libpinfold.so`: the C malloc family under its own names (`pinfold-names`), and what a shared
//! library can do besides: count the program's threads, so that the shepherd has a thread while the
//! program has threads, and only then.
//!
//! * `threads` stands before the C library's `pthread_create`.
//! * `operators` exports C++'s `operator new` and `operator delete`.
//! * `policies` stands before the calls that give a thread a real-time policy.
#![no_std]

// Only for the panic handler that a shared library needs; no path that allocates calls into it.
extern crate std;

mod next;
mod operators;
mod policies;
mod threads;
mod unwind;

use pinfold_malloc::{background, settings};

/// Runs when the library is loaded, before the program's `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;

extern "C" fn loaded() {
    operators::open_fast_paths();
    settings::tell();
    background::library_loaded();
    threads::this_thread_begins();
    background::adjust();
}
