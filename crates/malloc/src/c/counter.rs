//! The C API of counters.
//!
//! A C counter is a Rust counter, in a block from `heap` or in a static that `PINFOLD_COUNTER_INIT`
//! initialised. Functions that fail set errno: EINVAL for a batch out of range, ENOMEM if there is
//! no memory, ENOTSUP if the kernel cannot fence (interrupt the other CPUs for this process).

use super::support::{answer, boxed, boxed_or_errno, methods, null_with, unboxed};
use core::ffi::c_int;
use pinfold::counter::{
    CounterTree, Counters, EventCounter, EventPair, PerCpuCounter, PerCpuHistogram,
};
use pinfold::internal::segment;

/// `PINFOLD_BATCH_DEFAULT`: stands for the default batch.
const BATCH_DEFAULT: u64 = u64::MAX;
/// The largest batch.
const MAX_BATCH: u64 = 1 << 40;

/// Creates a counter at `value` with `batch`, or with the default batch. Returns null with EINVAL
/// or ENOMEM if it fails.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_counter_create(value: i64, batch: u64) -> *mut PerCpuCounter {
    let counter = PerCpuCounter::new().with_value(value);
    match batch {
        BATCH_DEFAULT => boxed(counter),
        1..=MAX_BATCH => boxed(counter.with_batch(batch)),
        _ => null_with(libc::EINVAL),
    }
}

/// Creates a counter at `value` that widens its batch while its error bound is at most `drift`.
/// Returns null with EINVAL or ENOMEM if it fails.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_counter_create_max_drift(value: i64, drift: u64) -> *mut PerCpuCounter {
    match drift {
        0 => null_with(libc::EINVAL),
        _ => boxed(PerCpuCounter::new().with_value(value).with_max_drift(drift)),
    }
}

/// Creates `count` counters at `values`, packed together. Returns null with EINVAL or ENOMEM if it
/// fails.
///
/// # Safety
///
/// `values` is readable for `count` numbers. It may be null if `count` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_counters_create(
    values: *const i64,
    count: usize,
    batch: u64,
) -> *mut Counters {
    let values = match count {
        0 => &[],
        // SAFETY: the caller promises that `values` is readable for `count` numbers.
        _ => unsafe { core::slice::from_raw_parts(values, count) },
    };
    boxed_or_errno(Counters::new(values, batch))
}

methods! { &PerCpuCounter, "`this` is initialised, and has not been destroyed.":
    /// Adds `n`.
    pinfold_counter_add(n: i64) = |counter| counter.add(n);
    /// Subtracts `n`.
    pinfold_counter_sub(n: i64) = |counter| counter.sub(n);
    /// Adds `n` with a batch for this call.
    pinfold_counter_add_batch(n: i64, batch: u64) = |counter| counter.add_batch(n, batch);
    /// Adds 1.
    pinfold_counter_inc() = |counter| counter.inc();
    /// Subtracts 1.
    pinfold_counter_dec() = |counter| counter.dec();
    /// Returns the value, off by at most the error bound.
    pinfold_counter_read() -> i64 = |counter| counter.read();
    /// Returns what a read returns, or 0 if that is negative.
    pinfold_counter_read_positive() -> i64 = |counter| counter.read_positive();
    /// Returns by how much a read may be off.
    pinfold_counter_error_bound() -> u64 = |counter| counter.error_bound();
    /// Returns the exact value at one moment during the call.
    pinfold_counter_sum() -> i64 = |counter| counter.sum();
    /// Returns the exact value, or 0 if that is negative.
    pinfold_counter_sum_positive() -> i64 = |counter| counter.sum_positive();
    /// Returns −1, 0 or 1 if the value is below, at or above `with`.
    pinfold_counter_compare(with: i64) -> c_int = |counter| counter.compare(with) as c_int;
    /// Adds `amount` if the value does not pass `limit` thereby. Returns whether it added.
    pinfold_counter_limited_add(limit: i64, amount: i64) -> bool = |counter| counter.limited_add(limit, amount);
    /// Sets the value.
    pinfold_counter_set(value: i64) = |counter| counter.set(value);
    /// Sets the value. Returns the value before.
    pinfold_counter_swap(value: i64) -> i64 = |counter| counter.swap(value);
    /// Adds each CPU's part of the count, its shard, to the total. Interrupts no CPU. Returns how
    /// many shards had changed.
    pinfold_counter_fold() -> usize = |counter| counter.fold();
    /// Returns the batch.
    pinfold_counter_batch() -> u64 = |counter| counter.batch();
    /// Sets the batch. Returns 0, or −1 with errno.
    pinfold_counter_set_batch(batch: u64) -> c_int = |counter| answer(counter.set_batch(batch));
}

/// Stores two numbers between which the value was at some moment during the call.
///
/// # Safety
///
/// `this` is initialised, and has not been destroyed. `low` and `high` are writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_counter_bounds(
    this: &PerCpuCounter,
    low: *mut i64,
    high: *mut i64,
) {
    // SAFETY: the caller promises a counter that has not been destroyed, and two writable numbers.
    unsafe { (*low, *high) = this.bounds() };
}

