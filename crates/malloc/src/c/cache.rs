//! The C API of object caches.
//!
//! A C handle is a block of one cache line that contains a [`KmemCache`]. The fast paths read one
//! word of that line.
//!
//! Functions that fail set errno: EINVAL (an invalid argument), E2BIG (the object is too large),
//! ENOSPC (too many caches), ENOMEM (no memory), EBUSY (objects are in use) or ENOTSUP (the kernel
//! cannot interrupt CPUs for this process).

use super::align::{CACHE_LINE, HWCACHE_ALIGN, align_of_objects};
use super::report::{Each, tell, tell_report};
use super::support::{
    AsErrno, address_or_enomem, boxed_or_errno, failed, methods, null_with, unboxed,
};
use super::text::{NAME_ROOM, c_name, str_of};
use core::alloc::Layout;
use core::ffi::{c_char, c_int, c_uint, c_void};
use core::ptr::NonNull;
use pinfold::internal::set_errno;
use pinfold::mempolicy::Mempolicy;
use pinfold::slab::debug::Report;
use pinfold::slab::{DebugFlags, KmemCache, Leak};

/// The checks with their bits in `pinfold.h`.
const CHECKS: [(c_uint, DebugFlags); 5] = [
    (1, DebugFlags::CONSISTENCY),
    (2, DebugFlags::RED_ZONE),
    (4, DebugFlags::POISON),
    (8, DebugFlags::USER),
    (16, DebugFlags::TRACE),
];
pub(crate) const HARDENED: c_uint = 1 << 8;
pub(crate) const NOT_HARDENED: c_uint = 1 << 9;
const PROFILED: c_uint = 1 << 11;
const FLAGS: c_uint = 31 | HARDENED | NOT_HARDENED | HWCACHE_ALIGN | PROFILED;

/// A C function that initialises an object.
pub type Constructor = unsafe extern "C" fn(*mut c_void);

/// A cache behind a C handle.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CCache {
    pub(crate) cache: KmemCache,
    /// Size of an object in bytes, as the program gave it.
    size: usize,
    name: [u8; NAME_ROOM],
    constructed: bool,
}

/// The handle is exactly one cache line.
const _: () = assert!(size_of::<CCache>() == CACHE_LINE);

/// Creates a cache of objects of `size` bytes (`kmem_cache_create`). If `align` is 0, an object
/// suits every type of that size with a fundamental alignment.
///
/// Returns null with EINVAL, E2BIG, ENOSPC or ENOMEM. Costs a descriptor of some hundred bytes, or
/// the descriptor of a destroyed cache.
///
/// # Safety
///
/// `name` is null or a C string. The constructor initialises an object at the address that it gets.
/// It does not unwind, and does not use this cache.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_create(
    name: *const c_char,
    size: usize,
    align: usize,
    flags: c_uint,
    constructor: Option<Constructor>,
) -> *mut CCache {
    // SAFETY: the caller promises a C string or null, and a constructor that initialises an object.
    unsafe { create(name, (size, align), flags, constructor, None) }
}

/// Creates a cache. If there is a `policy`, it places the cache's memory.
///
/// # Safety
///
/// `name` is null or a C string. The constructor initialises an object at the address that it gets.
/// It does not unwind, and does not use this cache.
pub(crate) unsafe fn create(
    name: *const c_char,
    (size, align): (usize, usize),
    flags: c_uint,
    constructor: Option<Constructor>,
    policy: Option<&Mempolicy>,
) -> *mut CCache {
    let both = HARDENED | NOT_HARDENED;
    if size == 0 || flags & !FLAGS != 0 || flags & both == both {
        return null_with(libc::EINVAL);
    }
    // SAFETY: the caller promises a C string or null.
    let name = unsafe { str_of(name) };
    let (Some(name), Some(align)) = (name, align_of_objects(size, align, flags)) else {
        return null_with(libc::EINVAL);
    };
    let Ok(layout) = Layout::from_size_align(size, align) else {
        return null_with(libc::E2BIG);
    };
    let wanted = CHECKS.iter().filter(|check| flags & check.0 != 0);
    let checks = wanted.fold(DebugFlags::NONE, |checks, check| checks | check.1);
    let profiled = flags & PROFILED != 0;
    let builder = KmemCache::builder(name, layout);
    let mut builder = builder.debug(checks).profiled(profiled);
    if flags & both != 0 {
        builder = builder.hardened(flags & HARDENED != 0);
    }
    if let Some(policy) = policy {
        builder = builder.policy(policy);
    }
    if let Some(constructor) = constructor {
        // SAFETY: the caller promises that the constructor initialises an object and does not
        // unwind.
        builder = unsafe { builder.c_constructor(constructor) };
    }
    boxed_or_errno(builder.build().map(|cache| CCache {
        name: c_name(cache.name()),
        cache,
        size,
        constructed: constructor.is_some(),
    }))
}

