//! What happens at a process's first allocation, and at each fork.

use crate::{background, count, gate, heap};
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pinfold::fork;
use pinfold::slab::kmalloc;

const NOT_YET: u8 = 0;
const UNDER_WAY: u8 = 1;
const DONE: u8 = 2;

static STAGE: AtomicU8 = AtomicU8::new(NOT_YET);

/// Starts the allocator at the first call; later calls cost a load. Leaves errno unchanged.
///
/// While one thread starts it, other threads use the slow paths, which work once the first cache
/// exists. So do allocations of the C library inside the calls that the start makes.
#[inline]
pub(crate) fn ready() {
    if STAGE.load(Acquire) != DONE {
        heap::keep_errno(get_ready);
    }
}

#[cold]
fn get_ready() {
    // `pinfold` must not call `pthread_atfork`, which may allocate: this function calls it below.
    fork::handle();
    // The first cache precedes the steps that may allocate.
    if !kmalloc::init()
        || STAGE
            .compare_exchange(NOT_YET, UNDER_WAY, Acquire, Relaxed)
            .is_err()
    {
        return;
    }
    // The first block makes the first region, and the CPU's unit.
    if !count::start() && !gate::open() {
        STAGE.store(NOT_YET, Release);
        return;
    }
    // SAFETY: the handlers take no arguments, and their code stays loaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    STAGE.store(DONE, Release);
}

extern "C" fn before_fork() {
    fork::prepare();
}

extern "C" fn in_parent() {
    fork::parent();
}

extern "C" fn in_child() {
    // First: until this call the child's counts would go to the parent's segment.
    count::start_in_child();
    fork::child();
    background::fork_child();
}
