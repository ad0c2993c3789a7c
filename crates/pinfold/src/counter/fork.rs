//! Counters across `fork`.
//!
//! A fold that is under way in another thread would stay half done in the child for ever, and a gate closed. So the fork
//! waits for both, some microseconds. Critical sections need nothing: each has committed or has not.

use super::stripe;
use crate::percpu::{self, UNITS};
use crate::sys;
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::{Acquire, Release};

static STAGE: AtomicU8 = AtomicU8::new(NOT_YET);
const NOT_YET: u8 = 0;
const UNDER_WAY: u8 = 1;
const DONE: u8 = 2;

/// Says that the caller takes care of [`fork_prepare`], [`fork_parent`] and [`fork_child`], so that no counter will register
/// them: for an allocator, under which `pthread_atfork` could allocate.
#[doc(hidden)]
pub fn handle_fork() {
    STAGE.store(DONE, Release);
}

/// Has the C library call what a fork needs, once. False while another thread is at it, or the interrupted frame or the
/// allocator below is this one: then nothing may be placed yet that a fork could catch half done.
pub(crate) fn register() -> bool {
    match STAGE.compare_exchange(NOT_YET, UNDER_WAY, Acquire, Acquire) {
        Ok(_) => {}
        Err(stage) => return stage == DONE,
    }
    // SAFETY: the handlers are functions without arguments, which stay loaded. A failure (no memory) leaves a fork in the
    // middle of a fold unprotected, and nothing else.
    sys::keep_errno(|| unsafe {
        libc::pthread_atfork(Some(prepare), Some(parent), Some(child));
    });
    STAGE.store(DONE, Release);
    true
}

extern "C" fn prepare() {
    fork_prepare();
}

extern "C" fn parent() {
    fork_parent();
}

extern "C" fn child() {
    fork_child();
}

/// Call it in the parent before the fork: waits until no fold and no gate is under way, and keeps others off.
#[doc(hidden)]
pub fn fork_prepare() {
    stripe::fork_prepare();
    percpu::fork_prepare();
}

/// Call it in the parent after the fork.
#[doc(hidden)]
pub fn fork_parent() {
    // SAFETY: `fork_prepare` was called in this thread.
    unsafe { percpu::fork_done() };
    stripe::fork_done();
}

/// Call it in the child after the fork.
#[doc(hidden)]
pub fn fork_child() {
    UNITS.unlock_all_in_child(pinfold_rseq::possible());
    fork_parent();
}
