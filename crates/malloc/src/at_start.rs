//! What happens when the program or library that contains this crate is loaded.
//!
//! From then on, requests of other processes are served. Heap profiles and guarded blocks that the
//! environment asks for start. A thread may load the unwinder's library at this time, but not
//! during an allocation.

use crate::{control, guard, heap_dumps, heap_profile};
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;
use pinfold::internal::show;

/// Whether the program allocates by another copy of this crate.
static IS_IDLE: AtomicBool = AtomicBool::new(false);

/// Notes that the program allocates by another copy of this crate, which acts on the environment.
/// Has an effect only before this file's constructor runs. One store.
pub fn leave_to_another_copy() {
    // Relaxed is enough: the loader runs the constructors in one thread.
    IS_IDLE.store(true, Relaxed);
}

/// Runs before the program's `main`, or when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

/// Runs when the process ends by `exit` or a return from `main`, or when the library is unloaded.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_END: extern "C" fn() = at_end;

extern "C" fn at_start() {
    show::serve_by(&control::SERVER);
    if !IS_IDLE.load(Relaxed) {
        heap_profile::start_as_asked();
        heap_dumps::start_as_asked();
        guard::start_as_asked();
    }
}

extern "C" fn at_end() {
    heap_profile::write_as_asked();
}
