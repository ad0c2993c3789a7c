//! The C API of policies for ranges of pages. Functions that fail set errno: EINVAL for a range without pages, ENOENT for a page without a
//! policy, EBUSY in a handler that interrupted a set, ENOMEM for want of memory.

use crate::c_cache::null_with;
use crate::c_counter::{boxed, unboxed};
use crate::c_policy::{CPolicy, failed, held, policy_of};
use core::ffi::c_int;
use pinfold::mempolicy::{RangeError, SharedPolicy};

/// No policies yet; null with ENOMEM.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_shared_policy_create() -> *mut SharedPolicy {
    let made = boxed(SharedPolicy::new());
    if made.is_null() {
        return null_with(libc::ENOMEM);
    }
    made
}

pub(crate) fn answer(result: Result<(), RangeError>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(RangeError::Busy) => failed(libc::EBUSY),
        Err(RangeError::OutOfMemory) => failed(libc::ENOMEM),
        Err(_) => failed(libc::EINVAL),
    }
}

/// `mpol_set_shared_policy`: gives the pages from `start` to before `end` a copy of the policy; null takes theirs away. 0, or −1 with
/// errno.
///
/// # Safety
///
/// Here and below: `this` was created and not destroyed yet. `policy` is null, or held by the caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shared_policy_set(
    this: *const SharedPolicy,
    start: u64,
    end: u64,
    policy: *const CPolicy,
) -> c_int {
    // SAFETY: the caller's promise.
    let (this, policy) = unsafe { (&*this, policy_of(policy)) };
    answer(this.set(start..end, policy))
}

/// `mpol_shared_policy_lookup`: a copy of the page's policy, a new handle; null with ENOENT when it has none, or with ENOMEM.
///
/// # Safety
///
/// As for [`pinfold_shared_policy_set`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shared_policy_lookup(
    this: *const SharedPolicy,
    page: u64,
) -> *mut CPolicy {
    // SAFETY: the caller's promise.
    match unsafe { &*this }.lookup(page) {
        Some(policy) => held(policy),
        None => null_with(libc::ENOENT),
    }
}

/// Ends it; policies that were looked up stay. Null is none.
///
/// # Safety
///
/// As for [`pinfold_shared_policy_set`]; nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_shared_policy_destroy(this: *mut SharedPolicy) {
    // SAFETY: the caller's promise.
    unsafe { unboxed(this) };
}
