//! The C API of object caches: what `pinfold.h` declares of them.
//!
//! A C handle is a Rust one in a block of its own from `heap`, a cache line, from which the fast paths read a word. Functions
//! that fail set errno: EINVAL for bad arguments, E2BIG for objects that are too large, ENOSPC for too many caches, ENOMEM for want of
//! memory, EBUSY for objects in use, ENOTSUP where the kernel offers no fence.

use crate::c_align::{HWCACHE_ALIGN, align_of_objects};
use crate::c_counter::{boxed, unboxed};
use crate::c_report::{Each, NAME_ROOM, c_name, tell, tell_report};
use crate::heap::set_errno;
use core::alloc::Layout;
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ptr::{NonNull, null_mut};
use pinfold::mempolicy::Mempolicy;
use pinfold::slab::debug::Report;
use pinfold::slab::{CacheError, DebugFlags, KmemCache, Leak};

/// Each check with its bit in the header.
const CHECKS: [(c_uint, DebugFlags); 5] = [
    (1, DebugFlags::CONSISTENCY),
    (2, DebugFlags::RED_ZONE),
    (4, DebugFlags::POISON),
    (8, DebugFlags::USER),
    (16, DebugFlags::TRACE),
];
pub(crate) const HARDENED: c_uint = 1 << 8;
const NOT_HARDENED: c_uint = 1 << 9;
const FLAGS: c_uint = 31 | HARDENED | NOT_HARDENED | HWCACHE_ALIGN;

const CACHE_LINE: usize = 64;

/// A constructor of C's.
pub type Constructor = unsafe extern "C" fn(*mut c_void);

/// A cache as C holds it.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CCache {
    pub(crate) cache: KmemCache,
    /// Bytes of an object that the program uses.
    size: usize,
    name: [u8; NAME_ROOM],
    constructed: bool,
}

/// The block is that line.
const _: () = assert!(size_of::<CCache>() == CACHE_LINE);

pub(crate) fn null_with<T>(errno: c_int) -> *mut T {
    set_errno(errno);
    null_mut()
}

/// `kmem_cache_create`: a cache of objects of `size` bytes. An alignment of 0 suits any type of that size.
///
/// # Safety
///
/// `name` is null or a C string. The constructor initialises an object at the address it is given, does not unwind and does not use
/// this cache.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_create(
    name: *const c_char,
    size: usize,
    align: usize,
    flags: c_uint,
    constructor: Option<Constructor>,
) -> *mut CCache {
    // SAFETY: the caller's promise.
    unsafe { create(name, (size, align), flags, constructor, None) }
}

/// A cache, its memory placed by a policy if there is one.
///
/// # Safety
///
/// As for [`pinfold_cache_create`].
pub(crate) unsafe fn create(
    name: *const c_char,
    (size, align): (usize, usize),
    flags: c_uint,
    constructor: Option<Constructor>,
    policy: Option<&Mempolicy>,
) -> *mut CCache {
    let both = HARDENED | NOT_HARDENED;
    if name.is_null() || size == 0 || flags & !FLAGS != 0 || flags & both == both {
        return null_with(libc::EINVAL);
    }
    // SAFETY: the caller's promise.
    let Ok(name) = unsafe { CStr::from_ptr(name) }.to_str() else {
        return null_with(libc::EINVAL);
    };
    let Some(align) = align_of_objects(size, align, flags) else {
        return null_with(libc::EINVAL);
    };
    let Ok(layout) = Layout::from_size_align(size, align) else {
        return null_with(libc::E2BIG);
    };
    let wanted = CHECKS.iter().filter(|check| flags & check.0 != 0);
    let checks = wanted.fold(DebugFlags::NONE, |checks, check| checks | check.1);
    let mut builder = KmemCache::builder(name, layout).debug(checks);
    if flags & both != 0 {
        builder = builder.hardened(flags & HARDENED != 0);
    }
    if let Some(policy) = policy {
        builder = builder.policy(policy);
    }
    if let Some(constructor) = constructor {
        // SAFETY: the caller's promise.
        builder = unsafe { builder.c_constructor(constructor) };
    }
    match builder.build() {
        Ok(cache) => boxed(CCache {
            name: c_name(cache.name()),
            cache,
            size,
            constructed: constructor.is_some(),
        }),
        Err(CacheError::TooLarge) => null_with(libc::E2BIG),
        Err(CacheError::TooMany) => null_with(libc::ENOSPC),
        Err(CacheError::NoMemory) => null_with(libc::ENOMEM),
        Err(CacheError::NoNodes) => null_with(libc::EINVAL),
    }
}

