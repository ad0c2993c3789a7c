//! The C API of heaps. A C handle is the address of the heap's state.
//!
//! Functions that fail set errno: EINVAL (an invalid argument), ENOSPC (too many heaps and caches),
//! ENOMEM (no memory, or the heap's limit), ENOTSUP (the kernel cannot interrupt CPUs for this
//! process, or no scopes) or EBUSY (a signal handler).

use super::cache::{HARDENED, NOT_HARDENED};
use super::policy::{CPolicy, policy_of};
use super::support::{AsErrno, address_or_enomem, failed, fence_errno, null_with};
use super::text::str_of;
use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::ManuallyDrop;
use core::ptr::NonNull;
use pinfold::heaps::{Heap, HeapError};
use pinfold::internal::heap::scope;
use pinfold::internal::keep_errno;
use pinfold_rseq::FenceError;

/// A heap behind a C handle.
#[repr(C)]
#[derive(Debug)]
pub struct CHeap {
    _private: [u8; 0],
}

impl AsErrno for HeapError {
    fn as_errno(&self) -> c_int {
        match self {
            HeapError::TooMany => libc::ENOSPC,
            HeapError::NoMemory => libc::ENOMEM,
            _ => libc::EINVAL,
        }
    }
}

/// What a C program sees of [`pinfold::heaps::Statistics`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HeapStatistics {
    held: usize,
    peak: usize,
    limit: usize,
    refusals: usize,
    free_in_slabs: usize,
    large: usize,
}

/// Returns the heap of a handle, without ending it.
///
/// # Safety
///
/// `this` is a heap of this API that has not been destroyed.
unsafe fn heap(this: *const CHeap) -> ManuallyDrop<Heap> {
    // SAFETY: the caller promises a handle that `pinfold_heap_create` made with `into_raw`. The
    // value is not dropped, so the heap has one owner.
    ManuallyDrop::new(unsafe { Heap::from_raw(this.cast()) })
}

/// Converts the result of an operation that fences to a C return value.
fn done(result: Result<(), FenceError>) -> c_int {
    result.map_or_else(|refused| failed(fence_errno(refused)), |()| 0)
}

fn limit_of(limit: usize) -> Option<usize> {
    (limit != 0).then_some(limit)
}

/// Creates a heap. A `limit` of 0 means no limit. Returns null with EINVAL, ENOSPC or ENOMEM.
///
/// # Safety
///
/// `name` is null or a C string. `policy` is null, or a handle that the caller holds during the
/// call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_create(
    name: *const c_char,
    limit: usize,
    flags: c_uint,
    policy: Option<&CPolicy>,
) -> *mut CHeap {
    let both = HARDENED | NOT_HARDENED;
    // SAFETY: the caller promises a C string or null.
    let name = unsafe { str_of(name) };
    let (Some(name), 0) = (name, flags & !both) else {
        return null_with(libc::EINVAL);
    };
    let mut builder = Heap::builder(name);
    match flags {
        HARDENED => builder = builder.hardened(true),
        NOT_HARDENED => builder = builder.hardened(false),
        0 => {}
        _ => return null_with(libc::EINVAL),
    }
    if let Some(limit) = limit_of(limit) {
        builder = builder.limit(limit);
    }
    if let Some(policy) = policy_of(policy) {
        builder = builder.policy(policy);
    }
    match builder.build() {
        Ok(heap) => heap.into_raw().cast_mut().cast(),
        Err(error) => null_with(error.as_errno()),
    }
}

/// Allocates a block (`malloc`). Returns null with ENOMEM.
///
/// # Safety
///
/// `this` is a heap of this API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_malloc(this: *mut CHeap, size: usize) -> *mut c_void {
    // SAFETY: the caller promises a heap.
    address_or_enomem(unsafe { heap(this) }.alloc(size))
}

/// Allocates a zeroed block (`calloc`). Returns null with ENOMEM.
///
/// # Safety
///
/// `this` is a heap of this API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_calloc(
    this: *mut CHeap,
    count: usize,
    size: usize,
) -> *mut c_void {
    // SAFETY: the caller promises a heap.
    let alloc = |bytes| unsafe { heap(this) }.alloc_zeroed(bytes);
    address_or_enomem(count.checked_mul(size).and_then(alloc))
}

