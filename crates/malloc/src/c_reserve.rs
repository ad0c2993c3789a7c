//! The C API of objects that are certain: prefilled sheaves and memory pools.
//!
//! A C handle is a Rust one in a block of its own, which refers to the cache where that lies in its block. Functions that fail set
//! errno to ENOMEM.

use crate::c_cache::{CCache, null_with};
use crate::c_counter::{boxed, unboxed};
use crate::heap::set_errno;
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use pinfold::slab::{KmemCache, MemPool, OutOfMemory, Prefilled};

/// A sheaf as C holds it. Not for as long as the program, but for as long as C keeps the cache, as it promises.
pub type CSheaf = Prefilled<'static>;
/// A pool as C holds it; as [`CSheaf`].
pub type CPool = MemPool<'static>;

/// Whether so many objects could ever be: a number that was negative is refused before all memory has been fetched for it.
fn conceivable(cache: &KmemCache, objects: usize) -> bool {
    objects <= isize::MAX as usize / cache.stride().max(1)
}

/// A handle's block, or null with ENOMEM.
fn handle<T>(made: Result<T, OutOfMemory>) -> *mut T {
    match made {
        Ok(made) => boxed(made),
        Err(OutOfMemory) => null_with(libc::ENOMEM),
    }
}

fn object_or_enomem(object: Option<NonNull<u8>>) -> *mut c_void {
    match object {
        Some(object) => object.as_ptr().cast(),
        None => null_with(libc::ENOMEM),
    }
}

fn answer(result: Result<(), OutOfMemory>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(OutOfMemory) => {
            set_errno(libc::ENOMEM);
            -1
        }
    }
}

/// `kmem_cache_prefill_sheaf`: sets `n` objects of `cache` apart; null with ENOMEM.
///
/// # Safety
///
/// Here and below: `cache` was created, and is not destroyed before the sheaf has been returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_prefill(cache: *const CCache, n: usize) -> *mut CSheaf {
    // SAFETY: the caller's promise.
    let cache: &'static KmemCache = unsafe { &(*cache).cache };
    if !conceivable(cache, n) {
        return null_with(libc::ENOMEM);
    }
    handle(cache.prefill(n))
}

/// `kmem_cache_alloc_from_sheaf`: an object that was set apart; null with ENOMEM when none is left.
///
/// # Safety
///
/// Here and below: `this` was prefilled and not returned yet, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_sheaf_alloc(this: *mut CSheaf) -> *mut c_void {
    // SAFETY: the caller's promise.
    object_or_enomem(unsafe { (*this).alloc() })
}

/// `kmem_cache_sheaf_size`: how many allocations are certain.
///
/// # Safety
///
/// As for [`pinfold_sheaf_alloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_sheaf_len(this: *const CSheaf) -> usize {
    // SAFETY: the caller's promise.
    unsafe { (*this).len() }
}

/// `kmem_cache_refill_sheaf`: fetches what is missing for `n` certain allocations of `cache`; 0, or −1 with ENOMEM.
///
/// # Safety
///
/// As for [`pinfold_sheaf_alloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_sheaf_refill(this: *mut CSheaf, n: usize) -> c_int {
    // SAFETY: the caller's promise.
    let this = unsafe { &mut *this };
    if !conceivable(this.cache(), n) {
        return answer(Err(OutOfMemory));
    }
    answer(this.refill(n))
}

/// `kmem_cache_return_sheaf`: ends a sheaf, and gives what is left of it back; null is none.
///
/// # Safety
///
/// As for [`pinfold_sheaf_alloc`]; nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_sheaf_return(this: *mut CSheaf) {
    // SAFETY: the caller's promise.
    unsafe { unboxed(this) };
}

/// `mempool_create`: a reserve of `min_nr` objects of `cache`; null with ENOMEM.
///
/// # Safety
///
/// `cache` was created, and is not destroyed before the pool is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_create(cache: *const CCache, min_nr: usize) -> *mut CPool {
    // SAFETY: the caller's promise.
    let cache: &'static KmemCache = unsafe { &(*cache).cache };
    if !conceivable(cache, min_nr) {
        return null_with(libc::ENOMEM);
    }
    handle(MemPool::new(cache, min_nr))
}

/// `mempool_alloc`, not waiting: an object of the cache, or of the reserve; null with ENOMEM.
///
/// # Safety
///
/// Here and below: `this` was created and not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_alloc(this: *const CPool) -> *mut c_void {
    // SAFETY: the caller's promise.
    object_or_enomem(unsafe { (*this).alloc() })
}

/// `mempool_alloc`, waiting until there is an object.
///
/// # Safety
///
/// As for [`pinfold_mempool_alloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_alloc_wait(this: *const CPool) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { (*this).alloc_wait().as_ptr().cast() }
}

/// `mempool_alloc_preallocated`: an object of the reserve; null with ENOMEM when that is empty.
///
/// # Safety
///
/// As for [`pinfold_mempool_alloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_alloc_preallocated(this: *const CPool) -> *mut c_void {
    // SAFETY: the caller's promise.
    object_or_enomem(unsafe { (*this).alloc_preallocated() })
}

/// `mempool_free`: takes an object back, into the reserve first; null is none.
///
/// # Safety
///
/// As for [`pinfold_mempool_alloc`]; the object came from this pool or its cache, and nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_free(this: *const CPool, object: *mut c_void) {
    if let Some(object) = NonNull::new(object.cast()) {
        // SAFETY: the caller's promise.
        unsafe { (*this).free(object) };
    }
}

/// `mempool_resize`: keeps `min_nr` objects from now on; 0, or −1 with ENOMEM.
///
/// # Safety
///
/// As for [`pinfold_mempool_alloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_resize(this: *const CPool, min_nr: usize) -> c_int {
    // SAFETY: the caller's promise.
    let this = unsafe { &*this };
    if !conceivable(this.cache(), min_nr) {
        return answer(Err(OutOfMemory));
    }
    answer(this.resize(min_nr))
}

/// How many objects the reserve has.
///
/// # Safety
///
/// As for [`pinfold_mempool_alloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_available(this: *const CPool) -> usize {
    // SAFETY: the caller's promise.
    unsafe { (*this).kept() }
}

/// `mempool_destroy`: gives the reserve back to the cache; null is none.
///
/// # Safety
///
/// As for [`pinfold_mempool_alloc`]; nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_destroy(this: *mut CPool) {
    // SAFETY: the caller's promise.
    unsafe { unboxed(this) };
}