/// `kmem_cache_destroy`: ends a cache and gives its memory back; null is none. 0, or −1 with the cache as it was: EBUSY when
/// objects have not come back, ENOTSUP where what CPUs have cached cannot be taken from them.
///
/// # Safety
///
/// Here and below: `this` was created and not destroyed yet. Nobody uses the cache any more, and no sheaf or pool of it is left.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_destroy(this: *mut CCache) -> c_int {
    if this.is_null() {
        return 0;
    }
    // SAFETY: the caller's promise; what is read here is written again, or not used any more.
    let cache = unsafe { (&raw const (*this).cache).read() };
    match cache.destroy() {
        Ok(()) => {
            // SAFETY: the block came from `boxed`, and nothing else of it wants to be dropped.
            unsafe { unboxed(this.cast::<[u64; CACHE_LINE / 8]>()) };
            0
        }
        Err(Leak { objects, cache }) => {
            // SAFETY: the cache's place is there, and was read from.
            unsafe { (&raw mut (*this).cache).write(cache) };
            set_errno(if objects > 0 {
                libc::EBUSY
            } else {
                libc::ENOTSUP
            });
            -1
        }
    }
}

/// `kmem_cache_alloc`: an object; null with ENOMEM.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_alloc(this: *const CCache) -> *mut c_void {
    // SAFETY: the caller's promise.
    match unsafe { (*this).cache.alloc_fast() } {
        Some(object) => object.as_ptr().cast(),
        // SAFETY: as above.
        None => unsafe { alloc_slow(this) },
    }
}

// The slow paths are `extern "C"`, which cannot unwind, so that the fast paths may end in a jump to them.
#[cold]
#[inline(never)]
unsafe extern "C" fn alloc_slow(this: *const CCache) -> *mut c_void {
    // SAFETY: the caller's promise.
    match unsafe { (*this).cache.alloc() } {
        Some(object) => object.as_ptr().cast(),
        None => null_with(libc::ENOMEM),
    }
}

/// `kmem_cache_zalloc`: an object that reads as zeroes; null with ENOMEM, or with EINVAL when there is a constructor.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_zalloc(this: *const CCache) -> *mut c_void {
    // SAFETY: the caller's promise.
    let (size, constructed) = unsafe { ((*this).size, (*this).constructed) };
    if constructed {
        return null_with(libc::EINVAL);
    }
    // SAFETY: as above.
    let object = unsafe { pinfold_cache_alloc(this) };
    if !object.is_null() {
        // SAFETY: the object is ours and that large.
        unsafe { object.write_bytes(0, size) };
    }
    object
}

/// `kmem_cache_alloc_node`: an object of node `node`'s memory, −1 for the thread's own; null with ENOMEM or EINVAL.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_alloc_node(this: *const CCache, node: c_int) -> *mut c_void {
    if node == -1 {
        // SAFETY: the caller's promise.
        return unsafe { pinfold_cache_alloc(this) };
    }
    let Ok(node) = usize::try_from(node) else {
        return null_with(libc::EINVAL);
    };
    // SAFETY: the caller's promise.
    match unsafe { (*this).cache.alloc_node(node) } {
        Some(object) => object.as_ptr().cast(),
        None => null_with(libc::ENOMEM),
    }
}

/// `kmem_cache_alloc_node` with `__GFP_THISNODE`: an object of node `node`'s memory or none; null with ENOMEM, or with EINVAL for a
/// number below 0.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_alloc_node_exact(
    this: *const CCache,
    node: c_int,
) -> *mut c_void {
    let Ok(node) = usize::try_from(node) else {
        return null_with(libc::EINVAL);
    };
    // SAFETY: the caller's promise.
    match unsafe { (*this).cache.alloc_node_exact(node) } {
        Some(object) => object.as_ptr().cast(),
        None => null_with(libc::ENOMEM),
    }
}

/// `kmem_cache_free`: takes an object back; null is none.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`]; the object came from this cache, and nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_free(this: *const CCache, object: *mut c_void) {
    let Some(object) = NonNull::new(object.cast()) else {
        return;
    };
    // SAFETY: the caller's promise.
    if !unsafe { (*this).cache.free_fast(object) } {
        // SAFETY: as above.
        unsafe { free_slow(this, object) };
    }
}

#[cold]
#[inline(never)]
unsafe extern "C" fn free_slow(this: *const CCache, object: NonNull<u8>) {
    // SAFETY: the caller's promise.
    unsafe { (*this).cache.free(object) };
}