/// Allocates an aligned block (`aligned_alloc`). Returns null with EINVAL or ENOMEM.
///
/// # Safety
///
/// `this` is a heap of this API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_aligned_alloc(
    this: *mut CHeap,
    align: usize,
    size: usize,
) -> *mut c_void {
    if !align.is_power_of_two() {
        return null_with(libc::EINVAL);
    }
    // SAFETY: the caller promises a heap.
    address_or_enomem(unsafe { heap(this) }.alloc_aligned(size, align))
}

/// Resizes a block (`realloc`). Returns null with ENOMEM.
///
/// # Safety
///
/// `this` is a heap of this API that has not been destroyed. `block` is null or a block of it that
/// was not freed. If the result is not null, the program uses only the new address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_realloc(
    this: *mut CHeap,
    block: *mut c_void,
    size: usize,
) -> *mut c_void {
    // SAFETY: the caller promises a heap.
    let heap = unsafe { heap(this) };
    address_or_enomem(match NonNull::new(block.cast()) {
        None => heap.alloc(size),
        // SAFETY: the caller owns the block, which is this heap's.
        Some(block) => unsafe { heap.realloc(block, size) },
    })
}

/// Frees a block. Does nothing if `block` is null. Keeps errno.
///
/// # Safety
///
/// `this` is a heap of this API that has not been destroyed. `block` is null, or a block of a heap
/// that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_free(this: *mut CHeap, block: *mut c_void) {
    if let Some(block) = NonNull::new(block.cast()) {
        // SAFETY: the caller promises a heap, and passes ownership of the block.
        keep_errno(|| unsafe { heap(this).free(block) });
    }
}

/// Destroys a heap and frees its blocks. Returns 0, or −1 with ENOTSUP or EBUSY. Does nothing if
/// `this` is null.
///
/// # Safety
///
/// `this` is null, or a heap of this API that has not been destroyed. No thread uses a block of it
/// or is in a scope of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_destroy(this: *mut CHeap) -> c_int {
    if this.is_null() {
        return 0;
    }
    // SAFETY: the caller promises a heap, and uses neither the heap nor a block of it any more.
    done(unsafe { ManuallyDrop::into_inner(heap(this)).destroy() })
}

/// Sets the most bytes that the heap may hold, or removes the limit if `limit` is 0.
///
/// # Safety
///
/// `this` is a heap of this API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_set_limit(this: *mut CHeap, limit: usize) {
    // SAFETY: the caller promises a heap.
    unsafe { heap(this) }.set_limit(limit_of(limit));
}

/// Returns what the heap holds.
///
/// # Safety
///
/// `this` is a heap of this API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_statistics(this: *const CHeap) -> HeapStatistics {
    // SAFETY: the caller promises a heap.
    let now = unsafe { heap(this) }.statistics();
    HeapStatistics {
        held: now.held,
        peak: now.peak,
        limit: now.limit.unwrap_or(0),
        refusals: now.refusals,
        free_in_slabs: now.free_in_slabs,
        large: now.large,
    }
}

/// Returns how many bytes the heap holds.
///
/// # Safety
///
/// `this` is a heap of this API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_held(this: *const CHeap) -> usize {
    // SAFETY: the caller promises a heap.
    unsafe { heap(this) }.held()
}

/// Gives the heap's free memory back. Returns 0, or −1 with ENOTSUP or EBUSY.
///
/// # Safety
///
/// `this` is a heap of this API that has not been destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_shrink(this: *mut CHeap) -> c_int {
    // SAFETY: the caller promises a heap.
    done(unsafe { heap(this) }.shrink())
}

/// Begins a scope of the calling thread. Returns what to pass to [`pinfold_heap_leave`]. Returns −1
/// with ENOTSUP if there are no scopes.
///
/// # Safety
///
/// `this` is a heap of this API that has not been destroyed. The thread ends the scope before the
/// heap is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_heap_enter(this: *mut CHeap) -> c_int {
    // SAFETY: the caller promises a heap.
    let heap = unsafe { heap(this) };
    // SAFETY: the caller promises to end the scope before the heap.
    let before = unsafe { scope::enter(&heap) };
    before.map_or_else(|| failed(libc::ENOTSUP), |before| before as c_int)
}

/// Ends a scope of the calling thread. Does nothing if `before` is −1.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_heap_leave(before: c_int) {
    if let Ok(before) = u32::try_from(before) {
        scope::leave(before);
    }
}
