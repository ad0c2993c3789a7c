//! The C API of counters: what `pinfold.h` declares of them.
//!
//! A C counter is a Rust counter at an address that C chose: in a block from `heap`, or in a static that
//! `PINFOLD_COUNTER_INIT` filled in. Functions that fail set errno: EINVAL for a batch out of range, ENOMEM for want of memory,
//! ENOTSUP where the kernel offers no fence.

use crate::heap::{self, set_errno};
use core::ffi::c_int;
use core::ptr::null_mut;
use pinfold::counter::{CounterError, Counters, EventCounter, PercpuCounter, PercpuHistogram};

/// Stands for the default batch.
const BATCH_DEFAULT: u64 = u64::MAX;

fn errno_of(error: CounterError) -> c_int {
    match error {
        CounterError::OutOfMemory => libc::ENOMEM,
        CounterError::Fence => libc::ENOTSUP,
        _ => libc::EINVAL,
    }
}

/// Puts `value` into a block of its own; null and ENOMEM when there is none.
pub(crate) fn boxed<T>(value: T) -> *mut T {
    let block = heap::alloc_aligned(size_of::<T>(), align_of::<T>()).cast::<T>();
    if !block.is_null() {
        // SAFETY: a fresh block, large and aligned enough.
        unsafe { block.write(value) };
    }
    block
}

/// As [`boxed`], or null with the error's errno.
fn boxed_or_errno<T>(made: Result<T, CounterError>) -> *mut T {
    match made {
        Ok(value) => boxed(value),
        Err(error) => {
            set_errno(errno_of(error));
            null_mut()
        }
    }
}

/// Drops what [`boxed`] gave; null is none.
///
/// # Safety
///
/// `block` is null or from [`boxed`], and nobody uses it any more.
pub(crate) unsafe fn unboxed<T>(block: *mut T) {
    if !block.is_null() {
        // SAFETY: the caller's promise.
        unsafe {
            block.drop_in_place();
            heap::free(block.cast());
        }
    }
}

/// A counter at `value` with batch `batch`, or the default one.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_counter_create(value: i64, batch: u64) -> *mut PercpuCounter {
    if batch == BATCH_DEFAULT {
        let counter = PercpuCounter::new();
        counter.add(value);
        return boxed(counter);
    }
    boxed_or_errno(PercpuCounter::with_batch(value, batch))
}

/// A counter at `value` that widens its batch while its error bound is at most `drift`.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_counter_create_max_drift(value: i64, drift: u64) -> *mut PercpuCounter {
    boxed_or_errno(PercpuCounter::with_max_drift(value, drift))
}

/// `count` counters at `values`, packed; null and EINVAL for a batch out of range.
///
/// # Safety
///
/// `values` is readable for `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_counters_create(
    values: *const i64,
    count: usize,
    batch: u64,
) -> *mut Counters {
    let values = match count {
        0 => &[],
        // SAFETY: the caller's promise.
        _ => unsafe { core::slice::from_raw_parts(values, count) },
    };
    boxed_or_errno(PercpuCounter::init_many(values, batch))
}

/// Defines functions on a counter: the name, what it does, and the Rust method.
macro_rules! methods {
    ($type:ty: $($(#[doc = $doc:literal])+ $name:ident($($arg:ident: $arg_type:ty),*) $(-> $result:ty)? = |$counter:ident| $body:expr;)*) => {$(
        $(#[doc = $doc])+
        ///
        /// # Safety
        ///
        /// The first argument is one that was made and not destroyed yet.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(this: *const $type, $($arg: $arg_type),*) $(-> $result)? {
            // SAFETY: the caller's promise.
            let $counter = unsafe { &*this };
            $body
        }
    )*};
}

methods! { PercpuCounter:
    /// Adds `n`.
    pinfold_counter_add(n: i64) = |counter| counter.add(n);
    /// Takes `n` away.
    pinfold_counter_sub(n: i64) = |counter| counter.sub(n);
    /// Adds 1.
    pinfold_counter_inc() = |counter| counter.inc();
    /// Takes 1 away.
    pinfold_counter_dec() = |counter| counter.dec();
    /// The value, off by at most the error bound.
    pinfold_counter_read() -> i64 = |counter| counter.read();
    /// How far a read may be off.
    pinfold_counter_error_bound() -> u64 = |counter| counter.error_bound();
    /// The value, exactly.
    pinfold_counter_sum() -> i64 = |counter| counter.sum();
    /// −1, 0 or 1: the value is below, at or above `with`.
    pinfold_counter_compare(with: i64) -> c_int = |counter| counter.compare(with) as c_int;
    /// Adds `amount` unless the value would pass `limit` by it; whether it did.
    pinfold_counter_limited_add(limit: i64, amount: i64) -> bool = |counter| counter.limited_add(limit, amount);
    /// Sets the value.
    pinfold_counter_set(value: i64) = |counter| counter.set(value);
    /// Sets the value; what it was.
    pinfold_counter_swap(value: i64) -> i64 = |counter| counter.swap(value);
    /// Folds from afar; how many shards had moved.
    pinfold_counter_fold() -> usize = |counter| counter.fold();
    /// The batch.
    pinfold_counter_batch() -> u64 = |counter| counter.batch();
    /// Changes the batch; 0, or −1 with errno.
    pinfold_counter_set_batch(batch: u64) -> c_int = |counter| match counter.set_batch(batch) {
        Ok(()) => 0,
        Err(error) => {
            set_errno(errno_of(error));
            -1
        }
    };
}

/// The interval in which the value was at a moment during the call.
///
/// # Safety
///
/// `this` was made and not destroyed yet; `low` and `high` are writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_counter_bounds(
    this: *const PercpuCounter,
    low: *mut i64,
    high: *mut i64,
) {
    // SAFETY: the caller's promise.
    unsafe { (*low, *high) = (*this).bounds() };
}

