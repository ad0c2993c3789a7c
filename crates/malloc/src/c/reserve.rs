//! The C API of prefilled sheaves and memory pools: objects set aside for work that must not fail.
//!
//! A C handle is a block that contains the Rust value. The value refers to the cache in the cache's
//! own block. Functions that fail set errno to ENOMEM.

use super::cache::CCache;
use super::support::{address_or_enomem, answer, boxed_or_errno, methods, unboxed};
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use pinfold::slab::{KmemCache, MemPool, OutOfMemory, Prefilled};

/// A prefilled sheaf behind a C handle. The lifetime `'static` is not real: the C program promises
/// to keep the cache as long as the sheaf.
pub type CPrefilled = Prefilled<'static>;
/// A pool behind a C handle. The lifetime `'static` is not real: the C program promises to keep the
/// cache as long as the pool.
pub type CPool = MemPool<'static>;

/// Checks that `objects` objects fit into the address space. A negative number from C arrives here
/// as a huge one. The check refuses it before the cache takes all memory for it.
fn conceivable(cache: &KmemCache, objects: usize) -> Result<(), OutOfMemory> {
    let fit = objects <= isize::MAX as usize / cache.stride().max(1);
    fit.then_some(()).ok_or(OutOfMemory)
}

/// Allocates `n` objects of `cache` into a new sheaf (`kmem_cache_prefill_sheaf`). Returns null
/// with ENOMEM if there is no memory.
///
/// # Safety
///
/// `cache` is a cache of this API, and is not destroyed before the sheaf has been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_prefill(cache: *const CCache, n: usize) -> *mut CPrefilled {
    // SAFETY: the caller promises to keep the cache as long as the sheaf that refers to it.
    let cache: &'static KmemCache = unsafe { &(*cache).cache };
    boxed_or_errno(conceivable(cache, n).and_then(|()| cache.prefill(n)))
}

methods! { &mut CPrefilled, "`this` is a sheaf of this API that has not been destroyed. No other thread uses it.":
    /// Takes an object from a sheaf (`kmem_cache_alloc_from_sheaf`). Returns null with ENOMEM if
    /// the sheaf is empty. Costs about ten instructions.
    pinfold_prefilled_alloc() -> *mut c_void = |this| address_or_enomem(this.alloc());
    /// Allocates objects until a sheaf holds `n` objects (`kmem_cache_refill_sheaf`). Returns 0, or
    /// −1 with ENOMEM.
    pinfold_prefilled_refill(n: usize) -> c_int =
        |this| answer(conceivable(this.cache(), n).and_then(|()| this.refill(n)));
}

methods! { &CPrefilled, "`this` is a sheaf of this API that has not been destroyed. No other thread uses it.":
    /// Returns how many objects a sheaf holds (`kmem_cache_sheaf_size`).
    pinfold_prefilled_len() -> usize = |this| this.len();
}

/// Ends a sheaf and frees its objects (`kmem_cache_return_sheaf`). Does nothing if `this` is null.
///
/// # Safety
///
/// `this` is null, or a sheaf of this API that has not been destroyed. It is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_prefilled_destroy(this: *mut CPrefilled) {
    // SAFETY: the caller promises null or a value of this API, which came from `boxed`, and gives
    // it up.
    unsafe { unboxed(this) };
}

/// Creates a pool with a reserve of `min_nr` objects of `cache` (`mempool_create`). Returns null
/// with ENOMEM if there is no memory.
///
/// # Safety
///
/// `cache` is a cache of this API, and is not destroyed before the pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_create(cache: *const CCache, min_nr: usize) -> *mut CPool {
    // SAFETY: the caller promises to keep the cache as long as the pool that refers to it.
    let cache: &'static KmemCache = unsafe { &(*cache).cache };
    boxed_or_errno(conceivable(cache, min_nr).and_then(|()| MemPool::new(cache, min_nr)))
}

