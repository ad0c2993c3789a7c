//! The C API of pools of pages. A program asks a pool for a page for a *place*, a number that it
//! chooses. A policy for the place's range says from which node the page comes. Functions that fail
//! set errno: EINVAL for an invalid argument, ENOSPC for too many caches, ENOMEM if there is no
//! memory, EBUSY for pages in use, ENOTSUP if the kernel cannot fence, ENOENT for a page whose node
//! the kernel chose.

use super::policy::{CPolicy, policy_of};
use super::support::{
    AsErrno, address_or_enomem, answer, boxed_or_errno, failed, methods, null_with, unboxed,
};
use super::text::str_of;
use core::ffi::{c_char, c_int, c_void};
use core::ptr::NonNull;
use pinfold::pages::Pages;

/// Creates a pool of pages. Returns null with errno if it fails.
///
/// # Safety
///
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_create(name: *const c_char) -> *mut Pages {
    // SAFETY: the caller promises a C string or null.
    match unsafe { str_of(name) } {
        Some(name) => boxed_or_errno(Pages::new(name)),
        None => null_with(libc::EINVAL),
    }
}

/// Ends a pool and gives its memory back. Does nothing if `this` is null. Returns 0. If it fails,
/// returns −1 with errno, and leaves the pool usable.
///
/// # Safety
///
/// `this` is null, or a pool of this API that has not been destroyed. No other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_destroy(this: *mut Pages) -> c_int {
    // SAFETY: the caller promises null, or a pool that has not been destroyed.
    let Some(pages) = (unsafe { this.as_ref() }) else {
        return 0;
    };
    let drained = pages.shrink();
    if pages.lists().any(|list| list.active > 0) {
        return failed(libc::EBUSY);
    }
    if let Err(error) = drained {
        return failed(error.as_errno());
    }
    // SAFETY: the pool came from `boxed`, and the caller gives it up. All its pages have come back,
    // as the test above found.
    unsafe { unboxed(this) };
    0
}

methods! { &Pages, "`this` is a pool of this API that has not been destroyed. `policy` is null, or a handle that the caller holds during the call.":
    /// Gives the places from `start` to `end - 1` a copy of `policy`. If `policy` is null, removes
    /// their policy. Returns 0, or −1 with errno.
    pinfold_pages_set_policy(start: u64, end: u64, policy: Option<&CPolicy>) -> c_int =
        |this| answer(this.set_policy(start..end, policy_of(policy)));
    /// Gives the places whose range has no policy a copy of `policy`. If `policy` is null, removes
    /// that policy. Returns 0, or −1 with errno.
    pinfold_pages_set_default_policy(policy: Option<&CPolicy>) -> c_int =
        |this| answer(this.set_default_policy(policy_of(policy)));
}

methods! { &Pages, "`this` is a pool of this API that has not been destroyed.":
    /// Sets whether each allocation of a place without a policy asks the kernel for the calling
    /// thread's policy. Costs a system call for each such allocation.
    pinfold_pages_set_following_threads(following: c_int) =
        |this| this.set_following_threads(following != 0);
    /// Returns the size of a page in bytes.
    pinfold_pages_size() -> usize = |this| this.page_size();
    /// Allocates a page for a place. Returns null with ENOMEM if there is no memory. Costs one
    /// critical section, and a lookup of the place's policy.
    pinfold_pages_alloc(place: u64) -> *mut c_void = |this| address_or_enomem(this.alloc(place));
    /// Allocates a zeroed page for a place, like [`pinfold_pages_alloc`].
    pinfold_pages_alloc_zeroed(place: u64) -> *mut c_void =
        |this| address_or_enomem(this.alloc_zeroed(place));
}

/// Frees a page. Does nothing if `page` is null. Costs one critical section.
///
/// # Safety
///
/// `this` is a pool of this API that has not been destroyed. The page came from this pool, and is
/// not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_free(this: &Pages, page: *mut c_void) {
    if let Some(page) = NonNull::new(page.cast()) {
        // SAFETY: the caller passes ownership of a page from this pool, which has not been
        // destroyed.
        unsafe { this.free(page) };
    }
}

/// Returns the node from which the pool asked for the memory of a page. Returns −1 with EINVAL if
/// `page` is null, or with ENOENT if the kernel chose the node. Only computes: takes no lock and
/// makes no system call.
///
/// # Safety
///
/// `this` is a pool of this API that has not been destroyed. The page came from this pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_node_of(this: &Pages, page: *mut c_void) -> c_int {
    let Some(page) = NonNull::new(page.cast()) else {
        return failed(libc::EINVAL);
    };
    match this.node_of(page) {
        Some(node) => node.0 as c_int,
        None => failed(libc::ENOENT),
    }
}