/// Ends a counter. Does nothing if `this` is null.
///
/// # Safety
///
/// `this` is null, or a counter of `pinfold_counter_create` or `pinfold_counter_create_max_drift`
/// that has not been destroyed. It is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_counter_destroy(this: *mut PerCpuCounter) {
    if segment::hide_at(this.cast_const().cast()) {
        // SAFETY: the caller promises null or a value of this API, which came from `boxed`, and
        // gives it up.
        unsafe { unboxed(this) };
    }
}

/// Returns counter number `nth`. Returns null with EINVAL if there are fewer counters.
///
/// # Safety
///
/// `this` came from `pinfold_counters_create`, and has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_counters_at(this: &Counters, nth: usize) -> *const PerCpuCounter {
    match this.get(nth) {
        Some(counter) => counter,
        None => null_with(libc::EINVAL),
    }
}

/// Ends all counters of `this`. Does nothing if `this` is null.
///
/// # Safety
///
/// `this` is null, or came from `pinfold_counters_create` and has not been destroyed. None of the
/// counters is used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_counters_destroy(this: *mut Counters) {
    // SAFETY: the caller promises null, or counters that have not been destroyed.
    let Some(counters) = (unsafe { this.as_ref() }) else {
        return;
    };
    let hide = |counter| segment::hide_at(core::ptr::from_ref::<PerCpuCounter>(counter).cast());
    if counters.iter().all(hide) {
        // SAFETY: the caller promises a value of this API, which came from `boxed`, and gives it
        // up.
        unsafe { unboxed(this) };
    }
}

/// Creates a tree at `value` with `batch`, or with the default batch. Returns null with EINVAL or
/// ENOMEM if it fails.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_counter_tree_create(value: i64, batch: u64) -> *mut CounterTree {
    let tree = CounterTree::new().with_value(value);
    match batch {
        BATCH_DEFAULT => boxed(tree),
        1..=MAX_BATCH => boxed(tree.with_batch(batch)),
        _ => null_with(libc::EINVAL),
    }
}

methods! { &CounterTree, "`this` is initialised, and has not been destroyed.":
    /// Adds `n` (`percpu_counter_tree_add`).
    pinfold_counter_tree_add(n: i64) = |tree| tree.add(n);
    /// Subtracts `n`.
    pinfold_counter_tree_sub(n: i64) = |tree| tree.sub(n);
    /// Returns the value, off by at most the error bound (`percpu_counter_tree_approximate_sum`).
    pinfold_counter_tree_read() -> i64 = |tree| tree.read();
    /// Returns by how much a read may be off (`percpu_counter_tree_approximate_accuracy_range`).
    pinfold_counter_tree_error_bound() -> u64 = |tree| tree.error_bound();
    /// Returns the exact value at one moment during the call (`percpu_counter_tree_precise_sum`).
    pinfold_counter_tree_sum() -> i64 = |tree| tree.sum();
    /// Returns −1 or 1 if the value is certainly below or above `with`, and 0 if a read is too near
    /// to tell (`percpu_counter_tree_approximate_compare_value`).
    pinfold_counter_tree_try_compare(with: i64) -> c_int =
        |tree| tree.try_compare(with).map_or(0, |order| order as c_int);
    /// Returns −1, 0 or 1 if the value is below, at or above `with`
    /// (`percpu_counter_tree_precise_compare_value`, with the sign turned).
    pinfold_counter_tree_compare(with: i64) -> c_int = |tree| tree.compare(with) as c_int;
    /// Returns −1 or 1 if the value is certainly below or above that of `other`, and 0 if reads are
    /// too near to tell (`percpu_counter_tree_approximate_compare`).
    pinfold_counter_tree_try_compare_with(other: &CounterTree) -> c_int =
        |tree| tree.try_compare_with(other).map_or(0, |order| order as c_int);
    /// Returns −1, 0 or 1 if the value is below, at or above that of `other`
    /// (`percpu_counter_tree_precise_compare`).
    pinfold_counter_tree_compare_with(other: &CounterTree) -> c_int =
        |tree| tree.compare_with(other) as c_int;
    /// Sets the value (`percpu_counter_tree_set`).
    pinfold_counter_tree_set(value: i64) = |tree| tree.set(value);
    /// Sets the value. Returns the value before.
    pinfold_counter_tree_swap(value: i64) -> i64 = |tree| tree.swap(value);
}

/// Ends a tree. Does nothing if `this` is null.
///
/// # Safety
///
/// `this` is null, or came from `pinfold_counter_tree_create` and has not been destroyed. It is not
/// used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_counter_tree_destroy(this: *mut CounterTree) {
    // SAFETY: the caller promises null or a value of this API, which came from `boxed`, and gives
    // it up.
    unsafe { unboxed(this) };
}

/// Creates an event counter at 0. Returns null with ENOMEM if there is no memory.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_event_create() -> *mut EventCounter {
    boxed(EventCounter::new())
}

