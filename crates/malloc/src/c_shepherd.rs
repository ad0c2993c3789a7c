//! The C API of the shepherd: what `pinfold.h` declares of it.

use crate::c_counter::{boxed, unboxed};
use crate::heap::set_errno;
use core::ffi::{c_int, c_uint};
use core::ptr::null_mut;
use core::time::Duration;
use pinfold::counter::{Counters, PercpuCounter};
use pinfold::shepherd::{Running, Shepherd, ShepherdError};

const SPARE_ISOLATED: c_uint = 1;

/// A shepherd, and its thread while it has one.
pub struct CShepherd {
    shepherd: Shepherd,
    running: Option<Running>,
}

fn fail(error: ShepherdError) -> c_int {
    set_errno(match error {
        ShepherdError::OutOfMemory => libc::ENOMEM,
        ShepherdError::Thread { errno } => errno,
        _ => libc::EINVAL,
    });
    -1
}

fn answer(result: Result<(), ShepherdError>) -> c_int {
    result.map_or_else(fail, |()| 0)
}

/// A shepherd that looks every `interval_ms` milliseconds, 0 for the default of a second; null with EINVAL for flags that do not
/// exist or an interval above a day.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_shepherd_create(interval_ms: u64, flags: c_uint) -> *mut CShepherd {
    if flags & !SPARE_ISOLATED != 0 || interval_ms > 86_400_000 {
        set_errno(libc::EINVAL);
        return null_mut();
    }
    let mut shepherd = Shepherd::new();
    if interval_ms != 0 {
        shepherd = shepherd.interval(Duration::from_millis(interval_ms));
    }
    if flags & SPARE_ISOLATED != 0 {
        shepherd = shepherd.leave_isolated_alone();
    }
    boxed(CShepherd {
        shepherd,
        running: None,
    })
}

/// Has `counter` folded from now on; 0, or −1 with ENOMEM.
///
/// # Safety
///
/// Here and below: what is given was made and not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_watch(
    this: *const CShepherd,
    counter: *const PercpuCounter,
) -> c_int {
    // SAFETY: the caller's promise.
    answer(unsafe { (*this).shepherd.watch(&*counter) })
}

/// As [`pinfold_shepherd_watch`], for many.
///
/// # Safety
///
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_watch_many(
    this: *const CShepherd,
    counters: *const Counters,
) -> c_int {
    // SAFETY: the caller's promise.
    answer(unsafe { (*this).shepherd.watch(&*counters) })
}

/// Has `counter` folded no more.
///
/// # Safety
///
/// As for [`pinfold_shepherd_watch`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_unwatch(
    this: *const CShepherd,
    counter: *const PercpuCounter,
) {
    // SAFETY: the caller's promise.
    unsafe { (*this).shepherd.unwatch(&*counter) };
}

/// Folds now; how many shards had moved.
///
/// # Safety
///
/// As for [`pinfold_shepherd_watch`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_tick(this: *const CShepherd) -> usize {
    // SAFETY: the caller's promise.
    unsafe { (*this).shepherd.tick() }
}

/// Starts the thread if it does not run; 0, or −1 with errno.
///
/// # Safety
///
/// As for [`pinfold_shepherd_watch`]; one thread at a time starts, stops or destroys a shepherd.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_start(this: *mut CShepherd) -> c_int {
    // SAFETY: the caller's promise.
    let this = unsafe { &mut *this };
    if this.running.is_some() {
        return 0;
    }
    match this.shepherd.clone().start() {
        Ok(running) => {
            this.running = Some(running);
            0
        }
        Err(error) => fail(error),
    }
}

/// Stops the thread if it runs, and waits for it.
///
/// # Safety
///
/// As for [`pinfold_shepherd_start`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_stop(this: *mut CShepherd) {
    // SAFETY: the caller's promise.
    unsafe { (*this).running = None };
}

/// Stops and ends a shepherd; null is none. What it watched stays watched by others.
///
/// # Safety
///
/// As for [`pinfold_shepherd_start`]; nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_destroy(this: *mut CShepherd) {
    // SAFETY: the caller's promise.
    unsafe { unboxed(this) };
}
