//! Pinfold's object cache and C allocators as subjects.
//!
//! [`Subject`] is a trait with static dispatch, so that each loop is compiled for its subject.

use anyhow::{Context, Result};
use pinfold::slab::KmemCache;
use std::alloc::Layout;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};

/// Allocates and frees objects of one size, from any thread.
pub trait Subject: Sync {
    /// Prepares a thread for using the subject. A thread may call it repeatedly. Never timed.
    fn enter_thread(&self) {}

    /// Allocates an object. Returns null if there is no memory.
    fn alloc(&self) -> *mut u8;

    /// Frees an object.
    ///
    /// # Safety
    ///
    /// The object came from this subject, and no thread uses it any more.
    unsafe fn free(&self, object: *mut u8);
}

/// Pinfold's object cache, inlined into the loop as in a Rust program.
pub struct PinfoldCache(pub KmemCache);

impl Subject for PinfoldCache {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        self.0.alloc().map_or(null_mut(), NonNull::as_ptr)
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        // SAFETY: the caller promises that the object came from this cache and is unused. An object
        // of a cache is never null.
        unsafe { self.0.free(NonNull::new_unchecked(object)) };
    }
}

/// Makes a cache of objects of `size` bytes. Their alignment is the largest power of two that
/// divides their size, but at most 16, the alignment of `malloc`.
///
/// # Errors
///
/// Fails if `size` is no size of an object, or the system has no memory.
pub fn cache(size: usize) -> Result<KmemCache> {
    cache_of(size, false)
}

/// Makes a cache as [`cache`] does, hardened or not.
pub(crate) fn cache_of(size: usize, hardened: bool) -> Result<KmemCache> {
    let layout = Layout::from_size_align(size, 1 << size.trailing_zeros().min(4))?;
    KmemCache::builder(&format!("bench-{size}"), layout)
        .hardened(hardened)
        .build()
        .with_context(|| format!("making an object cache for objects of {size} bytes"))
}

/// The two functions of a C allocator.
pub trait MallocApi: Send + Sync + 'static {
    /// Prepares a thread for using the allocator. A thread may call it repeatedly.
    fn enter_thread() {}

    /// Calls the allocator's `malloc`.
    fn malloc(size: usize) -> *mut c_void;

    /// Calls the allocator's `free`.
    ///
    /// # Safety
    ///
    /// The block came from this allocator's `malloc`, and no thread uses it any more.
    unsafe fn free(block: *mut c_void);
}

/// Objects of one size from a C allocator. The calls are not inlined, and `free` does not get the
/// size.
pub struct CMalloc<A> {
    size: usize,
    api: PhantomData<A>,
}

impl<A: MallocApi> CMalloc<A> {
    /// Makes a subject with objects of `size` bytes.
    pub fn new(size: usize) -> CMalloc<A> {
        CMalloc {
            size,
            api: PhantomData,
        }
    }
}

impl<A: MallocApi> Subject for CMalloc<A> {
    fn enter_thread(&self) {
        A::enter_thread();
    }

    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        A::malloc(self.size).cast()
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        // SAFETY: the caller promises that the object came from `A::malloc` and is unused.
        unsafe { A::free(object.cast()) };
    }
}

/// Pinfold through its C library.
pub struct PinfoldMalloc;

impl MallocApi for PinfoldMalloc {
    #[inline(always)]
    fn malloc(size: usize) -> *mut c_void {
        pinfold_malloc::c::pinfold_malloc(size)
    }

    #[inline(always)]
    unsafe fn free(block: *mut c_void) {
        // SAFETY: the caller promises that the block came from `pinfold_malloc` and is unused.
        unsafe { pinfold_malloc::c::pinfold_free(block) };
    }
}
