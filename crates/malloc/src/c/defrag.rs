//! Moving blocks out of slabs that are mostly free. docs/c-api.md has an example.

use super::malloc::{pinfold_free, pinfold_malloc};
use core::ffi::{c_int, c_void};
use core::ptr::{NonNull, null_mut};
use pinfold::internal::{keep_errno, kmalloc};

/// Returns 1 if moving `block` helps to give memory back, else 0. Returns 0 for null. See
/// `pinfold.h`.
///
/// Takes no lock. Costs a few loads, and one for each 64 blocks of the slab.
///
/// # Safety
///
/// `block` is null, or came from this API and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_defrag_hint(block: *const c_void) -> c_int {
    // SAFETY: the caller promises null or a block that is in use.
    unsafe { kmalloc::defrag_hint(block.cast()) }.into()
}

/// Moves `block` if that helps to give memory back. Returns the new block, or null if the block
/// stays. See `pinfold.h`.
///
/// Takes a lock twice, and copies the block.
///
/// # Safety
///
/// `block` is null, or came from this API and was not freed. If the call returns a block, `block`
/// is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_defrag(block: *mut c_void) -> *mut c_void {
    // SAFETY: the caller passes ownership of the block if it moves.
    let moved = keep_errno(|| unsafe { kmalloc::defrag(block.cast()) });
    moved.map_or(null_mut(), |new| new.as_ptr().cast())
}

/// Allocates like `pinfold_malloc`, but from the fullest slab of the size: the new place of a block
/// that moves. See `pinfold.h`. Takes a lock.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_defrag_malloc(size: usize) -> *mut c_void {
    match keep_errno(|| kmalloc::defrag_alloc(size)) {
        Some(block) => block.as_ptr().cast(),
        None => pinfold_malloc(size),
    }
}

/// Frees like `pinfold_free`, but to the block's slab, past the CPU's cache. See `pinfold.h`. Takes
/// a lock.
///
/// # Safety
///
/// `block` is null or came from this API, was not freed, and is not used after the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinfold_defrag_free(block: *mut c_void) {
    // SAFETY: the caller passes ownership of `block`, which is null or came from this API.
    if !keep_errno(|| unsafe { kmalloc::defrag_free(block.cast()) }) {
        // SAFETY: the caller passes ownership of `block`, which the call above did not free.
        unsafe { pinfold_free(block) };
    }
}

impl crate::Pinfold {
    /// Returns whether moving `block` helps to give memory back: its slab is not fuller than the
    /// average of its size class, and other slabs have room for the slab's blocks. Approximate
    /// while other threads allocate. Takes no lock.
    ///
    /// # Safety
    ///
    /// `block` was allocated by this allocator, and is not freed during the call.
    pub unsafe fn defrag_hint(block: NonNull<u8>) -> bool {
        // SAFETY: the caller promises a block that stays in use.
        unsafe { kmalloc::defrag_hint(block.as_ptr()) }
    }

    /// Moves `block` if [`defrag_hint`](Self::defrag_hint) says that this helps. Returns the new
    /// block, which has the same content and is freed with the same layout. Returns `None` if the
    /// block stays. Takes a lock twice, and copies the block.
    ///
    /// ```
    /// use std::alloc::{Layout, alloc, dealloc};
    /// use std::ptr::NonNull;
    ///
    /// #[global_allocator]
    /// static ALLOCATOR: pinfold_malloc::Pinfold = pinfold_malloc::Pinfold;
    ///
    /// let layout = Layout::new::<[u64; 4]>();
    /// // SAFETY: the layout has bytes. The block has no other pointers, and is not used after it
    /// // has moved.
    /// unsafe {
    ///     let mut block = NonNull::new(alloc(layout)).expect("memory");
    ///     if let Some(new) = pinfold_malloc::Pinfold::defrag(block) {
    ///         block = new;
    ///     }
    ///     dealloc(block.as_ptr(), layout);
    /// }
    /// ```
    ///
    /// # Safety
    ///
    /// The caller owns `block`, which was allocated by this allocator, and can change all pointers
    /// to it. If the call returns a block, `block` is not used any more.
    pub unsafe fn defrag(block: NonNull<u8>) -> Option<NonNull<u8>> {
        // SAFETY: the caller owns the block.
        unsafe { kmalloc::defrag(block.as_ptr()) }
    }
}
