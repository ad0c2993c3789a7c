//! The C API of per-CPU arrays and rings, whose sizes are known at run time.
//!
//! A C variable is a Rust value in memory of the caller. All its bits are zero before it is made
//! and after it is destroyed. The value has no elements and no records then, so operations fail.

use super::support::failed;
use core::ffi::{c_int, c_void};
use core::mem::zeroed;
use pinfold::internal::set_errno;
use pinfold::percpu::PushError;
use pinfold::percpu::sized::{Array, MAX_RECORD, Ring};

// The header declares an array as two words, and a ring as three.
const _: () = assert!(size_of::<Array>() == 16 && size_of::<Ring>() == 24);

/// Makes an array of `count` words. Returns -1 with EINVAL if `count` is 0, and with ENOMEM if
/// there is no memory.
///
/// # Safety
///
/// `this` is writable, and holds no array.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_array_init(this: *mut Array, count: usize) -> c_int {
    if count == 0 {
        return failed(libc::EINVAL);
    }
    let Some(array) = Array::new(count) else {
        return failed(libc::ENOMEM);
    };
    // SAFETY: the caller promises that `this` is writable.
    unsafe { this.write(array) };
    0
}

/// Frees the copies. The array is 0 afterwards.
///
/// # Safety
///
/// `this` is zero, or holds an array that no other thread uses now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_array_destroy(this: *mut Array) {
    // SAFETY: the caller promises an array that no other thread uses. Zero bits are an array
    // without a block, which has no elements.
    drop(unsafe { this.replace(zeroed()) });
}

/// Defines C functions on an element of an array: documentation, name and arguments, and the Rust
/// expression. A function returns 0 with errno EINVAL if there is no such element.
macro_rules! methods {
    ($($(#[doc = $doc:literal])+ $name:ident($($arg:ident: $arg_type:ty),*) $(-> $result:ty)? = |$element:ident| $body:expr;)*) => {$(
        $(#[doc = $doc])+
        /// Sets errno to EINVAL if the array has no element `at`.
        ///
        /// # Safety
        ///
        /// `this` is zero, or holds an array.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(this: &Array, at: usize, $($arg: $arg_type),*) $(-> $result)? {
            let Some($element) = this.at(at) else {
                set_errno(libc::EINVAL);
                return Default::default();
            };
            $body
        }
    )*};
}

methods! {
    /// Returns the element of this CPU's copy.
    pinfold_percpu_array_read() -> u64 = |element| element.read();
    /// Stores `value` in the element of this CPU's copy.
    pinfold_percpu_array_write(value: u64) = |element| element.write(value);
    /// Adds `n` to the element of this CPU's copy.
    pinfold_percpu_array_add(n: u64) = |element| element.add(n);
    /// Adds `n` to the element of this CPU's copy, and returns the sum.
    pinfold_percpu_array_add_return(n: u64) -> u64 = |element| element.add_return(n);
    /// Adds 1 to the element of this CPU's copy.
    pinfold_percpu_array_inc() = |element| element.inc();
    /// Subtracts 1 from the element of this CPU's copy.
    pinfold_percpu_array_dec() = |element| element.dec();
    /// Clears the bits of the element that are clear in `mask`.
    pinfold_percpu_array_and(mask: u64) = |element| element.and(mask);
    /// Sets the bits of the element that are set in `mask`.
    pinfold_percpu_array_or(mask: u64) = |element| element.or(mask);
    /// Stores `value` in the element of this CPU's copy, and returns the old value.
    pinfold_percpu_array_xchg(value: u64) -> u64 = |element| element.xchg(value);
    /// Stores `new` in the element if the element is `expected`, and returns the old value.
    pinfold_percpu_array_cmpxchg(expected: u64, new: u64) -> u64 =
        |element| element.cmpxchg(expected, new);
    /// Returns the sum of the element's copies.
    pinfold_percpu_array_sum() -> u64 = |element| element.sum();
}

/// Stores `new` in the element of this CPU's copy if the element is `*expected`. Otherwise stores
/// the element in `*expected`, and returns false. Returns false with EINVAL if there is no such
/// element.
///
/// # Safety
///
/// `this` is zero, or holds an array. `expected` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_array_try_cmpxchg(
    this: &Array,
    at: usize,
    expected: *mut u64,
    new: u64,
) -> bool {
    let Some(element) = this.at(at) else {
        set_errno(libc::EINVAL);
        return false;
    };
    // SAFETY: the caller promises that `expected` is writable.
    element.try_cmpxchg(unsafe { &mut *expected }, new)
}

