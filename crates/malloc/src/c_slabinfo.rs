//! The C API of what caches say of themselves: `/proc/slabinfo`, attributes, statistics.
//!
//! Nobody is disturbed by it; see [`pinfold::slab::caches`] for how exact the numbers are. Functions that fail set errno to EINVAL.

use crate::c_cache::{CCache, HARDENED, bits_of};
use crate::c_report::c_name;
use crate::c_text::print_into;
use crate::heap::set_errno;
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use pinfold::slab::{Info, caches, slabinfo};

/// `/proc/slabinfo`, version 2.1, of one cache, or of all for null. As `snprintf`: writes what fits into `size` bytes, the NUL among
/// them, and returns how long all of it is.
///
/// # Safety
///
/// `this` is null, or was created and not destroyed yet; `buffer` is writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_slabinfo(
    this: *const CCache,
    buffer: *mut c_char,
    size: usize,
) -> usize {
    // SAFETY: the caller's promise.
    let text = match unsafe { this.as_ref() } {
        Some(this) => this.cache.slabinfo(),
        None => slabinfo(),
    };
    // SAFETY: as above.
    unsafe { print_into(buffer, size, text) }
}

/// The attribute that the kernel calls `name` in `/sys/kernel/slab/<cache>/`; 0, or −1 with EINVAL when there is none.
///
/// # Safety
///
/// `this` was created and not destroyed yet; `name` is a C string, `value` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_attribute(
    this: *const CCache,
    name: *const c_char,
    value: *mut u64,
) -> c_int {
    // SAFETY: the caller's promise.
    let (this, name) = unsafe { (&*this, CStr::from_ptr(name)) };
    let found = name
        .to_str()
        .ok()
        .and_then(|name| this.cache.attribute(name));
    let Some(found) = found else {
        set_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: the caller's promise.
    unsafe { value.write(found) };
    0
}

/// A cache as programs that look on see it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CInfo {
    /// Its name.
    pub name: *const c_char,
    /// Bytes of an object.
    pub object_size: usize,
    /// Bytes from one object to the next.
    pub slab_size: usize,
    /// Objects in users' hands.
    pub objects: usize,
    /// Objects in all slabs.
    pub total_objects: usize,
    /// Objects in CPUs' sheaves.
    pub cpu_objects: usize,
    /// Objects in nodes' barns.
    pub barn_objects: usize,
    /// Slabs there are.
    pub slabs: usize,
    /// The checks it makes, and whether it is hardened.
    pub flags: c_uint,
}

/// What C does about each cache.
pub type EachCache = unsafe extern "C" fn(*const CInfo, *mut c_void);

/// Hands a cache to `f`, unless it has been destroyed; whether it did.
fn tell(info: Info, f: impl FnOnce(&CInfo)) -> bool {
    let (name, usage) = (c_name(info.name()), info.usage());
    // 64 bits have room on what this runs on.
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
    // Last: what was read of a cache that is gone may be its successor's.
    let there = !info.is_destroyed();
    if there {
        f(&told);
    }
    there
}

/// Hands all caches of the process to `each`, malloc's own among them; returns how many. No lock is held meanwhile.
///
/// # Safety
///
/// `each` is null or can be called with `context`, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_caches_each(
    each: Option<EachCache>,
    context: *mut c_void,
) -> usize {
    let told = caches().filter(|&info| {
        tell(info, |told| {
            if let Some(each) = each {
                // SAFETY: the caller's promise.
                unsafe { each(told, context) };
            }
        })
    });
    told.count()
}

/// What a cache's slow paths have counted; as [`pinfold::slab::Statistics`].
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
    /// Slabs there are.
    pub slabs: usize,
    /// Objects that a sheaf holds at most.
    pub sheaf_capacity: usize,
    /// Bytes from one object to the next.
    pub stride: usize,
}

/// What the slow paths have counted.
///
/// # Safety
///
/// `this` was created and not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_cache_statistics(this: *const CCache) -> CStatistics {
    // SAFETY: the caller's promise.
    let cache = unsafe { &(*this).cache };
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
}