/// Ends a cache and gives its memory back (`kmem_cache_destroy`). Does nothing if `this` is null.
///
/// Returns 0, or −1 with the cache unchanged: EBUSY if objects have not come back, ENOTSUP if the
/// kernel cannot fence. Interrupts the CPUs that run threads of this process, once.
///
/// # Safety
///
/// `this` is null, or a cache of this API that has not been destroyed. No other thread uses the
/// cache, and it has no prefilled sheaf or pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_destroy(this: *mut CCache) -> c_int {
    if this.is_null() {
        return 0;
    }
    // SAFETY: the caller promises a cache that has not been destroyed. Below, either the value is
    // written back or the block is freed, so the cache has one owner.
    let cache = unsafe { (&raw const (*this).cache).read() };
    match cache.destroy() {
        Ok(()) => {
            // SAFETY: the block came from `boxed`. `destroy` consumed the cache, and the other
            // fields need no drop. So the block is freed as plain words.
            unsafe { unboxed(this.cast::<[u64; CACHE_LINE / 8]>()) };
            0
        }
        Err(Leak { objects, cache, .. }) => {
            // SAFETY: `read` above moved the value out of the field, and the block was not freed.
            unsafe { (&raw mut (*this).cache).write(cache) };
            failed(if objects > 0 {
                libc::EBUSY
            } else {
                libc::ENOTSUP
            })
        }
    }
}

/// Allocates an object (`kmem_cache_alloc`). Returns null with ENOMEM if there is no memory. Costs
/// one critical section.
///
/// # Safety
///
/// `this` is a cache of this API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_alloc(this: *const CCache) -> *mut c_void {
    // SAFETY: the caller promises a cache that has not been destroyed.
    match unsafe { (*this).cache.alloc_fast() } {
        Some(object) => object.as_ptr().cast(),
        // SAFETY: the caller promises a cache that has not been destroyed.
        None => unsafe { alloc_slow(this) },
    }
}

// The slow paths are `extern "C"` and cannot unwind, so the fast paths may end in a jump to them.
// These and the fast paths take pointers: with a reference, the compiler would load the cache's
// fields before the jump.
#[cold]
#[inline(never)]
unsafe extern "C" fn alloc_slow(this: *const CCache) -> *mut c_void {
    // SAFETY: the caller passes a cache that has not been destroyed.
    address_or_enomem(unsafe { (*this).cache.alloc() })
}

/// Allocates a zeroed object (`kmem_cache_zalloc`). Returns null with ENOMEM if there is no memory,
/// or with EINVAL if the cache has a constructor.
///
/// # Safety
///
/// `this` is a cache of this API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_zalloc(this: &CCache) -> *mut c_void {
    let (size, constructed) = (this.size, this.constructed);
    if constructed {
        return null_with(libc::EINVAL);
    }
    // SAFETY: the caller promises a cache that has not been destroyed.
    let object = unsafe { pinfold_cache_alloc(this) };
    if !object.is_null() {
        // SAFETY: the object was just allocated, and has `size` bytes.
        unsafe { object.write_bytes(0, size) };
    }
    object
}

