//! Blocks that hold no pointers, as the program says.
//!
//! A write beyond such a block can only reach other blocks without pointers, because the blocks
//! come from classes of their own (`kmalloc::data`). Blocks above 65,600 bytes share no
//! granule with others anyway, and come from the classes and runs of all blocks.
//!
//! A block of a heap that the program made, and a guarded block, lie where other blocks of their
//! kind lie.

use super::blocks::ALIGN;
use super::entry::{self, alloc_aligned};
use super::plain::{self, Ask};
use super::{gate, mode, sampled, scope, start};

/// What a program says about a block that it resizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The program says nothing. The block stays with the blocks where it lies.
    Unknown,
    /// The block holds no pointers, or the compiler does not know its type. So a block that lies
    /// among blocks with pointers stays there. A block above 65,600 bytes lies among no others,
    /// and joins those without pointers when it shrinks.
    Data,
    /// The block may hold pointers. A block that lies among blocks without pointers leaves them.
    Pointers,
}

/// Allocates a block of `size` bytes without pointers from the CPU's sheaf. Returns null where
/// `heap::alloc_fast` does.
#[inline(always)]
pub fn alloc_data_fast(size: usize) -> *mut u8 {
    gate::alloc_fast_data(size)
}

/// Allocates a block of `size` bytes without pointers. Returns null with errno ENOMEM if there is
/// no memory.
#[inline(always)]
pub fn alloc_data(size: usize) -> *mut u8 {
    let block = alloc_data_fast(size);
    if block.is_null() {
        return alloc_data_slow(size);
    }
    block
}

/// Allocates a block without pointers after [`alloc_data_fast`] has returned null. Returns null
/// with errno ENOMEM if there is no memory.
// Each call is a tail call, so this function takes no stack in `realloc`, which goes deep.
#[cold]
#[inline(never)]
pub extern "C" fn alloc_data_slow(size: usize) -> *mut u8 {
    if mode::is_plain() {
        return alloc_missed(size);
    }
    if mode::has_scopes() {
        return alloc_in_scope(size);
    }
    alloc_unusual(size)
}

#[inline(never)]
extern "C" fn alloc_missed(size: usize) -> *mut u8 {
    gate::serve_if_closed();
    plain::alloc(Ask::data(size))
}

/// Allocates from the heap of the thread's scope. A thread without a scope allocates by
/// [`alloc_unusual`].
#[inline(never)]
extern "C" fn alloc_in_scope(size: usize) -> *mut u8 {
    match scope::alloc_ask(Ask::data(size)) {
        Some(block) => block,
        None => alloc_unusual(size),
    }
}

/// Allocates while samples are taken, and at the process's start.
#[inline(never)]
extern "C" fn alloc_unusual(size: usize) -> *mut u8 {
    start::ready();
    if mode::is_sampling() {
        return sampled::alloc_data_uncounted(size);
    }
    alloc_missed(size)
}

/// Allocates a zeroed block of `size` bytes without pointers. Returns null with errno ENOMEM if
/// there is no memory.
#[inline]
pub fn alloc_data_zeroed(size: usize) -> *mut u8 {
    let block = alloc_data_fast(size);
    if block.is_null() {
        return alloc_data_zeroed_slow(size);
    }
    // SAFETY: `alloc_data_fast` has just handed out the block, which has at least `size` bytes.
    unsafe { block.write_bytes(0, size) };
    block
}

#[cold]
#[inline(never)]
extern "C" fn alloc_data_zeroed_slow(size: usize) -> *mut u8 {
    entry::alloc_ask(Ask {
        zeroed: true,
        ..Ask::data(size)
    })
}

/// Allocates a block without pointers at a multiple of `align`, a power of two. Returns null with
/// errno ENOMEM if there is no memory.
#[inline]
pub fn alloc_data_aligned(size: usize, align: usize) -> *mut u8 {
    if align <= ALIGN {
        return alloc_data(size);
    }
    alloc_data_aligned_slow(size, align)
}

#[inline(never)]
fn alloc_data_aligned_slow(size: usize, align: usize) -> *mut u8 {
    entry::alloc_ask(Ask {
        align,
        ..Ask::data(size)
    })
}

/// Allocates a block at a multiple of `align`, a power of two: without pointers if `data` is true.
/// Returns null with errno ENOMEM if there is no memory.
pub(super) fn alloc_aligned_as(size: usize, align: usize, data: bool) -> *mut u8 {
    match data {
        true => alloc_data_aligned(size, align),
        false => alloc_aligned(size, align),
    }
}
