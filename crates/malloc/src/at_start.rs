//! Heap profiles and guarded blocks that the environment asks for.
//!
//! They start when the program or library that contains this crate is loaded. A thread may load the
//! unwinder's library then, but not in an allocation.

use crate::{guard, heap_profile};

/// Runs before the program's `main`, or when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

/// Runs when the process ends by `exit` or a return from `main`, or when the library is unloaded.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_END: extern "C" fn() = at_end;

extern "C" fn at_start() {
    heap_profile::start_as_asked();
    guard::start_as_asked();
}

extern "C" fn at_end() {
    heap_profile::write_as_asked();
}