methods! { &CCache, "`this` is a cache of this API that has not been destroyed.":
    /// Allocates an object in the memory of node `node`, or of the nearest node that has memory
    /// (`kmem_cache_alloc_node`). A `node` of −1 means the thread's own node. Returns null with
    /// ENOMEM if there is no memory, or with EINVAL if `node` is below −1. Takes the node's lock.
    pinfold_cache_alloc_node(node: c_int) -> *mut c_void = |this| {
        if node == -1 {
            // SAFETY: the caller promises a cache that has not been destroyed.
            return unsafe { pinfold_cache_alloc(this) };
        }
        let Ok(node) = usize::try_from(node) else {
            return null_with(libc::EINVAL);
        };
        address_or_enomem(this.cache.alloc_node(node))
    };
    /// Allocates an object in the memory of node `node` only (`kmem_cache_alloc_node` with
    /// `__GFP_THISNODE`). Returns null with ENOMEM if the node has no memory, or with EINVAL if
    /// `node` is negative. Takes the node's lock.
    pinfold_cache_alloc_node_exact(node: c_int) -> *mut c_void = |this| {
        let Ok(node) = usize::try_from(node) else {
            return null_with(libc::EINVAL);
        };
        address_or_enomem(this.cache.alloc_node_exact(node))
    };
}

/// Frees an object (`kmem_cache_free`), or does nothing for null. Costs one critical section.
///
/// # Safety
///
/// `this` is a cache of this API that has not been destroyed. The object came from this cache, and
/// is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_free(this: *const CCache, object: *mut c_void) {
    let Some(object) = NonNull::new(object.cast()) else {
        return;
    };
    // SAFETY: the caller passes ownership of an object from this cache, which has not been
    // destroyed.
    if !unsafe { (*this).cache.free_fast(object) } {
        // SAFETY: the caller passes ownership of the object, and `free_fast` above has not freed
        // it.
        unsafe { free_slow(this, object) };
    }
}

#[cold]
#[inline(never)]
unsafe extern "C" fn free_slow(this: *const CCache, object: NonNull<u8>) {
    // SAFETY: the caller passes ownership of an object from this cache, which has not been
    // destroyed.
    unsafe { (*this).cache.free(object) };
}

/// Allocates `count` objects into `objects` (`kmem_cache_alloc_bulk`), many in one critical
/// section.
///
/// Returns how many objects it allocated. If these are fewer than `count`, sets errno to ENOMEM.
///
/// # Safety
///
/// `this` is a cache of this API that has not been destroyed. `objects` is writable for `count`
/// pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_alloc_bulk(
    this: &CCache,
    count: usize,
    objects: *mut *mut c_void,
) -> usize {
    if count == 0 {
        return 0;
    }
    // SAFETY: the caller promises room for `count` pointers. They are set to null before the slice
    // is made.
    let objects = unsafe {
        objects.write_bytes(0, count);
        core::slice::from_raw_parts_mut(objects.cast(), count)
    };
    let got = this.cache.alloc_bulk(objects);
    if got < count {
        set_errno(libc::ENOMEM);
    }
    got
}

/// Frees `count` objects (`kmem_cache_free_bulk`), many in one critical section.
///
/// # Safety
///
/// `this` is a cache of this API that has not been destroyed. `objects` is readable for `count`
/// pointers. Each points to an object of this cache that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_free_bulk(
    this: &CCache,
    count: usize,
    objects: *const *mut c_void,
) {
    if count > 0 {
        // SAFETY: the caller promises `count` pointers to objects of this cache, and gives them up.
        unsafe {
            let objects = core::slice::from_raw_parts(objects.cast(), count);
            this.cache.free_bulk(objects);
        }
    }
}

