//! One exported function for each critical section of `pinfold-rseq`.
//!
//! The checker builds this library for each architecture, finds each section by the name of its
//! function, and runs the function's machine code from its first instruction. So the arguments are
//! in the registers of the C ABI, and the checker knows no register of a section. A function has at
//! most six arguments, which all are in registers.
#![allow(unsafe_code, reason = "the operations of `Units` are unsafe")]

use core::sync::atomic::AtomicUsize;
use pinfold_rseq::{Append, Units};

/// The offset of the word that `probe_pop_counted` subtracts from.
const COUNT: usize = 72;

/// Exports a function that calls one operation.
macro_rules! probes {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = |$units:ident| $call:expr;)*)
    => {
        $(
            #[doc = concat!("Calls the operation that the name of `", stringify!($name), "` has.")]
            ///
            /// # Safety
            ///
            /// The caller keeps the contract of the operation.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($units: &Units $(, $argument: $type)*) $(-> $result)? {
                // SAFETY: the caller keeps the contract of the operation.
                #[allow(unused_unsafe, reason = "some operations are safe")]
                unsafe { $call }
            }
        )*
    };
}

/// Writes the word of `found` to `old`, and returns whether there is one.
///
/// # Safety
///
/// `old` is writable.
unsafe fn give(found: Option<u64>, old: *mut u64) -> bool {
    match found {
        Some(word) => {
            // SAFETY: the caller promises that `old` is writable.
            unsafe { old.write(word) };
            true
        }
        None => false,
    }
}

probes! {
    probe_add(offset: usize, n: u64) -> bool = |units| units.add(offset, n);
    probe_count_up(offset: usize, n: i64) -> i64 = |units| units.count_up(offset, n);
    probe_count_down(offset: usize, n: i64) -> i64 = |units| units.count_down(offset, n);
    probe_claim(offset: usize, token: u64, found: *mut [u64; 3]) -> bool
        = |units| match units.claim(offset, token) {
            Some(claim) => {
                found.write([claim.net, claim.folded, claim.batch]);
                true
            }
            None => false,
        };
    probe_add_gated(offset: usize, n: u64, gate: &AtomicUsize) -> bool
        = |units| units.add_gated(offset, n, gate);
    probe_store_if_equal(offset: usize, expected: u64, new: u64) -> bool
        = |units| units.store_if_equal(offset, expected, new);
    probe_pop(offset: usize) -> *mut u8 = |units| units.pop(offset);
    probe_pop_counted(offset: usize, n: i64) -> *mut u8 = |units| match units.area() {
        Some(area) => area.pop_counted::<COUNT>(offset, n),
        None => core::ptr::null_mut(),
    };
    probe_push(offset: usize, item: *mut u8) -> bool = |units| units.push(offset, item);
    probe_pop_batch(offset: usize, items: *mut *mut u8, room: usize) -> usize
        = |units| units.pop_batch(offset, core::slice::from_raw_parts_mut(items, room));
    probe_push_batch(offset: usize, items: *const *mut u8, count: usize) -> usize
        = |units| units.push_batch(offset, core::slice::from_raw_parts(items, count));
    probe_store(offset: usize, value: u64) -> bool = |units| units.store(offset, value);
    probe_and(offset: usize, mask: u64) -> bool = |units| units.and(offset, mask);
    probe_or(offset: usize, mask: u64) -> bool = |units| units.or(offset, mask);
    probe_fetch_add(offset: usize, n: u64, old: *mut u64) -> bool
        = |units| give(units.fetch_add(offset, n), old);
    probe_swap(offset: usize, value: u64, old: *mut u64) -> bool
        = |units| give(units.swap(offset, value), old);
    probe_compare_exchange(offset: usize, expected: u64, new: u64, old: *mut u64) -> bool
        = |units| give(units.compare_exchange(offset, expected, new), old);
    probe_compare_exchange_pair(offset: usize, e0: u64, e1: u64, n0: u64, n1: u64) -> bool
        = |units| units.compare_exchange_pair(offset, [e0, e1], [n0, n1]);
    probe_add_pair(offset: usize, first: u64, second: u64) -> bool
        = |units| units.add_pair(offset, [first, second]);
    probe_store_two_if_equal(offset: usize, expected: u64, new: u64, other: usize, value: u64)
        -> bool = |units| units.store_two_if_equal(offset, (expected, new), other, value);
    probe_store_if_both_equal(offset: usize, expected: u64, new: u64, other: usize, equal: u64)
        -> bool = |units| units.store_if_both_equal(offset, (expected, new), other, equal);
    probe_list_push(offset: usize, item: *mut u8) -> bool = |units| units.list_push(offset, item);
    probe_list_pop(offset: usize) -> *mut u8 = |units| units.list_pop(offset);
    probe_append(offset: usize, size: usize, record: *const u64, words: usize, slot: usize) -> u64
        = |units| match units.append(
            offset, size, core::slice::from_raw_parts(record, words), slot,
        ) {
            Append::Done => 0,
            Append::NoUnit => 1,
            Append::Full => 2,
        };
    probe_stop(index: usize) = |units| units.stop(index);
    probe_resume(index: usize) = |units| units.resume_untouched(index);
}
