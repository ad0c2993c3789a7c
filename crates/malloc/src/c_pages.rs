//! The C API of pages by policy. Functions that fail set errno: EINVAL for bad arguments, ENOSPC for too many caches, ENOMEM for want of
//! memory, EBUSY for pages in use, ENOTSUP where the kernel offers no fence, ENOENT for a page that the kernel placed.

use crate::c_cache::null_with;
use crate::c_counter::{boxed, unboxed};
use crate::c_policy::{CPolicy, failed, policy_of};
use crate::c_shared::answer;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::NonNull;
use pinfold::pages::Pages;
use pinfold::slab::CacheError;

/// An arena of pages; null with errno.
///
/// # Safety
///
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_create(name: *const c_char) -> *mut Pages {
    if name.is_null() {
        return null_with(libc::EINVAL);
    }
    // SAFETY: the caller's promise.
    let Ok(name) = unsafe { CStr::from_ptr(name) }.to_str() else {
        return null_with(libc::EINVAL);
    };
    match Pages::new(name).map(boxed) {
        Ok(made) if !made.is_null() => made,
        Ok(_) | Err(CacheError::NoMemory) => null_with(libc::ENOMEM),
        Err(CacheError::TooMany) => null_with(libc::ENOSPC),
        Err(_) => null_with(libc::EINVAL),
    }
}

/// Ends an arena and gives its memory back; null is none. 0, or −1 with the arena as it was.
///
/// # Safety
///
/// Here and below: `this` was created and not destroyed yet. Nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_destroy(this: *mut Pages) -> c_int {
    // SAFETY: the caller's promise.
    let Some(pages) = (unsafe { this.as_ref() }) else {
        return 0;
    };
    let drained = pages.shrink();
    if pages.lists().any(|list| list.active > 0) {
        return failed(libc::EBUSY);
    }
    if drained.is_err() {
        return failed(libc::ENOTSUP);
    }
    // SAFETY: as above.
    unsafe { unboxed(this) };
    0
}

/// Gives the places from `start` to before `end` a copy of the policy; null takes theirs away. 0, or −1 with errno.
///
/// # Safety
///
/// As for [`pinfold_pages_destroy`]; others may use it. `policy` is null, or held by the caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_set_policy(
    this: *const Pages,
    start: u64,
    end: u64,
    policy: *const CPolicy,
) -> c_int {
    // SAFETY: the caller's promise.
    let (this, policy) = unsafe { (&*this, policy_of(policy)) };
    answer(this.set_policy(start..end, policy))
}

/// Bytes in a page.
///
/// # Safety
///
/// As for [`pinfold_pages_set_policy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_size(this: *const Pages) -> usize {
    // SAFETY: the caller's promise.
    unsafe { &*this }.page_size()
}

fn page_or_enomem(page: Option<NonNull<u8>>) -> *mut c_void {
    match page {
        Some(page) => page.as_ptr().cast(),
        None => null_with(libc::ENOMEM),
    }
}

/// A page for a place; null with ENOMEM.
///
/// # Safety
///
/// As for [`pinfold_pages_set_policy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_alloc(this: *const Pages, place: u64) -> *mut c_void {
    // SAFETY: the caller's promise.
    page_or_enomem(unsafe { &*this }.alloc(place))
}

/// As [`pinfold_pages_alloc`], a page of zeroes.
///
/// # Safety
///
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_alloc_zeroed(this: *const Pages, place: u64) -> *mut c_void {
    // SAFETY: the caller's promise.
    page_or_enomem(unsafe { &*this }.alloc_zeroed(place))
}

/// Takes a page back; null is none.
///
/// # Safety
///
/// As for [`pinfold_pages_set_policy`]; the page came from this arena, and nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_free(this: *const Pages, page: *mut c_void) {
    if let Some(page) = NonNull::new(page.cast()) {
        // SAFETY: the caller's promise.
        unsafe { (*this).free(page) };
    }
}

/// The node that a page was asked of; −1 with ENOENT when the kernel placed it.
///
/// # Safety
///
/// As for [`pinfold_pages_set_policy`]; the page came from this arena.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_pages_node_of(this: *const Pages, page: *mut c_void) -> c_int {
    let Some(page) = NonNull::new(page.cast()) else {
        return failed(libc::EINVAL);
    };
    // SAFETY: the caller's promise.
    match unsafe { &*this }.node_of(page) {
        Some(node) => node.0 as c_int,
        None => failed(libc::ENOENT),
    }
}