/// Calls `each` with each CPU's number, or -1 for the copy that CPUs without memory share, and the
/// element there. Returns -1 with EINVAL if there is no such element, or if `each` is null.
///
/// # Safety
///
/// `this` is zero, or holds an array. `each` may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_array_for_each_cpu(
    this: &Array,
    at: usize,
    each: Option<extern "C" fn(c_int, u64, *mut c_void)>,
    context: *mut c_void,
) -> c_int {
    let element = this.at(at);
    let (Some(each), Some(element)) = (each, element) else {
        return failed(libc::EINVAL);
    };
    // An index is less than 8192.
    element.for_each_cpu(|cpu, value| each(cpu.map_or(-1, |cpu| cpu as c_int), value, context));
    0
}

/// Makes rings of `slots` records of `words` words.
///
/// Returns -1 with EINVAL if a number is not a power of two, or if `words` is above 64. Returns -1
/// with ENOMEM if there is no memory.
///
/// # Safety
///
/// `this` is writable, and holds no ring.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_ring_init(
    this: *mut Ring,
    words: usize,
    slots: usize,
) -> c_int {
    if !words.is_power_of_two() || !slots.is_power_of_two() || words > MAX_RECORD {
        return failed(libc::EINVAL);
    }
    let Some(ring) = Ring::new(words, slots) else {
        return failed(libc::ENOMEM);
    };
    // SAFETY: the caller promises that `this` is writable.
    unsafe { this.write(ring) };
    0
}

/// Appends the ring's number of words at `record` to this CPU's ring.
///
/// Returns -1 with ENOBUFS if the ring is full, and with EAGAIN if the CPU has no ring yet or (on
/// atomics) another thread is appending. Returns -1 with EINVAL if the ring was not made.
///
/// # Safety
///
/// `this` is zero, or holds a ring. The words at `record` are readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_ring_push(this: &Ring, record: *const u64) -> c_int {
    let words = this.words();
    if words == 0 {
        return failed(libc::EINVAL);
    }
    // SAFETY: the caller promises that the words are readable.
    match this.push(unsafe { core::slice::from_raw_parts(record, words) }) {
        Ok(()) => 0,
        Err(PushError::Full) => failed(libc::ENOBUFS),
        Err(_) => failed(libc::EAGAIN),
    }
}

/// Reads the records of all CPUs, and calls `each` with the CPU and the record. Returns the number
/// of records.
///
/// # Safety
///
/// `this` is zero, or holds a ring. `each` may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_ring_drain(
    this: &Ring,
    each: Option<extern "C" fn(c_int, *const u64, *mut c_void)>,
    context: *mut c_void,
) -> usize {
    let Some(each) = each else {
        set_errno(libc::EINVAL);
        return 0;
    };
    // An index is less than 8192.
    this.drain(|cpu, record| each(cpu as c_int, record.as_ptr(), context))
}

/// Frees the rings and the records in them. The ring is 0 afterwards.
///
/// # Safety
///
/// `this` is zero, or holds a ring that no other thread uses now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_ring_destroy(this: *mut Ring) {
    // SAFETY: the caller promises a ring that no other thread uses. Zero bits are a ring without a
    // block, which has no records.
    drop(unsafe { this.replace(zeroed()) });
}
