//! Counts the program's threads.
//!
//! A thread counts from just before it is made until the C library runs the destructors of its
//! thread-specific data. The C library runs the destructors when the thread's function returns,
//! when the thread calls `pthread_exit`, and when the thread is cancelled. Each counted thread has
//! a value under one key of this library. The key's destructor takes the thread out of the count.
//! The thread that loads the library is counted too.
//!
//! This module does not see threads that `thrd_create`, the C library itself (for timers and
//! asynchronous I/O), or a bare system call makes. It does not count such threads.

use crate::copies;
use crate::next::Next;
use core::ffi::{c_int, c_void};
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{AcqRel, Acquire};
use pinfold_malloc::{background, c, outside_scopes};

/// The function of a thread. `pthread_exit` may unwind out of it.
type Start = extern "C-unwind" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    Start,
    *mut c_void,
) -> c_int;

/// The key, plus one. 0 before the key is made, and [`NONE`] if the C library has no key left.
static KEY: AtomicU32 = AtomicU32::new(0);
const NONE: u32 = u32::MAX;

fn key() -> Option<libc::pthread_key_t> {
    // Acquire pairs with the release of the compare-exchange below: the thread that stored the key
    // had made it before.
    let known = KEY.load(Acquire);
    if known != 0 {
        return (known != NONE).then(|| known - 1);
    }
    let mut fresh = 0;
    // SAFETY: `fresh` is writable, and the destructor stays loaded.
    let error = unsafe { libc::pthread_key_create(&raw mut fresh, Some(this_thread_ends)) };
    let mine = if error == 0 { fresh + 1 } else { NONE };
    let stored = KEY.compare_exchange(0, mine, AcqRel, Acquire);
    // Another thread may have stored its key already.
    if stored.is_err() && error == 0 {
        // SAFETY: this thread made the key above, and no thread has a value under it.
        unsafe { libc::pthread_key_delete(fresh) };
    }
    key()
}

/// Has the calling thread leave the count when it ends. The caller counts the thread. Returns false
/// if the C library has no key left, or no memory for the value.
fn ends_later() -> bool {
    // SAFETY: `key` returned a key that is never deleted, and no code reads through the value.
    key().is_some_and(|key| unsafe { libc::pthread_setspecific(key, KEY.as_ptr().cast()) } == 0)
}

/// Counts the calling thread until it ends.
pub(crate) fn this_thread_begins() {
    if ends_later() {
        background::thread_begins();
    }
}

extern "C" fn this_thread_ends(_: *mut c_void) {
    background::thread_ended();
}

/// The function and the argument of a new thread.
struct Beginning {
    start: Start,
    argument: *mut c_void,
}

/// Runs first in each counted thread, and calls the thread's own function.
extern "C-unwind" fn begin(beginning: *mut c_void) -> *mut c_void {
    // SAFETY: `pthread_create` wrote a `Beginning` there for this thread alone.
    let Beginning { start, argument } = unsafe { beginning.cast::<Beginning>().read() };
    // SAFETY: `pthread_create` allocated the block for this thread, and this thread has read the
    // content.
    unsafe { c::pinfold_free(beginning) };
    if !ends_later() {
        // This thread's end would be missed, and the shepherd would never stop. So the thread
        // leaves the count now.
        background::thread_ended();
    }
    start(argument)
}

/// Makes a thread by the C library's `pthread_create`, and counts the thread. Also returns `EAGAIN`
/// if there is no memory for a few words of this library's.
///
/// # Safety
///
/// The arguments are valid for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    // The C library keeps memory that it allocates here, and uses it for later threads. So it must
    // not come from the heap of a scope.
    // SAFETY: the caller passes on what it promises.
    outside_scopes(|| unsafe { create(thread, attributes, start, argument) })
}

/// # Safety
///
/// The same as for [`pthread_create`].
unsafe fn create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    static NEXT: Next = Next::new(c"pthread_create");
    let next = NEXT.address();
    if next.is_null() {
        return libc::EAGAIN;
    }
    // SAFETY: the C library's function of that name has this type.
    let next = unsafe { core::mem::transmute::<*mut c_void, Create>(next) };
    if copies::is_idle() || background::is_shepherd(start as *const c_void) {
        // SAFETY: the caller's arguments are valid for the C library's function.
        return unsafe { next(thread, attributes, start, argument) };
    }
    // SAFETY: the caller's attributes are null or valid.
    unsafe { note_policy(attributes) };
    let beginning = c::pinfold_malloc(size_of::<Beginning>()).cast::<Beginning>();
    if beginning.is_null() {
        return libc::EAGAIN;
    }
    // SAFETY: the block was just allocated, with the size of a `Beginning` and malloc's alignment.
    unsafe { beginning.write(Beginning { start, argument }) };
    background::thread_begins();
    // SAFETY: the caller's thread and attributes are valid. `begin` takes `beginning`, and only the
    // last of these calls can make a thread.
    let error =
        background::create_thread(|| unsafe { next(thread, attributes, begin, beginning.cast()) });
    if error != 0 {
        // SAFETY: no thread was made, so this thread still owns the block.
        unsafe { c::pinfold_free(beginning.cast()) };
        background::thread_ended();
        return error;
    }
    background::adjust();
    0
}

/// Notes the policy that `attributes` give a thread, if they give one.
///
/// # Safety
///
/// `attributes` is null or valid.
unsafe fn note_policy(attributes: *const libc::pthread_attr_t) {
    if attributes.is_null() {
        return;
    }
    let (mut inherits, mut policy) = (libc::PTHREAD_INHERIT_SCHED, 0);
    // SAFETY: the attributes are valid, and both integers writable.
    unsafe {
        libc::pthread_attr_getinheritsched(attributes, &raw mut inherits);
        libc::pthread_attr_getschedpolicy(attributes, &raw mut policy);
    }
    if inherits == libc::PTHREAD_EXPLICIT_SCHED {
        background::note_policy(policy);
    }
}
