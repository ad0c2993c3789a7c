//! jemalloc's functions that allocate and free: `mallocx` and its relatives.
//!
//! A program that is linked with libjemalloc may pass a block of `mallocx` to `free`, as redis 8
//! does. Because this library replaces `free`, it also replaces the functions that make such
//! blocks. It does not replace `mallctl`, whose figures stay those of libjemalloc: programs look
//! for `mallctl` to learn whether they run on jemalloc.
//!
//! The flags have the alignment's logarithm in the low six bits, and [`ZERO`]. The bits above
//! choose a cache or an arena, and are ignored.

use core::ffi::{c_int, c_void};
use pinfold_malloc::c;
use pinfold_malloc::inlined::{self, keep_frame};

/// `MALLOCX_ZERO`.
const ZERO: c_int = 0x40;
const LG_ALIGN: c_int = 0x3f;
/// The alignment of every block.
const ALIGN: usize = 16;

fn align_of(flags: c_int) -> usize {
    1 << (flags & LG_ALIGN)
}

/// Returns the size that a block of `mallocx(size, flags)` would have, or 0 if no block is that
/// large. The block may have up to 4032 bytes more.
#[unsafe(no_mangle)]
extern "C" fn nallocx(size: usize, flags: c_int) -> usize {
    inlined::good_size(size, align_of(flags))
}

/// Allocates a block of at least `size` bytes. With [`ZERO`], all bytes that the program may use
/// read as zeroes, because `rallocx` zeroes only what a block gains. Returns null if there is no
/// memory.
#[unsafe(no_mangle)]
extern "C" fn mallocx(size: usize, flags: c_int) -> *mut c_void {
    keep_frame();
    let align = align_of(flags);
    if flags & ZERO == 0 {
        return inlined::alloc_aligned(size, align).cast();
    }
    let block = inlined::alloc_aligned_zeroed(size, align).cast();
    zero(block, size);
    block
}

/// Zeroes a block from byte `from` on, if it is not null. The block is this thread's.
fn zero(block: *mut c_void, from: usize) {
    // A mapping of its own has only new pages beyond what was asked for or copied.
    if block.is_null() || inlined::huge_size(block.cast()).is_some() {
        return;
    }
    // SAFETY: the block is in use.
    let room = unsafe { c::pinfold_malloc_usable_size(block) };
    if room > from {
        // SAFETY: the block has `room` bytes, and is this thread's.
        unsafe { block.byte_add(from).write_bytes(0, room - from) };
    }
}

/// Changes the size of `block`. With [`ZERO`], the bytes that the block gains read as zeroes.
/// Returns null, and leaves the block unchanged, if there is no memory.
///
/// # Safety
///
/// `block` is a block of malloc's. If the call succeeds, it is not used after the call.
#[unsafe(no_mangle)]
unsafe extern "C" fn rallocx(block: *mut c_void, size: usize, flags: c_int) -> *mut c_void {
    keep_frame();
    // SAFETY: the caller owns the block.
    let before = unsafe { c::pinfold_malloc_usable_size(block) };
    let resized = match align_of(flags) {
        // `realloc` would free the block for a size of 0.
        // SAFETY: the caller owns the block.
        ..=ALIGN => unsafe { c::pinfold_realloc(block, size.max(1)) },
        align => {
            let moved = c::pinfold_aligned_alloc(align, size);
            if !moved.is_null() {
                // SAFETY: both blocks have at least the smaller of `before` and `size` bytes, and
                // the new one is not the old one. The caller passes ownership of the block.
                unsafe {
                    moved.copy_from_nonoverlapping(block, before.min(size));
                    c::pinfold_free(block);
                }
            }
            moved
        }
    };
    if flags & ZERO != 0 {
        zero(resized, before);
    }
    resized
}

/// Returns the usable size of `block`, which is never resized in place.
///
/// # Safety
///
/// `block` is a block of malloc's.
#[unsafe(no_mangle)]
unsafe extern "C" fn xallocx(block: *mut c_void, _: usize, _: usize, _: c_int) -> usize {
    // SAFETY: the caller owns the block.
    unsafe { c::pinfold_malloc_usable_size(block) }
}

/// Returns the usable size of `block`.
///
/// # Safety
///
/// `block` is a block of malloc's.
#[unsafe(no_mangle)]
unsafe extern "C" fn sallocx(block: *const c_void, _flags: c_int) -> usize {
    // SAFETY: the caller owns the block.
    unsafe { c::pinfold_malloc_usable_size(block.cast_mut()) }
}

/// Frees `block`.
///
/// # Safety
///
/// `block` is a block of malloc's, and is not used after the call.
#[unsafe(no_mangle)]
unsafe extern "C" fn dallocx(block: *mut c_void, _flags: c_int) {
    // SAFETY: the caller passes ownership of the block.
    unsafe { c::pinfold_free(block) };
}

/// Frees `block`, which was allocated for `size` bytes and `flags`.
///
/// # Safety
///
/// `block` is a block of malloc's, and is not used after the call.
#[unsafe(no_mangle)]
unsafe extern "C" fn sdallocx(block: *mut c_void, size: usize, flags: c_int) {
    // SAFETY: the caller passes ownership of the block.
    unsafe { c::pinfold_free_aligned_sized(block, align_of(flags), size) };
}