/// Ends a counter of `pinfold_counter_create`; null is none.
///
/// # Safety
///
/// Nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_counter_destroy(this: *mut PercpuCounter) {
    // SAFETY: the caller's promise.
    unsafe { unboxed(this) };
}

/// The `nth` of many counters; null and EINVAL when there are not so many.
///
/// # Safety
///
/// `this` was made and not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_counters_at(
    this: *const Counters,
    nth: usize,
) -> *const PercpuCounter {
    // SAFETY: the caller's promise.
    match unsafe { (&*this).get(nth) } {
        Some(counter) => counter,
        None => {
            set_errno(libc::EINVAL);
            core::ptr::null()
        }
    }
}

/// Ends many counters at once; null is none.
///
/// # Safety
///
/// Nobody uses them any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_counters_destroy(this: *mut Counters) {
    // SAFETY: the caller's promise.
    unsafe { unboxed(this) };
}

/// An event counter at 0.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_event_create() -> *mut EventCounter {
    boxed(EventCounter::new())
}

methods! { EventCounter:
    /// Counts one.
    pinfold_event_inc() = |events| events.inc();
    /// Counts `n`.
    pinfold_event_add(n: u64) = |events| events.add(n);
    /// How many were counted.
    pinfold_event_sum() -> u64 = |events| events.sum();
}

/// Ends an event counter of `pinfold_event_create`; null is none.
///
/// # Safety
///
/// Nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_event_destroy(this: *mut EventCounter) {
    // SAFETY: the caller's promise.
    unsafe { unboxed(this) };
}

/// An empty histogram.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_histogram_create() -> *mut PercpuHistogram {
    boxed(PercpuHistogram::new())
}

methods! { PercpuHistogram:
    /// Counts `value`.
    pinfold_histogram_record(value: u64) = |histogram| histogram.record(value);
    /// How many values were recorded.
    pinfold_histogram_count() -> u64 = |histogram| histogram.snapshot().count();
    /// Their sum.
    pinfold_histogram_sum() -> u64 = |histogram| histogram.snapshot().sum();
    /// A value that the part `q` of all do not exceed.
    pinfold_histogram_quantile(q: f64) -> u64 = |histogram| histogram.snapshot().quantile(q);
}

/// Ends a histogram; null is none.
///
/// # Safety
///
/// Nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_histogram_destroy(this: *mut PercpuHistogram) {
    // SAFETY: the caller's promise.
    unsafe { unboxed(this) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `PINFOLD_COUNTER_INIT` and `PINFOLD_EVENT_INIT` write.
    #[test]
    fn the_header_knows_what_fresh_counters_look_like() {
        let fresh = PercpuCounter::new();
        // SAFETY: a counter is sixteen words without padding.
        let words = unsafe { core::ptr::from_ref(&fresh).cast::<[u64; 16]>().read() };
        let mut expected = [0; 16];
        expected[0] = 64;
        assert_eq!(words, expected);
        let minus_one = PercpuCounter::with_batch(-1, 1).unwrap();
        // SAFETY: as above.
        let words = unsafe { core::ptr::from_ref(&minus_one).cast::<[u64; 16]>().read() };
        assert_eq!(words[8], u64::MAX);
        let fresh = EventCounter::new();
        // SAFETY: an event counter is two words without padding.
        let words = unsafe { core::ptr::from_ref(&fresh).cast::<[u64; 2]>().read() };
        assert_eq!(words, [0, 0]);
        assert_eq!(size_of::<PercpuCounter>(), 128);
        assert_eq!(align_of::<PercpuCounter>(), 16);
        assert_eq!(size_of::<EventCounter>(), 16);
    }
}
