//! The C API of readers, and of frees that wait for readers. A *reader* is a thread that may look
//! at objects while other threads free them. Functions that fail set errno to ENOTSUP: the kernel
//! cannot fence (interrupt the other CPUs for this process).

use super::cache::CCache;
use super::support::answer;
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use pinfold::slab::grace::{self, Guard};

/// The two words of a [`Guard`], which the C program keeps while the thread is a reader. They are
/// passed in two registers.
#[repr(C)]
#[derive(Debug)]
pub struct CReader([u64; 2]);

/// Makes the calling thread a reader (`srcu_read_lock`). Costs a call and one critical section.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_grace_enter() -> CReader {
    CReader(grace::enter().into_words())
}

/// Ends a reader that [`pinfold_grace_enter`] began (`srcu_read_unlock`). Costs a call and one
/// critical section.
///
/// # Safety
///
/// `reader` came from [`pinfold_grace_enter`] in this thread, and is passed to this function once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_grace_leave(reader: CReader) {
    // SAFETY: the caller promises words of a guard of this thread, and passes them once.
    drop(unsafe { Guard::from_words(reader.0) });
}

/// Waits until all readers that are inside now have left (`synchronize_srcu`). Returns 0, or −1
/// with ENOTSUP.
///
/// If no CPU is isolated, interrupts the CPUs that run threads of this process, at each step. Must
/// not be called by a reader or in a signal handler.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_grace_synchronize() -> c_int {
    answer(grace::synchronize())
}

/// Frees an object when all readers that are inside now have left (`kfree_rcu`). Does nothing if
/// `object` is null. Costs what `pinfold_cache_free` costs.
///
/// # Safety
///
/// `this` is a cache of this API that has not been destroyed. The object came from this cache, and
/// is not freed again. Readers that enter from now on do not find it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_free_deferred(this: &CCache, object: *mut c_void) {
    if let Some(object) = NonNull::new(object.cast()) {
        // SAFETY: the caller passes ownership of an object from this cache that only earlier
        // readers may look at.
        unsafe { this.cache.free_deferred(object) };
    }
}

/// Waits until the cache has freed all objects that were given to `pinfold_cache_free_deferred`
/// before this call (`kvfree_rcu_barrier`). Returns 0, or −1 with ENOTSUP. Must not be called by a
/// reader or in a signal handler.
///
/// # Safety
///
/// `this` is a cache of this API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_flush_deferred(this: &CCache) -> c_int {
    answer(this.cache.flush_deferred())
}
