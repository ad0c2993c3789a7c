//! The size that a block really has: before its allocation, and with it.

use super::malloc::{pinfold_aligned_alloc, pinfold_malloc};
use core::ffi::c_void;
use core::ptr::null_mut;
use pinfold::internal::heap;
use pinfold::internal::profile::keep_frame;

/// Returns the largest size for which `malloc` would make the same block as for `size` bytes, or 0
/// if no block is that large. See `pinfold.h`.
///
/// Costs a few loads.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_good_size(size: usize) -> usize {
    heap::good_size(size, heap::ALIGN)
}

/// Allocates a block of at least `size` bytes, and stores in `*actual` how many bytes of it the
/// program may use. Fails like [`pinfold_malloc`], and stores 0 then.
///
/// # Safety
///
/// `actual` is writable for a size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_alloc_at_least(size: usize, actual: *mut usize) -> *mut c_void {
    keep_frame();
    let block = pinfold_malloc(size);
    // SAFETY: the block is null or new, and the caller promises that `actual` is writable.
    unsafe { *actual = heap::usable_size(block.cast()) };
    block
}

/// Allocates a block of at least `size` bytes at a multiple of `align`, and stores in `*actual` how
/// many bytes of it the program may use. Fails like [`pinfold_aligned_alloc`], and stores 0 then.
///
/// # Safety
///
/// `actual` is writable for a size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_aligned_alloc_at_least(
    align: usize,
    size: usize,
    actual: *mut usize,
) -> *mut c_void {
    keep_frame();
    let block = pinfold_aligned_alloc(align, size);
    // SAFETY: the block is null or new, and the caller promises that `actual` is writable.
    unsafe { *actual = heap::usable_size(block.cast()) };
    block
}

/// The result of C++'s `__size_returning_new`: a block, and how many bytes of it the program may
/// use.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SizedBlock {
    /// The block, or null.
    pub block: *mut c_void,
    /// Bytes that the program may use, or 0.
    pub size: usize,
}

impl SizedBlock {
    /// No block.
    pub const NONE: SizedBlock = SizedBlock {
        block: null_mut(),
        size: 0,
    };
}
