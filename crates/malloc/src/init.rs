//! What happens once: at the first allocation of a process, and at each fork.

use crate::{background, count, heap};
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pinfold::fork;
use pinfold::slab::kmalloc;

const NOT_YET: u8 = 0;
const UNDER_WAY: u8 = 1;
const DONE: u8 = 2;

static STAGE: AtomicU8 = AtomicU8::new(NOT_YET);

/// Makes the caches, on the first call; later calls cost a load. Keeps errno. While one thread is
/// at it, others, and whatever the C library allocates on its way, use the slow paths, which work
/// as soon as the caches are there.
#[inline]
pub(crate) fn ready() {
    if STAGE.load(Acquire) != DONE {
        heap::keep_errno(get_ready);
    }
}

#[cold]
fn get_ready() {
    // Nothing on the way of an allocation may have the C library allocate.
    fork::handle();
    // The caches come first: what follows may allocate.
    if !kmalloc::init()
        || STAGE
            .compare_exchange(NOT_YET, UNDER_WAY, Acquire, Relaxed)
            .is_err()
    {
        return;
    }
    let counting = count::start();
    // A first block makes the first region.
    let block = kmalloc::alloc(1);
    if block.is_null() {
        STAGE.store(NOT_YET, Release);
        return;
    }
    // SAFETY: just allocated.
    unsafe { kmalloc::free_class(block, 0) };
    // SAFETY: the handlers are functions without arguments, which stay loaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    if !counting {
        heap::open_fast_paths();
    }
    STAGE.store(DONE, Release);
}

extern "C" fn before_fork() {
    fork::prepare();
}

extern "C" fn in_parent() {
    fork::parent();
}

extern "C" fn in_child() {
    // First: until then the counts are the parent's.
    count::start_in_child();
    fork::child();
    background::fork_child();
}