methods! { &EventCounter, "`this` is initialised, and has not been destroyed.":
    /// Adds 1.
    pinfold_event_inc() = |events| events.inc();
    /// Adds `n`.
    pinfold_event_add(n: u64) = |events| events.add(n);
    /// Returns the count.
    pinfold_event_sum() -> u64 = |events| events.sum();
}

/// Ends an event counter. Does nothing if `this` is null.
///
/// # Safety
///
/// `this` is null, or came from `pinfold_event_create` and has not been destroyed. It is not used
/// any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_event_destroy(this: *mut EventCounter) {
    if segment::hide_at(this.cast_const().cast()) {
        // SAFETY: the caller promises null or a value of this API, which came from `boxed`, and
        // gives it up.
        unsafe { unboxed(this) };
    }
}

/// Creates a pair of counts at 0. Returns null with ENOMEM if there is no memory.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_event_pair_create() -> *mut EventPair {
    boxed(EventPair::new())
}

methods! { &EventPair, "`this` is initialised, and has not been destroyed.":
    /// Adds `first` to the first count and `second` to the second one.
    pinfold_event_pair_add(first: u64, second: u64) = |pair| pair.add(first, second);
}

/// Stores both counts.
///
/// # Safety
///
/// `this` is initialised, and has not been destroyed. `first` and `second` are writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_event_pair_sum(
    this: *const EventPair,
    first: *mut u64,
    second: *mut u64,
) {
    // SAFETY: the caller promises a valid pair, and two places to write to.
    unsafe {
        let sums = (*this).sum();
        first.write(sums.0);
        second.write(sums.1);
    }
}

/// Ends a pair of counts. Does nothing if `this` is null.
///
/// # Safety
///
/// `this` is null, or came from `pinfold_event_pair_create` and has not been destroyed. It is not
/// used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_event_pair_destroy(this: *mut EventPair) {
    // SAFETY: the caller promises null or a value of this API, which came from `boxed`, and gives
    // it up.
    unsafe { unboxed(this) };
}

/// Creates an empty histogram. Returns null with ENOMEM if there is no memory.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_histogram_create() -> *mut PerCpuHistogram {
    boxed(PerCpuHistogram::new())
}

methods! { &PerCpuHistogram, "`this` is initialised, and has not been destroyed.":
    /// Records `value`.
    pinfold_histogram_record(value: u64) = |histogram| histogram.record(value);
    /// Returns how many values were recorded.
    pinfold_histogram_count() -> u64 = |histogram| histogram.snapshot().count();
    /// Returns the sum of the recorded values.
    pinfold_histogram_sum() -> u64 = |histogram| histogram.snapshot().sum();
    /// Returns a value such that at least the part `q` of the recorded values is at most this
    /// value.
    pinfold_histogram_quantile(q: f64) -> u64 = |histogram| histogram.snapshot().quantile(q);
}

/// Ends a histogram. Does nothing if `this` is null.
///
/// # Safety
///
/// `this` is null, or came from `pinfold_histogram_create` and has not been destroyed. It is not
/// used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_histogram_destroy(this: *mut PerCpuHistogram) {
    // SAFETY: the caller promises null or a value of this API, which came from `boxed`, and gives
    // it up.
    unsafe { unboxed(this) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The initialisers of `pinfold.h` write these words.
    #[test]
    fn new_counters_have_the_words_of_the_headers_initialisers() {
        let fresh = PerCpuCounter::new();
        // SAFETY: a counter is 19 words without padding.
        let words = unsafe { core::ptr::from_ref(&fresh).cast::<[u64; 19]>().read() };
        let mut expected = [0; 19];
        expected[0] = 64;
        assert_eq!(words, expected);
        let minus_one = PerCpuCounter::new().with_value(-1).with_batch(1);
        // SAFETY: a counter is 19 words without padding.
        let words = unsafe { core::ptr::from_ref(&minus_one).cast::<[u64; 19]>().read() };
        assert_eq!(words[10], u64::MAX);
        let tree = CounterTree::new().with_value(-1);
        // SAFETY: a tree is 20 words without padding.
        let words = unsafe { core::ptr::from_ref(&tree).cast::<[u64; 20]>().read() };
        let mut expected = [0; 20];
        (expected[0], expected[1], expected[2], expected[10]) = (64, 32, !32, u64::MAX);
        assert_eq!(words, expected);
        let fresh = EventCounter::new();
        // SAFETY: an event counter is two words without padding.
        let words = unsafe { core::ptr::from_ref(&fresh).cast::<[u64; 2]>().read() };
        assert_eq!(words, [0, 0]);
        let fresh = EventPair::new();
        // SAFETY: a pair of counts is three words without padding.
        let words = unsafe { core::ptr::from_ref(&fresh).cast::<[u64; 3]>().read() };
        assert_eq!(words, [0, 0, 0]);
        assert_eq!(size_of::<EventPair>(), 24);
        assert_eq!(size_of::<PerCpuCounter>(), 152);
        assert_eq!(align_of::<PerCpuCounter>(), 8);
        assert_eq!(size_of::<EventCounter>(), 16);
    }
}
