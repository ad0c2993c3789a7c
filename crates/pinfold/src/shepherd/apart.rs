//! Runs a function that may wait for the program's threads, in a thread of its own.
//!
//! The program's threads wait for a shepherd when they stop it. If the shepherd itself waited for
//! one of them, for example for the loader's lock, neither would ever go on. No thread waits for
//! the thread of this module.

use super::spawn::{Body, spawn};
use core::cell::UnsafeCell;
use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Release};

/// Bytes of stack: enough for the loader.
const STACK: usize = 128 << 10;

/// The function to run, a `fn()`.
static FUNCTION: AtomicPtr<()> = AtomicPtr::new(null_mut());

struct Shared(UnsafeCell<Body>);
// SAFETY: nothing writes the body.
unsafe impl Sync for Shared {}
static BODY: Shared = Shared(UnsafeCell::new(Body {
    run,
    argument: null_mut(),
    stack: STACK,
    normal_policy: false,
}));

/// Starts a thread that runs `f` and ends. Does not wait for it. Returns false if the system
/// refuses a thread.
///
/// The caller must not call this again before `f` has begun. Makes the system calls of
/// `pthread_create`.
pub fn run_apart(f: fn()) -> bool {
    // Release pairs with the acquire in `run`.
    FUNCTION.store(f as *mut (), Release);
    // SAFETY: the body is in a static, which stays where it is.
    let Ok(thread) = (unsafe { spawn(BODY.0.get()) }) else {
        return false;
    };
    // SAFETY: the thread was made above, and no thread joins it.
    unsafe { libc::pthread_detach(thread) };
    true
}

fn run(_: *mut c_void) {
    // SAFETY: `run_apart` has stored a function of this type.
    let f = unsafe { core::mem::transmute::<*mut (), fn()>(FUNCTION.load(Acquire)) };
    f();
}