/// `kmem_cache_alloc_bulk`: fills `objects`; how many, fewer than `count` only for want of memory, with ENOMEM.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`]; `objects` is writable for `count` pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_alloc_bulk(
    this: *const CCache,
    count: usize,
    objects: *mut *mut c_void,
) -> usize {
    if count == 0 {
        return 0;
    }
    // SAFETY: the caller's promise.
    let objects = unsafe {
        objects.write_bytes(0, count);
        core::slice::from_raw_parts_mut(objects.cast(), count)
    };
    // SAFETY: as above.
    let got = unsafe { (*this).cache.alloc_bulk(objects) };
    if got < count {
        set_errno(libc::ENOMEM);
    }
    got
}

/// `kmem_cache_free_bulk`: takes `count` objects back, none of them null.
///
/// # Safety
///
/// As for [`pinfold_cache_free`], for each of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_free_bulk(
    this: *const CCache,
    count: usize,
    objects: *const *mut c_void,
) {
    if count > 0 {
        // SAFETY: the caller's promise.
        unsafe {
            let objects = core::slice::from_raw_parts(objects.cast(), count);
            (*this).cache.free_bulk(objects);
        }
    }
}

/// `kmem_cache_shrink`: gives everything that is free back to the system; how many slabs, or −1 with ENOTSUP.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_shrink(this: *const CCache) -> isize {
    // SAFETY: the caller's promise.
    match unsafe { (*this).cache.shrink() } {
        Ok(slabs) => slabs as isize,
        Err(_) => {
            set_errno(libc::ENOTSUP);
            -1
        }
    }
}

/// Sets how many objects the cache's sheaves hold, from 4 to 125, for those filled or emptied from now on.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_set_sheaf_capacity(this: *const CCache, objects: usize) {
    // SAFETY: the caller's promise.
    unsafe { (*this).cache.set_sheaf_capacity(objects) };
}

/// Sets how many bytes one CPU's sheaves of all caches together may hold.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_slab_set_sheaf_budget(bytes: usize) {
    pinfold::slab::set_sheaf_budget(bytes);
}

/// A callback of C's, or none, as one of Rust's.
///
/// # Safety
///
/// `each` can be called with `context`.
unsafe fn teller(each: Option<Each>, context: *mut c_void) -> impl FnMut(&Report<'_>) {
    move |report| {
        if let Some(each) = each {
            // SAFETY: the caller's promise.
            tell_report(report, |told| unsafe { each(told, context) });
        }
    }
}

/// Checks the cache's records and objects; how many faults there are, the first sixteen of which `each` is told.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`]; `each` is null or can be called with `context`, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_validate(
    this: *const CCache,
    each: Option<Each>,
    context: *mut c_void,
) -> usize {
    let mut told = false;
    // SAFETY: the caller's promise.
    let (this, mut teller) = unsafe { (&*this, teller(each, context)) };
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
            // SAFETY: the caller's promise.
            unsafe { each(told, context) };
        });
    }
    fault.errors
}

/// Objects in use of a debugged cache, the first sixteen of which `each` is told, with who allocated them; how many. Of others 0.
///
/// # Safety
///
/// As for [`pinfold_cache_validate`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_leaks(
    this: *const CCache,
    each: Option<Each>,
    context: *mut c_void,
) -> usize {
    // SAFETY: the caller's promise.
    unsafe { (*this).cache.leaks_with(teller(each, context)) }
}

/// Objects in use, with those in CPUs' and barns' sheaves.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_in_use(this: *const CCache) -> usize {
    // SAFETY: the caller's promise.
    unsafe { (*this).cache.in_use() }
}

/// `kmem_cache_size`: bytes of an object, as it was created with.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_size(this: *const CCache) -> usize {
    // SAFETY: the caller's promise.
    unsafe { (*this).size }
}

/// The name it was created with, up to 32 bytes of it. It stays as long as the cache does.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_name(this: *const CCache) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { (&raw const (*this).name).cast() }
}

/// The checks that the cache makes, those that the environment asked for included.
///
/// # Safety
///
/// As for [`pinfold_cache_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_debug_flags(this: *const CCache) -> c_uint {
    // SAFETY: the caller's promise.
    bits_of(unsafe { (*this).cache.debug_flags() })
}

/// The header's bits of `checks`.
pub(crate) fn bits_of(checks: DebugFlags) -> c_uint {
    let made = CHECKS.iter().filter(|check| checks.contains(check.1));
    made.fold(0, |flags, check| flags | check.0)
}
