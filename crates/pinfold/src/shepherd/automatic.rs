//! The thread that a preloaded Pinfold starts by itself once the program has threads.
//!
//! The program did not ask for this thread, and must not notice the thread:
//!
//! * The thread makes only the system calls that malloc makes, because the program may have closed
//!   a sandbox that ends the process for any other: `futex`, `madvise`, and the clock.
//! * Its start makes only the system calls of `pthread_create`.
//! * It blocks all signals that others send, and has no name.
//! * The allocator stops the thread as soon as the program has only one thread, and waits until the
//!   automatic thread is gone.
//! * On a machine with isolated CPUs, it first moves to the other CPUs.

use super::spawn::{Body, spawn};
use super::{PASSING, Reach, thread_begins, thread_ended, tick};
use crate::sys;
use crate::topology::{CpuSet, set_affinity};
use core::cell::UnsafeCell;
use core::ptr::null_mut;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{Acquire, Release};

/// Bytes of stack: a tick uses at most 4 KiB; the rest is for a handler of a signal that the thread
/// causes, and for the program's thread-local variables. So small that the C library does not give
/// the stack's memory back when the thread ends: that is a system call with all signals blocked,
/// which a filter that traps the call answers by ending the process.
const STACK: usize = if libc::PTHREAD_STACK_MIN > 20 << 10 {
    libc::PTHREAD_STACK_MIN
} else {
    20 << 10
};

/// Whether the thread goes on ticking.
static STATE: AtomicU32 = AtomicU32::new(STOP);
const STOP: u32 = 0;
const RUN: u32 = 1;

struct Shared(UnsafeCell<Body>);
// SAFETY: only `Automatic::start` writes the body, while there is no thread.
unsafe impl Sync for Shared {}
static BODY: Shared = Shared(UnsafeCell::new(Body {
    run,
    argument: null_mut(),
    stack: STACK,
    normal_policy: false,
}));

/// The automatic thread, while it runs.
#[derive(Debug)]
pub struct Automatic {
    thread: libc::pthread_t,
}

impl Automatic {
    /// Starts the thread. Returns `None` if the system refuses a thread. With `cpus`, the thread
    /// runs on these CPUs only.
    ///
    /// # Safety
    ///
    /// No other automatic thread runs in this process.
    pub unsafe fn start(cpus: Option<&'static CpuSet>) -> Option<Automatic> {
        let argument = cpus.map_or(null_mut(), |cpus| core::ptr::from_ref(cpus).cast_mut());
        // SAFETY: no thread reads the body: the caller says that none runs.
        unsafe { (*BODY.0.get()).argument = argument.cast() };
        STATE.store(RUN, Release);
        // The slow paths leave the ticks to the thread from here on.
        thread_begins();
        // SAFETY: the body is a static.
        match unsafe { spawn(BODY.0.get()) } {
            Ok(thread) => Some(Automatic { thread }),
            Err(_) => {
                thread_ended();
                None
            }
        }
    }

    /// Stops the thread and waits until it is gone: at most as long as a tick takes. Not in a child
    /// after `fork`, which does not have the thread.
    pub fn stop(self) {
        // Release pairs with the acquire in `run`.
        STATE.store(STOP, Release);
        sys::wake(&STATE);
        // SAFETY: `start` made the thread, and it is joined once.
        unsafe { libc::pthread_join(self.thread, null_mut()) };
        thread_ended();
    }
}

fn run(cpus: *mut libc::c_void) {
    // SAFETY: null, or the set given to `start`, which stays.
    if let Some(cpus) = unsafe { cpus.cast::<CpuSet>().as_ref() } {
        set_affinity(cpus);
    }
    // Acquire pairs with the release in `stop`.
    while STATE.load(Acquire) == RUN {
        tick(&|_| true, Reach::ThisCpu);
        sys::wait_for_change(&STATE, RUN, PASSING);
    }
}
