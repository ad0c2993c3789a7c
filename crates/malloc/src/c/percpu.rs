//! The C API of per-CPU data.
//!
//! A C variable is a Rust variable in memory of the caller, which is zero at first.

use super::support::{answer, failed};
use core::ffi::{c_int, c_void};
use pinfold::internal::set_errno;
use pinfold::percpu::{Node, PerCpu, PerCpuList, PerCpuPair};

// The header declares words and lists as two words, and pairs and items as one.
const _: () = assert!(
    size_of::<PerCpu<u64>>() == 16
        && size_of::<PerCpuList<()>>() == 16
        && size_of::<PerCpuPair<u64, u64>>() == 8
        && size_of::<Node<()>>() == 8
);

/// Defines C functions on a per-CPU word: documentation, name and arguments, and the Rust
/// expression.
macro_rules! methods {
    ($($(#[doc = $doc:literal])+ $name:ident($($arg:ident: $arg_type:ty),*) $(-> $result:ty)? = |$word:ident| $body:expr;)*) => {$(
        $(#[doc = $doc])+
        ///
        /// # Safety
        ///
        /// `this` was zero at first, and only these functions have changed it.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(this: &PerCpu<u64>, $($arg: $arg_type),*) $(-> $result)? {
            let $word = this;
            $body
        }
    )*};
}

methods! {
    /// Returns this CPU's copy.
    pinfold_percpu_read() -> u64 = |word| word.read();
    /// Stores `value` in this CPU's copy.
    pinfold_percpu_write(value: u64) = |word| word.write(value);
    /// Adds `n` to this CPU's copy.
    pinfold_percpu_add(n: u64) = |word| word.add(n);
    /// Adds `n` to this CPU's copy, and returns the sum.
    pinfold_percpu_add_return(n: u64) -> u64 = |word| word.add_return(n);
    /// Adds 1 to this CPU's copy.
    pinfold_percpu_inc() = |word| word.inc();
    /// Subtracts 1 from this CPU's copy.
    pinfold_percpu_dec() = |word| word.dec();
    /// Clears the bits of this CPU's copy that are clear in `mask`.
    pinfold_percpu_and(mask: u64) = |word| word.and(mask);
    /// Sets the bits of this CPU's copy that are set in `mask`.
    pinfold_percpu_or(mask: u64) = |word| word.or(mask);
    /// Stores `value` in this CPU's copy, and returns the old value.
    pinfold_percpu_xchg(value: u64) -> u64 = |word| word.xchg(value);
    /// Stores `new` in this CPU's copy if the copy is `expected`, and returns the old value.
    pinfold_percpu_cmpxchg(expected: u64, new: u64) -> u64 = |word| word.cmpxchg(expected, new);
    /// Returns the sum of all copies.
    pinfold_percpu_sum() -> u64 = |word| word.sum();
}

/// Stores `new` in this CPU's copy if the copy is `*expected`. Otherwise stores the copy in
/// `*expected`, and returns false.
///
/// # Safety
///
/// `this` was zero at first, and only these functions have changed it. `expected` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_percpu_try_cmpxchg(
    this: &PerCpu<u64>,
    expected: *mut u64,
    new: u64,
) -> bool {
    // SAFETY: the caller promises both.
    unsafe { this.try_cmpxchg(&mut *expected, new) }
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
