//! What happens at a process's first allocation, and at each fork.

use crate::{count, gate, live, profiled, settings};
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use pinfold::internal::keep_errno;
use pinfold::slab::kmalloc;
use pinfold::{fork, shepherd};

const NOT_YET: u8 = 0;
const UNDER_WAY: u8 = 1;
const DONE: u8 = 2;
/// The allocator is started, and its slow paths have something else to do first: samples are taken.
/// One comparison with `DONE` tells both kinds of unusual calls from the others.
const UNUSUAL: u8 = 3;

static STAGE: AtomicU8 = AtomicU8::new(NOT_YET);

/// Starts the allocator at the first call. Later calls cost a load. Leaves errno unchanged.
///
/// While one thread starts the allocator, other threads use the slow paths. The slow paths work
/// once the first cache exists. They also serve the C library, which may allocate inside the calls
/// that this function makes.
#[inline]
pub(crate) fn ready() {
    if !is_plain() {
        keep_errno(get_ready);
    }
}

/// Returns whether the allocator is started, and no samples are taken. One load.
#[inline]
pub(crate) fn is_plain() -> bool {
    STAGE.load(Acquire) == DONE
}

/// Sets whether samples are taken. Does nothing before the allocator is started.
pub(crate) fn set_unusual(unusual: bool) {
    let (from, to) = if unusual {
        (DONE, UNUSUAL)
    } else {
        (UNUSUAL, DONE)
    };
    // SeqCst for `profiled::allocator_started`.
    let _ = STAGE.compare_exchange(from, to, SeqCst, SeqCst);
}

#[cold]
fn get_ready() {
    if STAGE.load(Relaxed) == UNUSUAL {
        return;
    }
    // `pinfold` must not call `pthread_atfork`, which may allocate: this function calls it below.
    fork::handle();
    // The first cache is made before the steps that may allocate.
    if !kmalloc::init()
        || STAGE
            .compare_exchange(NOT_YET, UNDER_WAY, Acquire, Relaxed)
            .is_err()
    {
        return;
    }
    if kmalloc::any_checks() {
        // Reads the environment now, and not in a `free` beside a thread that changes it.
        settings::checks_sized_free();
    }
    // The first region, and the memory for the CPU's sheaves, are made later, by the first block.
    if !count::start() {
        live::start();
        if !gate::open() {
            STAGE.store(NOT_YET, Release);
            return;
        }
    }
    // SAFETY: the handlers take no arguments, and their code stays loaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    shepherd::register(profiled::look);
    // SeqCst for `allocator_started`. Also pairs with the acquire in `is_plain`.
    STAGE.store(DONE, SeqCst);
    profiled::allocator_started();
}

extern "C" fn before_fork() {
    fork::prepare();
    live::before_fork();
}

extern "C" fn in_parent() {
    fork::parent();
}

extern "C" fn in_child() {
    // These calls come first: until they return, the child's counts go to the parent's segment.
    count::start_in_child();
    live::in_child();
    profiled::in_child();
    fork::child();
}
