//! What happens at a process's first allocation, and at each fork.

use super::{blocks, counted, gate, mode, sampling};
use crate::slab::kmalloc;
use crate::sys::keep_errno;
use crate::{fork, shepherd, show};

/// Starts the allocator at the first call. Later calls cost a load. Leaves errno unchanged.
///
/// While one thread starts the allocator, other threads use the slow paths. The slow paths work
/// once the first cache exists. They also serve the C library, which may allocate inside the calls
/// that this function makes.
#[inline]
pub fn ready() {
    if !mode::is_plain() {
        keep_errno(get_ready);
    }
}

#[cold]
fn get_ready() {
    if mode::is_started() {
        return;
    }
    // The other modules must not call `pthread_atfork`, which may allocate: this function calls it
    // below.
    fork::handle();
    // The first cache is made before the steps that may allocate.
    if !kmalloc::init() || !mode::begin_start() {
        return;
    }
    if kmalloc::any_checks() {
        // Reads the environment now, because during a later `free` another thread may be changing
        // it.
        blocks::checks_sized_free();
    }
    // The first region, and the memory for the CPU's sheaves, are made later, by the first block.
    if show::start_file(&counted::CALLS) {
        mode::count_calls();
    } else {
        show::start();
        if !gate::open() {
            mode::start_failed();
            return;
        }
    }
    // SAFETY: the handlers take no arguments, and their code stays loaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    shepherd::register(sampling::look);
    mode::started();
}

extern "C" fn before_fork() {
    fork::prepare();
    show::before_fork();
}

extern "C" fn in_parent() {
    fork::parent();
}

extern "C" fn in_child() {
    // These calls come first: until they return, the child's counts go to the parent's segment.
    if mode::counts_calls() {
        show::start_file_in_child(&counted::CALLS);
    }
    show::in_child();
    sampling::in_child();
    fork::child();
}