methods! { &CPool, "`this` is a pool of this API that has not been destroyed.":
    /// Allocates an object from the cache, or from the reserve if the cache has no memory
    /// (`mempool_alloc` without waiting). Returns null with ENOMEM if the reserve is empty too.
    pinfold_mempool_alloc() -> *mut c_void = |this| address_or_enomem(this.alloc());
    /// Allocates an object, and waits until there is one (`mempool_alloc`). Never returns null.
    /// Must not be called in a signal handler.
    pinfold_mempool_alloc_wait() -> *mut c_void = |this| this.alloc_wait().as_ptr().cast();
    /// Allocates an object from the reserve (`mempool_alloc_preallocated`). Returns null with
    /// ENOMEM if the reserve is empty. Takes the pool's lock.
    pinfold_mempool_alloc_preallocated() -> *mut c_void =
        |this| address_or_enomem(this.alloc_preallocated());
}

/// Frees an object (`mempool_free`): to the reserve, or to the cache if the reserve is full. Does
/// nothing if `object` is null.
///
/// # Safety
///
/// `this` is a pool of this API that has not been destroyed. The object came from this pool or its
/// cache, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_free(this: &CPool, object: *mut c_void) {
    if let Some(object) = NonNull::new(object.cast()) {
        // SAFETY: the caller passes ownership of an object from this pool, which has not been
        // destroyed.
        unsafe { this.free(object) };
    }
}

/// Allocates `count` objects, or none (`mempool_alloc_bulk` without waiting). Returns 0, or −1 with
/// ENOMEM.
///
/// # Safety
///
/// `this` is a pool of this API that has not been destroyed. `objects` is writable for `count`
/// pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_alloc_bulk(
    this: &CPool,
    count: usize,
    objects: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller promises room for `count` pointers.
    let slots = unsafe { slots(count, objects) };
    answer(slots.map_or(Ok(()), |slots| this.alloc_bulk(slots)))
}

/// Allocates `count` objects, and waits until there are so many (`mempool_alloc_bulk`). Must not be
/// called in a signal handler.
///
/// # Safety
///
/// `this` is a pool of this API that has not been destroyed. `objects` is writable for `count`
/// pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_alloc_bulk_wait(
    this: &CPool,
    count: usize,
    objects: *mut *mut c_void,
) {
    // SAFETY: the caller promises room for `count` pointers.
    if let Some(slots) = unsafe { slots(count, objects) } {
        this.alloc_bulk_wait(slots);
    }
}

/// Returns `count` slots at `objects`, which are set to null, or `None` if `count` is 0.
///
/// # Safety
///
/// `objects` is writable for `count` pointers, for the lifetime of the result.
unsafe fn slots<'a>(count: usize, objects: *mut *mut c_void) -> Option<&'a mut [*mut u8]> {
    // SAFETY: the caller promises room for `count` pointers. They are set to null before the slice
    // is made.
    (count > 0).then(|| unsafe {
        objects.write_bytes(0, count);
        core::slice::from_raw_parts_mut(objects.cast(), count)
    })
}

/// Frees `count` objects (`mempool_free_bulk`): as many as the reserve lacks to the reserve, and
/// the others to the cache.
///
/// # Safety
///
/// `this` is a pool of this API that has not been destroyed. `objects` is readable for `count`
/// pointers. Each points to an object of this pool or its cache that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_free_bulk(
    this: &CPool,
    count: usize,
    objects: *const *mut c_void,
) {
    if count > 0 {
        // SAFETY: the caller promises `count` pointers to objects of this pool, and gives them up.
        unsafe { this.free_bulk(core::slice::from_raw_parts(objects.cast(), count)) };
    }
}

methods! { &CPool, "`this` is a pool of this API that has not been destroyed.":
    /// Sets the size of the reserve to `min_nr` objects (`mempool_resize`). Returns 0, or −1 with
    /// ENOMEM.
    pinfold_mempool_resize(min_nr: usize) -> c_int =
        |this| answer(conceivable(this.cache(), min_nr).and_then(|()| this.resize(min_nr)));
    /// Returns how many objects the reserve holds. Takes the pool's lock.
    pinfold_mempool_available() -> usize = |this| this.kept();
}

/// Ends a pool and frees its reserve to the cache (`mempool_destroy`). Does nothing if `this` is
/// null.
///
/// # Safety
///
/// `this` is null, or a pool of this API that has not been destroyed. It is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_mempool_destroy(this: *mut CPool) {
    // SAFETY: the caller promises null or a value of this API, which came from `boxed`, and gives
    // it up.
    unsafe { unboxed(this) };
}
