//! Counters across `fork`.
//!
//! A fold that is under way in another thread would stay half done in the child for ever, and a gate closed. So the fork
//! waits for both, some microseconds. Critical sections need nothing: each has committed or has not.

use super::{gates, stripe};
use crate::percpu::{self, UNITS};
use crate::sys;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU8};

static STAGE: AtomicU8 = AtomicU8::new(NOT_YET);
const NOT_YET: u8 = 0;
const UNDER_WAY: u8 = 1;
/// The C library calls the functions below.
const REGISTERED: u8 = 2;
/// An allocator does.
const HANDLED: u8 = 3;

/// Whether the fork that is under way began as [`REGISTERED`].
static PREPARED: AtomicBool = AtomicBool::new(false);

/// Registers before `main`, or as the library is loaded: `pthread_atfork` takes locks, and the first add may be a signal handler's.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    register();
}

/// Says that the caller takes care of [`fork_prepare`], [`fork_parent`] and [`fork_child`], so that no counter will register
/// them: for an allocator, under which `pthread_atfork` could allocate.
#[doc(hidden)]
pub fn handle_fork() {
    STAGE.store(HANDLED, Release);
}

/// Has the C library call what a fork needs, once; that is done already but where a linker dropped [`AT_START`]. False while
/// another thread is at it, or the interrupted frame or the allocator below is this one: then nothing may be placed yet that
/// a fork could catch half done.
pub(crate) fn register() -> bool {
    if let Err(stage) = STAGE.compare_exchange(NOT_YET, UNDER_WAY, Acquire, Acquire) {
        return stage != UNDER_WAY;
    }
    // SAFETY: the handlers are functions without arguments, which stay loaded. A failure (no memory) leaves a fork in the
    // middle of a fold unprotected, and nothing else.
    sys::keep_errno(|| unsafe {
        libc::pthread_atfork(Some(prepare), Some(parent), Some(child));
    });
    // The allocator may have come in between: it stays in charge.
    let _ = STAGE.compare_exchange(UNDER_WAY, REGISTERED, AcqRel, Relaxed);
    true
}

/// Whether [`handle_fork`] was called: then no module of the library has the C library call it.
pub(crate) fn is_handled() -> bool {
    STAGE.load(Acquire) == HANDLED
}

extern "C" fn prepare() {
    if STAGE.load(Acquire) == REGISTERED {
        fork_prepare();
        PREPARED.store(true, Relaxed);
    }
}

extern "C" fn parent() {
    if PREPARED.swap(false, Relaxed) {
        fork_parent();
    }
}

extern "C" fn child() {
    if PREPARED.swap(false, Relaxed) {
        fork_child();
    }
}

/// Call it in the parent before the fork: waits until no fold and no gate is under way, and keeps others off.
#[doc(hidden)]
pub fn fork_prepare() {
    stripe::fork_prepare();
    percpu::fork_prepare();
    gates::fork_prepare();
}

/// Call it in the parent after the fork.
#[doc(hidden)]
pub fn fork_parent() {
    gates::fork_done();
    // SAFETY: `fork_prepare` was called in this thread.
    unsafe { percpu::fork_done() };
    stripe::fork_done();
}

/// Call it in the child after the fork.
#[doc(hidden)]
pub fn fork_child() {
    UNITS.unlock_all_in_child(pinfold_rseq::possible());
    gates::fork_child();
    fork_parent();
}
