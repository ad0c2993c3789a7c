//! The C API of per-CPU data.
//!
//! A C variable is a Rust value in memory of the caller, which is zero at first. All bits of an
//! array or a ring are zero before it is made and after it is destroyed. It has no elements and no
//! records then, so operations fail.

use super::support::{answer, failed, fence_errno};
use core::ffi::{c_int, c_void};
use core::mem::zeroed;
use pinfold::internal::set_errno;
use pinfold::percpu::sized::{Array, MAX_RECORD, Ring};
use pinfold::percpu::{Node, PerCpu, PerCpuList, PerCpuPair, PushError};

// The header declares words, lists and arrays as two words, pairs and items as one, and rings as
// three.
const _: () = assert!(
    size_of::<PerCpu<u64>>() == 16
        && size_of::<PerCpuList<()>>() == 16
        && size_of::<PerCpuPair<u64, u64>>() == 8
        && size_of::<Node<()>>() == 8
        && size_of::<Array>() == 16
        && size_of::<Ring>() == 24
);

/// Defines C functions on a per-CPU word, and on an element of an array: documentation, names,
/// arguments, and the Rust expression. The function on an element returns 0
/// if the array has no such element.
macro_rules! operations {
    ($($(#[doc = $doc:literal])+ $of_word:ident, $of_array:ident($($arg:ident: $arg_type:ty),*) $(-> $result:ty)? = |$copy:ident| $body:expr;)*) => {$(
        $(#[doc = $doc])+
        ///
        /// # Safety
        ///
        /// `this` was zero at first, and only these functions have changed it. `expected` is
        /// writable if it is a pointer.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $of_word(this: &PerCpu<u64>, $($arg: $arg_type),*) $(-> $result)? {
            let $copy = this;
            $body
        }

        $(#[doc = $doc])+
        /// Sets errno to EINVAL if the array has no element `at`.
        ///
        /// # Safety
        ///
        /// `this` is zero, or holds an array. `expected` is writable if it is a pointer.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $of_array(this: &Array, at: usize, $($arg: $arg_type),*) $(-> $result)? {
            let Some($copy) = this.at(at) else {
                set_errno(libc::EINVAL);
                return Default::default();
            };
            $body
        }
    )*};
}

operations! {
    /// Returns this CPU's copy.
    pinfold_percpu_read, pinfold_percpu_array_read() -> u64 = |copy| copy.read();
    /// Stores `value` in this CPU's copy.
    pinfold_percpu_write, pinfold_percpu_array_write(value: u64) = |copy| copy.write(value);
    /// Adds `n` to this CPU's copy.
    pinfold_percpu_add, pinfold_percpu_array_add(n: u64) = |copy| copy.add(n);
    /// Adds `n` to this CPU's copy, and returns the sum.
    pinfold_percpu_add_return, pinfold_percpu_array_add_return(n: u64) -> u64 =
        |copy| copy.add_return(n);
    /// Subtracts `n` from this CPU's copy, and returns the difference.
    pinfold_percpu_sub_return, pinfold_percpu_array_sub_return(n: u64) -> u64 =
        |copy| copy.sub_return(n);
    /// Adds 1 to this CPU's copy, and returns the sum.
    pinfold_percpu_inc_return, pinfold_percpu_array_inc_return() -> u64 = |copy| copy.inc_return();
    /// Subtracts 1 from this CPU's copy, and returns the difference.
    pinfold_percpu_dec_return, pinfold_percpu_array_dec_return() -> u64 = |copy| copy.dec_return();
    /// Returns the copy of `cpu`, or 0 with errno set to ENXIO if that CPU has none.
    pinfold_percpu_read_on, pinfold_percpu_array_read_on(cpu: c_int) -> u64 = |copy| {
        let value = usize::try_from(cpu).ok().and_then(|cpu| copy.read_on(cpu));
        value.unwrap_or_else(|| {
            set_errno(libc::ENXIO);
            0
        })
    };
    /// Stores `value` in the copy of `cpu`. Returns false with errno set to ENXIO if that CPU has
    /// no copy, or with the errno of the failure.
    pinfold_percpu_write_on, pinfold_percpu_array_write_on(cpu: c_int, value: u64) -> bool = |copy| {
        let errno = match usize::try_from(cpu).map(|cpu| copy.write_on(cpu, value)) {
            Ok(Ok(Some(_))) => return true,
            Ok(Err(refused)) => fence_errno(refused),
            _ => libc::ENXIO,
        };
        set_errno(errno);
        false
    };
    /// Adds 1 to this CPU's copy.
    pinfold_percpu_inc, pinfold_percpu_array_inc() = |copy| copy.inc();
    /// Subtracts 1 from this CPU's copy.
    pinfold_percpu_dec, pinfold_percpu_array_dec() = |copy| copy.dec();
    /// Clears the bits of this CPU's copy that are clear in `mask`.
    pinfold_percpu_and, pinfold_percpu_array_and(mask: u64) = |copy| copy.and(mask);
    /// Sets the bits of this CPU's copy that are set in `mask`.
    pinfold_percpu_or, pinfold_percpu_array_or(mask: u64) = |copy| copy.or(mask);
    /// Stores `value` in this CPU's copy, and returns the old value.
    pinfold_percpu_xchg, pinfold_percpu_array_xchg(value: u64) -> u64 = |copy| copy.xchg(value);
    /// Stores `new` in this CPU's copy if the copy is `expected`, and returns the old value.
    pinfold_percpu_cmpxchg, pinfold_percpu_array_cmpxchg(expected: u64, new: u64) -> u64 =
        |copy| copy.cmpxchg(expected, new);
    /// Stores `new` in this CPU's copy if the copy is `*expected`. Otherwise stores the copy in
    /// `*expected`, and returns false.
    pinfold_percpu_try_cmpxchg, pinfold_percpu_array_try_cmpxchg(expected: *mut u64, new: u64)
        -> bool = |copy| {
        // SAFETY: the caller promises that `expected` is writable.
        copy.try_cmpxchg(unsafe { &mut *expected }, new)
    };
    /// Returns the sum of all copies.
    pinfold_percpu_sum, pinfold_percpu_array_sum() -> u64 = |copy| copy.sum();
}

/// Calls `each` with each CPU's number, or -1 for the copy that CPUs without memory share, and the
/// value there.
///
/// # Safety
///
/// `this` was zero at first, and only these functions have changed it. `each` may be called with
/// `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_for_each_cpu(
    this: &PerCpu<u64>,
    each: Option<extern "C" fn(c_int, u64, *mut c_void)>,
    context: *mut c_void,
) {
    let Some(each) = each else {
        set_errno(libc::EINVAL);
        return;
    };
    // An index is less than 8192.
    this.for_each_cpu(|cpu, value| each(cpu.map_or(-1, |cpu| cpu as c_int), value, context));
}

