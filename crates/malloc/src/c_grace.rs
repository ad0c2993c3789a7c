//! The C API of readers, and of frees that wait for them. Functions that fail set errno to ENOTSUP: the kernel cannot fence.

use crate::c_cache::CCache;
use crate::heap::set_errno;
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use pinfold::slab::grace::{self, Guard};
use pinfold_rseq::FenceError;

/// A reader as C holds it, in two registers: a guard's words.
#[repr(C)]
#[derive(Debug)]
pub struct CReader([u64; 2]);

fn answer(result: Result<(), FenceError>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(_) => {
            set_errno(libc::ENOTSUP);
            -1
        }
    }
}

/// `srcu_read_lock`: becomes a reader. A call and one critical section.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_grace_enter() -> CReader {
    CReader(grace::enter().into_words())
}

/// `srcu_read_unlock`: is a reader no more. A call and one critical section.
///
/// # Safety
///
/// `reader` came from [`pinfold_grace_enter`] in this thread, and leaves only once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_grace_leave(reader: CReader) {
    // SAFETY: the caller's promise.
    drop(unsafe { Guard::from_words(reader.0) });
}

/// `synchronize_srcu`: returns when every reader of this moment has left; 0, or −1 with ENOTSUP.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_grace_synchronize() -> c_int {
    answer(grace::synchronize())
}

/// `kfree_rcu`: takes an object back when every reader of this moment has left; null is none.
///
/// # Safety
///
/// `this` was created and not destroyed yet; the object came from it, readers that enter from now on do not find it, and nobody
/// frees it again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_free_deferred(this: *const CCache, object: *mut c_void) {
    if let Some(object) = NonNull::new(object.cast()) {
        // SAFETY: the caller's promise.
        unsafe { (*this).cache.free_deferred(object) };
    }
}

/// `kvfree_rcu_barrier`: returns when everything freed deferred to this cache before is free; 0, or −1 with ENOTSUP.
///
/// # Safety
///
/// `this` was created and not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_flush_deferred(this: *const CCache) -> c_int {
    // SAFETY: the caller's promise.
    answer(unsafe { (*this).cache.flush_deferred() })
}
