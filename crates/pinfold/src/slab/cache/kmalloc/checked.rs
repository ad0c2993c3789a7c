//! What caches that check know of the blocks of the size classes.

use super::{cache_of, class_of_aligned, of_class, size_of_class};
use crate::cache_units::CacheId;
use crate::slab::cache::descriptor::CLASSES_CHECK;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::near;

/// Returns how many bytes were asked for when a block of class `class`, or of a twin, was
/// allocated. Returns `None` if its cache is not debugged.
///
/// # Safety
///
/// The caller owns the block, which is of that class.
pub unsafe fn requested(block: *mut u8, class: usize) -> Option<usize> {
    // SAFETY: the caller promises that it owns the block, which is of this class.
    of_class(class).and_then(|cache| unsafe { cache.requested(block) })
}

/// Returns whether a program may use only the bytes of a block of class `class` that it asked for,
/// because the class's cache is debugged. Makes the cache if it does not exist yet, and any cache
/// checks.
pub fn ends_with_request(class: usize) -> bool {
    any_checks()
        && cache_of(CacheId::of_class(class)).is_some_and(|cache| cache.slot_layout.is_some())
}

/// Records that a block of class `class`, or of a twin, is used for `size` bytes from now on, so
/// that the red zone begins after these bytes. Does nothing if its cache is not debugged.
///
/// # Safety
///
/// The caller owns the block, which is of that class.
pub unsafe fn set_requested(block: *mut u8, class: usize, size: usize) {
    if let Some(cache) = of_class(class) {
        // SAFETY: the caller promises that it owns the block, which is of this class.
        unsafe { cache.set_requested(block, size) };
    }
}

/// Returns whether the cache of some class checks its blocks. One load.
#[inline(always)]
pub fn any_checks() -> bool {
    // Relaxed: a thread that has a block of a cache that checks learned of the block after the
    // cache was made, and with it of this store.
    near!(CLASSES_CHECK, AtomicBool).load(Relaxed)
}

/// Returns true if a block in use begins at `block`, an address in a slab of class `class` or of a
/// twin, or if its cache does not check. Otherwise reports the fault.
#[inline]
pub fn is_in_use(block: *mut u8, class: usize) -> bool {
    of_class(class).is_none_or(|cache| cache.is_in_use(block))
}

/// Returns true if `block`, an address in a slab of class `class` or of a twin, may have been
/// allocated for `size` bytes at a multiple of `align`, or if its cache does not check. Otherwise
/// reports the fault. Does not report an address at which no block in use begins, because the free
/// reports it.
#[cold]
pub fn fits(block: *mut u8, class: usize, size: usize, align: usize) -> bool {
    let smallest = class_of_aligned(size, align);
    let is_smaller =
        smallest.is_some_and(|smallest| size_of_class(smallest) < size_of_class(class));
    of_class(class).is_none_or(|cache| cache.fits(block, (size, align), is_smaller))
}
