//! The C API that reads the state of caches: slabinfo, attributes, statistics.
//!
//! These functions stop no other CPU. [`pinfold::slab::caches`] says how exact the numbers are.
//! Functions that fail set errno to EINVAL.

use super::cache::{CCache, HARDENED, bits_of};
use super::support::{failed, methods};
use super::text::{c_name, print_into, str_of};
use core::ffi::{c_char, c_int, c_uint, c_void};
use pinfold::slab::{Info, caches, slabinfo};

/// Writes the state of a cache, or of all caches if `this` is null, in the format of
/// `/proc/slabinfo`, version 2.1. Writes at most `size` bytes, including a NUL, like `snprintf`.
/// Returns the length of the whole text.
///
/// # Safety
///
/// `this` is null, or a cache of this API that has not been destroyed. `buffer` is null or writable
/// for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_slabinfo(
    this: Option<&CCache>,
    buffer: *mut c_char,
    size: usize,
) -> usize {
    let text = match this {
        Some(this) => this.cache.slabinfo(),
        None => slabinfo(),
    };
    // SAFETY: the caller promises that `buffer` is null or writable for `size` bytes.
    unsafe { print_into(buffer, size, text) }
}

/// Stores the attribute that the kernel calls `name` in `/sys/kernel/slab/<cache>/`. Returns 0, or
/// −1 with EINVAL if there is no such attribute.
///
/// # Safety
///
/// `this` is a cache of this API that has not been destroyed. `name` is a C string. `value` is
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_attribute(
    this: &CCache,
    name: *const c_char,
    value: *mut u64,
) -> c_int {
    // SAFETY: the caller promises a C string.
    let name = unsafe { str_of(name) };
    let found = name.and_then(|name| this.cache.attribute(name));
    let Some(found) = found else {
        return failed(libc::EINVAL);
    };
    // SAFETY: the caller promises that `value` is writable.
    unsafe { value.write(found) };
    0
}

/// The state of a cache: `struct pinfold_cache_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CInfo {
    /// The cache's name.
    pub name: *const c_char,
    /// Bytes of an object.
    pub object_size: usize,
    /// Bytes from one object to the next.
    pub slab_size: usize,
    /// Objects in use.
    pub objects: usize,
    /// Objects in all slabs.
    pub total_objects: usize,
    /// Free objects in the CPUs' sheaves.
    pub cpu_objects: usize,
    /// Free objects in the nodes' barns.
    pub barn_objects: usize,
    /// Slabs that exist.
    pub slabs: usize,
    /// The checks that the cache makes, and whether it is hardened.
    pub flags: c_uint,
}

/// The type of a C function that receives the state of one cache.
pub type EachCache = unsafe extern "C" fn(*const CInfo, *mut c_void);

/// Calls `f` with the state of a cache if the cache has not been destroyed. Returns whether it
/// called `f`.
fn tell(info: Info, f: impl FnOnce(&CInfo)) -> bool {
    let (name, usage) = (c_name(info.name()), info.usage());
    // `usize` has 64 bits on x86-64 and aarch64.
    let size = |name| info.attribute(name).unwrap_or(0) as usize;
    let hardened = if info.is_hardened() { HARDENED } else { 0 };
    let told = CInfo {
        name: name.as_ptr().cast(),
        object_size: size("object_size"),
        slab_size: size("slab_size"),
        objects: usage.active,
        total_objects: usage.total,
        cpu_objects: usage.cpu_objects,
        barn_objects: usage.barn_objects,
        slabs: usage.slabs,
        flags: bits_of(info.debug_flags()) | hardened,
    };
    // This test comes last: if the cache was destroyed before this function read all numbers, some
    // of them are 0.
    let there = !info.is_destroyed();
    if there {
        f(&told);
    }
    there
}

/// Calls `each` with each cache of the process, including malloc's caches. Returns the number of
/// caches. Holds no lock during the calls.
///
/// # Safety
///
/// `each` is null or can be called with `context`, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_caches_for_each(
    each: Option<EachCache>,
    context: *mut c_void,
) -> usize {
    let told = caches().filter(|&info| {
        tell(info, |told| {
            if let Some(each) = each {
                // SAFETY: the caller promises that `each` can be called with `context`.
                unsafe { each(told, context) };
            }
        })
    });
    told.count()
}

/// The counts of a cache's slow paths: `struct pinfold_slab_statistics`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CStatistics {
    /// Allocations that found the main sheaf empty.
    pub alloc_slowpath: u64,
    /// Frees that found the main sheaf full.
    pub free_slowpath: u64,
    /// Full sheaves taken from barns.
    pub barn_get: u64,
    /// Full sheaves put into barns.
    pub barn_put: u64,
    /// Slabs made.
    pub slab_alloc: u64,
    /// Slabs given back.
    pub slab_free: u64,
    /// Slabs that exist.
    pub slabs: usize,
    /// Objects that a sheaf holds at most.
    pub sheaf_capacity: usize,
    /// Bytes from one object to the next.
    pub stride: usize,
}

methods! { &CCache, "`this` is a cache of this API that has not been destroyed.":
    /// Returns the counts of the slow paths. Takes the nodes' locks.
    pinfold_cache_statistics() -> CStatistics = |this| {
        let cache = &this.cache;
        let counted = cache.statistics();
        CStatistics {
            alloc_slowpath: counted.alloc_slowpath,
            free_slowpath: counted.free_slowpath,
            barn_get: counted.barn_get,
            barn_put: counted.barn_put,
            slab_alloc: counted.slab_alloc,
            slab_free: counted.slab_free,
            slabs: counted.slabs,
            sheaf_capacity: counted.sheaf_capacity,
            stride: cache.stride(),
        }
    };
}
