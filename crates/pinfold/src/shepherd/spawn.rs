//! Starts a thread that the program does not notice.

use core::ffi::c_void;
use core::ptr::null_mut;
use pinfold_rseq::kernel::{self, SYNCHRONOUS};

pub use pinfold_rseq::kernel::Signals;

/// The function that a shepherd's thread runs, and the thread's attributes.
pub(super) struct Body {
    pub(super) run: fn(*mut c_void),
    pub(super) argument: *mut c_void,
    /// Bytes of stack. If the C library refuses this size as too small for the program's
    /// thread-local variables, the thread gets the default size.
    pub(super) stack: usize,
    /// Whether the thread gets the normal scheduling policy although the calling thread has a
    /// real-time one.
    pub(super) normal_policy: bool,
}

/// Returns whether `start` is the function in which threads of this module begin. A library that
/// replaces `pthread_create` uses this to tell the shepherds' threads from the program's.
#[doc(hidden)]
pub fn is_entry(start: *const c_void) -> bool {
    core::ptr::eq(start, entry as *const c_void)
}

extern "C" fn entry(body: *mut c_void) -> *mut c_void {
    // SAFETY: the caller of `spawn` keeps the body in place until it has joined this thread.
    let body = unsafe { &*body.cast::<Body>() };
    // The thread that started this one may have blocked these signals.
    let _ = kernel::block_signals(libc::SIG_UNBLOCK, SYNCHRONOUS);
    (body.run)(body.argument);
    null_mut()
}

/// Starts a thread with all signals blocked, except the [`SYNCHRONOUS`] ones. On failure, returns
/// the C library's error number.
///
/// Makes the system calls of `pthread_create`, two of `rt_sigprocmask` in this thread and one in
/// the new thread, and with `normal_policy` one of `sched_setscheduler`.
///
/// # Safety
///
/// The caller keeps `body` in place until it has joined the thread.
pub(super) unsafe fn spawn(body: *mut Body) -> Result<libc::pthread_t, i32> {
    // SAFETY: zeroes are valid values of these C types. Every pointer leads to a local of the type
    // that the function expects, or to `body`, which the caller promises to keep in place.
    unsafe {
        let mut thread = core::mem::zeroed();
        let mut attributes: libc::pthread_attr_t = core::mem::zeroed();
        let signals = Signals::block();
        libc::pthread_attr_init(&raw mut attributes);
        if (*body).normal_policy {
            let lowest: libc::sched_param = core::mem::zeroed();
            libc::pthread_attr_setinheritsched(&raw mut attributes, libc::PTHREAD_EXPLICIT_SCHED);
            libc::pthread_attr_setschedpolicy(&raw mut attributes, libc::SCHED_OTHER);
            libc::pthread_attr_setschedparam(&raw mut attributes, &raw const lowest);
        }
        let mut create = |attributes| {
            libc::pthread_create(&raw mut thread, attributes, entry, body.cast::<c_void>())
        };
        libc::pthread_attr_setstacksize(&raw mut attributes, (*body).stack);
        let mut error = create(&raw const attributes);
        if error == libc::EINVAL {
            libc::pthread_attr_setstacksize(&raw mut attributes, default_stack());
            error = create(&raw const attributes);
        }
        libc::pthread_attr_destroy(&raw mut attributes);
        drop(signals);
        if error == 0 { Ok(thread) } else { Err(error) }
    }
}

/// Returns the stack size that the C library gives a thread without attributes.
fn default_stack() -> usize {
    let mut size = 0;
    // SAFETY: zeroes are valid before `pthread_attr_init`, and `size` is writable.
    unsafe {
        let mut attributes: libc::pthread_attr_t = core::mem::zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        libc::pthread_attr_getstacksize(&raw const attributes, &raw mut size);
        libc::pthread_attr_destroy(&raw mut attributes);
    }
    size
}
