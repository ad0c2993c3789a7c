//! The sanitizers of the compilers: whether one is in the process, and what ThreadSanitizer learns.
//!
//! A sanitizer's library is in the program, or is loaded before the program starts. So its
//! functions are weak symbols here: null where there is no sanitizer.
//!
//! ThreadSanitizer reports two accesses as a race if it knows no order between them. It does not
//! see how a cache passes an object from the thread that frees it to the thread that allocates it.
//! So object caches tell it: [`release`] before an object is free, [`acquire`] once it is
//! allocated.

use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::Relaxed;

type Function = unsafe extern "C" fn(*mut u8);

/// The addresses of functions that the libraries of sanitizers define, or null.
#[repr(C)]
struct Functions {
    inits: [*const (); 4],
    acquire: Option<Function>,
    release: Option<Function>,
    /// The C library's variable, which is not 0 while the process has one thread.
    single_threaded: Option<&'static AtomicU8>,
}

core::arch::global_asm!(
    ".weak __asan_init",
    ".weak __hwasan_init",
    ".weak __msan_init",
    ".weak __tsan_init",
    ".weak __tsan_acquire",
    ".weak __tsan_release",
    ".weak __libc_single_threaded",
    ".pushsection .data.rel.ro.pinfold_sanitizer, \"aw\"",
    ".balign 8",
    ".globl pinfold_sanitizer",
    ".hidden pinfold_sanitizer",
    "pinfold_sanitizer:",
    ".quad __asan_init, __hwasan_init, __msan_init, __tsan_init",
    ".quad __tsan_acquire, __tsan_release, __libc_single_threaded",
    ".popsection",
);

unsafe extern "C" {
    static pinfold_sanitizer: Functions;
}

fn functions() -> &'static Functions {
    // SAFETY: the table above has the fields of `Functions` in the same order. The loader fills it
    // in before code of this library runs.
    unsafe { &pinfold_sanitizer }
}

/// Returns whether a sanitizer that keeps ranges of addresses for itself is in this process.
pub(crate) fn is_there() -> bool {
    functions().inits.iter().any(|init| !init.is_null())
}

/// Returns whether ThreadSanitizer is in this process.
pub(crate) fn orders_accesses() -> bool {
    functions().acquire.is_some()
}

/// Returns whether the process has several threads. While it has one, ThreadSanitizer's functions
/// may not be ready. They are not needed then: the sanitizer knows that what a thread did before it
/// started another one comes before all that the other one does.
fn has_threads() -> bool {
    let single = functions().single_threaded;
    // Relaxed is enough: the thread that made another one, and the new thread, see the change.
    single.is_none_or(|single| single.load(Relaxed) == 0)
}

/// Stands for all free memory: memory of a released object may become part of another object.
static MEMORY: AtomicU8 = AtomicU8::new(0);

/// Tells ThreadSanitizer that what other threads did before they released `object` comes before
/// what this thread does from now on.
pub(crate) fn acquire(object: *mut u8) {
    tell(functions().acquire, object);
}

/// Tells ThreadSanitizer that what other threads did before they released any object comes before
/// what this thread does from now on. For memory that was just taken.
pub(crate) fn took_memory() {
    acquire(MEMORY.as_ptr());
}

/// Tells ThreadSanitizer that what this thread did until now comes before what a thread does that
/// acquires `object`, or takes memory, later.
pub(crate) fn release(object: *mut u8) {
    tell(functions().release, object);
    tell(functions().release, MEMORY.as_ptr());
}

fn tell(function: Option<Function>, address: *mut u8) {
    if let Some(function) = function
        && has_threads()
    {
        call(function, address);
    }
}

#[cold]
#[inline(never)]
fn call(function: Function, address: *mut u8) {
    // SAFETY: both functions take any address, and do not read the memory there.
    unsafe { function(address) };
}
