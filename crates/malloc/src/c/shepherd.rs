//! The C API of the shepherd.

use super::support::{answer, boxed, failed, null_with, unboxed};
use core::ffi::{CStr, c_char, c_int, c_uint};
use core::time::Duration;
use pinfold::counter::{Counters, PerCpuCounter};
use pinfold::shepherd::{self, Running, Shepherd};
use pinfold::topology::CpuSet;

const FOLD_ISOLATED: c_uint = 2;

/// A shepherd behind a C handle, and its thread while the thread runs.
pub struct CShepherd {
    shepherd: Shepherd,
    running: Option<Running>,
}

/// Creates a shepherd that ticks every `interval_ms` milliseconds. 0 means every second. Returns
/// null with EINVAL for an unknown flag or an interval above a day, or with ENOMEM. Starts no
/// thread.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_shepherd_create(interval_ms: u64, flags: c_uint) -> *mut CShepherd {
    if flags & !FOLD_ISOLATED != 0 || interval_ms > 86_400_000 {
        return null_with(libc::EINVAL);
    }
    let mut shepherd = Shepherd::new();
    if interval_ms != 0 {
        shepherd = shepherd.interval(Duration::from_millis(interval_ms));
    }
    if flags & FOLD_ISOLATED != 0 {
        shepherd = shepherd.fold_isolated();
    }
    boxed(CShepherd {
        shepherd,
        running: None,
    })
}

/// Has the shepherd's thread run on the CPUs of a list, such as `0-3,8`, from its next start on.
/// With null, it runs on all CPUs that the starting thread may use. Returns 0, or −1 with EINVAL
/// for text that is not such a list.
///
/// # Safety
///
/// `this` is a shepherd of this API that has not been destroyed, and no other thread uses it during
/// the call. `cpus` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_set_cpus(
    this: *mut CShepherd,
    cpus: *const c_char,
) -> c_int {
    let cpus = match cpus.is_null() {
        true => None,
        false => {
            // SAFETY: `cpus` is not null, so the caller promises a string.
            let text = unsafe { CStr::from_ptr(cpus) }.to_str().ok();
            let set = text.and_then(|text| text.parse::<CpuSet>().ok());
            match set.filter(|set| !set.is_empty()) {
                Some(set) => Some(set),
                None => return failed(libc::EINVAL),
            }
        }
    };
    // SAFETY: the caller promises a shepherd that has not been destroyed and that no other thread
    // uses.
    let shepherd = unsafe { &mut (*this).shepherd };
    *shepherd = shepherd.clone().on_or_all(cpus);
    0
}

/// Sets the interval of the shepherd to `interval_ms` milliseconds. 0 means every second. A thread
/// that sleeps wakes up and follows. Returns 0, or −1 with EINVAL for an interval above a day.
///
/// # Safety
///
/// `this` is a shepherd of this API that has not been destroyed. No other thread uses it during the
/// call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_set_interval(
    this: *mut CShepherd,
    interval_ms: u64,
) -> c_int {
    if interval_ms > 86_400_000 {
        return failed(libc::EINVAL);
    }
    let milliseconds = if interval_ms == 0 { 1000 } else { interval_ms };
    let interval = Duration::from_millis(milliseconds);
    // SAFETY: the caller promises a shepherd that has not been destroyed and that no other thread
    // uses.
    let this = unsafe { &mut *this };
    this.shepherd = this.shepherd.clone().interval(interval);
    answer(
        this.running
            .as_ref()
            .map_or(Ok(()), |running| running.set_interval(interval)),
    )
}

/// Watches a counter: from now on, every shepherd of the process adds what CPUs have counted to the
/// counter's total. Returns 0, or −1 with ENOMEM.
///
/// # Safety
///
/// `counter` is a counter that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_watch(counter: *const PerCpuCounter) -> c_int {
    // SAFETY: the caller promises a counter that has not been destroyed.
    answer(shepherd::watch(unsafe { &*counter }))
}

/// Watches many counters, like [`pinfold_shepherd_watch`].
///
/// # Safety
///
/// `counters` have not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_watch_many(counters: *const Counters) -> c_int {
    // SAFETY: the caller promises counters that have not been destroyed.
    answer(shepherd::watch(unsafe { &*counters }))
}

/// Stops watching a counter, for every shepherd of the process.
///
/// # Safety
///
/// `counter` is a counter that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_unwatch(counter: *const PerCpuCounter) {
    // SAFETY: the caller promises a counter that has not been destroyed.
    shepherd::unwatch(unsafe { &*counter });
}

/// Ticks: folds the watched counters, and has caches give idle memory back. Returns how many
/// shards, the parts of a counter that belong to one CPU, had changed.
///
/// # Safety
///
/// `this` is a shepherd of this API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_tick(this: *const CShepherd) -> usize {
    // SAFETY: the caller promises a shepherd that has not been destroyed.
    unsafe { (*this).shepherd.tick() }
}

/// Starts the thread if it does not run. Returns 0, or −1 with errno.
///
/// # Safety
///
/// `this` is a shepherd of this API that has not been destroyed. No other thread uses it during the
/// call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_start(this: *mut CShepherd) -> c_int {
    // SAFETY: the caller promises a shepherd that has not been destroyed and that no other thread
    // uses.
    let this = unsafe { &mut *this };
    if this.running.is_some() {
        return 0;
    }
    let started = this.shepherd.clone().start();
    answer(started.map(|running| this.running = Some(running)))
}

/// Stops the thread if it runs, and waits for its end.
///
/// # Safety
///
/// `this` is a shepherd of this API that has not been destroyed. No other thread starts, stops or
/// destroys it during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_stop(this: *mut CShepherd) {
    // SAFETY: the caller promises a shepherd that no other thread starts, stops or destroys during
    // the call.
    unsafe { (*this).running = None };
}

/// Stops and ends a shepherd. Does nothing if `this` is null. Other shepherds go on folding the
/// counters that it watched.
///
/// # Safety
///
/// `this` is null, or a shepherd of this API that has not been destroyed. It is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shepherd_destroy(this: *mut CShepherd) {
    // SAFETY: the caller promises null or a shepherd of this API, which came from `boxed`, and
    // gives it up.
    unsafe { unboxed(this) };
}