/// Frees the copies. The variable is 0 afterwards, and may be used again.
///
/// # Safety
///
/// `this` was zero at first, and only these functions have changed it. No other thread uses it now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_destroy(this: *mut PerCpu<u64>) {
    // SAFETY: the caller promises a variable that no other thread uses.
    drop(unsafe { this.replace(PerCpu::new()) });
}

/// Puts `node` in front of this CPU's items.
///
/// # Safety
///
/// `this` was zero at first, and only these functions have changed it. `node` is aligned, is
/// writable as long as it is in the list, and belongs to the caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_list_push(this: &PerCpuList<()>, node: *mut Node<()>) {
    // SAFETY: the caller promises a list, and a node that stays until it is taken off the list.
    unsafe { this.push(&mut *node) };
}

/// Takes the first of this CPU's items, or an item that all CPUs share. Returns null if there is
/// none.
///
/// # Safety
///
/// `this` was zero at first, and only these functions have changed it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_list_pop(this: &PerCpuList<()>) -> *mut Node<()> {
    let node = this.pop();
    node.map_or(core::ptr::null_mut(), core::ptr::from_mut)
}

/// Takes the items of all CPUs, and calls `each` with each of them. Stores their number in `count`
/// unless `count` is null. Returns -1 with errno if the kernel cannot fence.
///
/// # Safety
///
/// `this` was zero at first, and only these functions have changed it. `each` may be called with
/// `context`. `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_list_take_all(
    this: &PerCpuList<()>,
    each: Option<extern "C" fn(*mut Node<()>, *mut c_void)>,
    context: *mut c_void,
    count: *mut usize,
) -> c_int {
    let Some(each) = each else {
        return failed(libc::EINVAL);
    };
    let mut taken = 0;
    let done = this.take_all(|node| {
        taken += 1;
        each(node, context);
    });
    if !count.is_null() {
        // SAFETY: the caller promises that `count` is writable.
        unsafe { count.write(taken) };
    }
    answer(done.map(|_| ()))
}

/// Frees the heads of the list. Items that are still in the list stay as they are.
///
/// # Safety
///
/// `this` was zero at first, and only these functions have changed it. No other thread uses it now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_list_destroy(this: *mut PerCpuList<()>) {
    // SAFETY: the caller promises a list that no other thread uses.
    drop(unsafe { this.replace(PerCpuList::new()) });
}

/// Stores this CPU's copy in `first` and `second`. Returns -1 with ENOMEM if there is no memory for
/// the copy.
///
/// # Safety
///
/// `this` was zero at first, and only these functions have changed it. `first` and `second` are
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_pair_read(
    this: &PerCpuPair<u64, u64>,
    first: *mut u64,
    second: *mut u64,
) -> c_int {
    let Some(pair) = this.read() else {
        return failed(libc::ENOMEM);
    };
    // SAFETY: the caller promises that both are writable.
    unsafe {
        first.write(pair.0);
        second.write(pair.1);
    }
    0
}

/// Stores the new words in this CPU's copy if the copy equals the expected words. Returns whether
/// it stored them.
///
/// # Safety
///
/// `this` was zero at first, and only these functions have changed it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_pair_cmpxchg(
    this: &PerCpuPair<u64, u64>,
    first_expected: u64,
    second_expected: u64,
    first: u64,
    second: u64,
) -> bool {
    this.cmpxchg((first_expected, second_expected), (first, second))
}

/// Calls `each` with each CPU's number, and with the two words there.
///
/// # Safety
///
/// `this` was zero at first, and only these functions have changed it. `each` may be called with
/// `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_pair_for_each_cpu(
    this: &PerCpuPair<u64, u64>,
    each: Option<extern "C" fn(c_int, u64, u64, *mut c_void)>,
    context: *mut c_void,
) {
    let Some(each) = each else {
        set_errno(libc::EINVAL);
        return;
    };
    // An index is less than 8192.
    this.for_each_cpu(|cpu, (first, second)| each(cpu as c_int, first, second, context));
}

/// Frees the copies. The pair is 0 afterwards, and may be used again.
///
/// # Safety
///
/// `this` was zero at first, and only these functions have changed it. No other thread uses it now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_pair_destroy(this: *mut PerCpuPair<u64, u64>) {
    // SAFETY: the caller promises a pair that no other thread uses.
    drop(unsafe { this.replace(PerCpuPair::new()) });
}

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