methods! { &CCache, "`this` is a cache of this API that has not been destroyed.":
    /// Gives the cache's free memory back to the system (`kmem_cache_shrink`), including the
    /// objects in every CPU's sheaves.
    ///
    /// Returns how many slabs went back, or −1 with ENOTSUP if the kernel cannot fence. Interrupts
    /// the CPUs that run threads of this process, once.
    pinfold_cache_shrink() -> isize = |this| {
        match this.cache.shrink() {
            Ok(slabs) => slabs as isize,
            Err(error) => failed(error.as_errno()) as isize,
        }
    };
    /// Sets how many objects a sheaf of the cache holds: from 4 to 125. Applies to sheaves that are
    /// filled or emptied from now on.
    pinfold_cache_set_sheaf_capacity(objects: usize) =
        |this| this.cache.set_sheaf_capacity(objects);
}

/// Sets how many bytes the sheaves of all caches together may hold on one CPU.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_slab_set_sheaf_budget(bytes: usize) {
    pinfold::slab::set_sheaf_budget(bytes);
}

/// Makes a Rust callback that calls the C callback `each`. The result does nothing if `each` is
/// `None`.
///
/// # Safety
///
/// `each` is `None` or can be called with `context`, and does not unwind.
unsafe fn teller(each: Option<Each>, context: *mut c_void) -> impl FnMut(&Report<'_>) {
    move |report| {
        if let Some(each) = each {
            // SAFETY: the caller of `teller` promises that `each` can be called with `context`.
            tell_report(report, |told| unsafe { each(told, context) });
        }
    }
}

/// Checks the cache's records and objects. Calls `each` for the first sixteen faults. Returns the
/// number of all faults.
///
/// # Safety
///
/// `this` is a cache of this API that has not been destroyed. `each` is null or can be called with
/// `context`, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_validate(
    this: &CCache,
    each: Option<Each>,
    context: *mut c_void,
) -> usize {
    let mut told = false;
    // SAFETY: the caller promises a callback that takes `context`.
    let mut teller = unsafe { teller(each, context) };
    let outcome = this.cache.validate_with(|report| {
        told = true;
        teller(report);
    });
    let Err(fault) = outcome else {
        return 0;
    };
    if let (Some(each), false) = (each, told) {
        let place = (fault.address, this.size);
        tell((fault.what, this.cache.name()), place, &fault, |told| {
            // SAFETY: the caller promises that `each` can be called with `context`.
            unsafe { each(told, context) };
        });
    }
    fault.errors
}

/// Calls `each` for the first sixteen objects in use of a debugged cache. With
/// `PINFOLD_SLAB_STORE_USER`, each report says where the object was allocated.
///
/// Returns how many objects are in use, or 0 for a cache that makes no checks.
///
/// # Safety
///
/// `this` is a cache of this API that has not been destroyed. `each` is null or can be called with
/// `context`, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_leaks(
    this: &CCache,
    each: Option<Each>,
    context: *mut c_void,
) -> usize {
    // SAFETY: the caller promises a callback that takes `context`.
    this.cache.leaks_with(unsafe { teller(each, context) })
}

methods! { &CCache, "`this` is a cache of this API that has not been destroyed.":
    /// Returns how many objects are in use, including the free objects that wait in sheaves on CPUs
    /// and nodes.
    pinfold_cache_in_use() -> usize = |this| this.cache.in_use();
    /// Returns the size of an object in bytes, as given at creation (`kmem_cache_size`).
    pinfold_cache_size() -> usize = |this| this.size;
    /// Returns the first 32 bytes of the name that was given at creation. Valid until the cache is
    /// destroyed.
    pinfold_cache_name() -> *const c_char = |this| (&raw const this.name).cast();
    /// Returns the checks that the cache makes, including those that the environment selected.
    pinfold_cache_debug_flags() -> c_uint = |this| bits_of(this.cache.debug_flags());
}

/// Returns the bits of `checks` in `pinfold.h`.
pub(crate) fn bits_of(checks: DebugFlags) -> c_uint {
    let made = CHECKS.iter().filter(|check| checks.contains(check.1));
    made.fold(0, |flags, check| flags | check.0)
}
