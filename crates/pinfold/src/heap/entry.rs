//! The entry points of the heap: allocating and freeing, and the slow paths of both.

use super::blocks::ALIGN;
use super::gate::{self, alloc_fast, entry_fast};
use super::plain::{self, Ask, alloc_missed};
use super::{blocks, counted, mode, sampled, scope, start};
use crate::arena;
use crate::slab::kmalloc;
use crate::{guarded, heaps, profile};

/// Allocates a block of `size` bytes. Returns null with errno ENOMEM if there is no memory.
#[inline(always)]
pub fn alloc(size: usize) -> *mut u8 {
    let block = alloc_fast(size);
    if block.is_null() {
        return alloc_slow(size);
    }
    block
}

/// Allocates a block after [`alloc_fast`] has returned null. Returns null with errno ENOMEM if
/// there is no memory.
// The slow paths are `extern "C"` and cannot unwind, so the fast paths may end in a jump to them.
#[cold]
#[inline(never)]
pub extern "C" fn alloc_slow(size: usize) -> *mut u8 {
    // Each call is a tail call, so this function saves no registers.
    if mode::is_plain() {
        return alloc_missed(size);
    }
    if mode::has_scopes() {
        return scope::alloc(size);
    }
    let block = gate::alloc_counted(size);
    if block.is_null() {
        return alloc_unusual(size);
    }
    block
}

/// Allocates a block while samples are taken, before its bytes are counted. Also allocates at the
/// process's start.
#[cold]
#[inline(never)]
pub(super) extern "C" fn alloc_unusual(size: usize) -> *mut u8 {
    if mode::is_sampling() {
        return sampled::alloc_uncounted(size);
    }
    alloc_first(size)
}

#[cold]
#[inline(never)]
extern "C" fn alloc_first(size: usize) -> *mut u8 {
    start::ready();
    gate::serve_if_closed();
    plain::alloc(Ask::of(size))
}

/// Allocates a zeroed block of `size` bytes. Returns null with errno ENOMEM if there is no memory.
#[inline]
pub fn alloc_zeroed(size: usize) -> *mut u8 {
    let block = alloc_fast(size);
    if block.is_null() {
        return alloc_zeroed_slow(size);
    }
    // SAFETY: `alloc_fast` has just handed out the block, which has at least `size` bytes.
    unsafe { block.write_bytes(0, size) };
    block
}

#[cold]
#[inline(never)]
extern "C" fn alloc_zeroed_slow(size: usize) -> *mut u8 {
    let ask = Ask {
        zeroed: true,
        ..Ask::of(size)
    };
    if mode::is_plain() {
        gate::serve_if_closed();
        return plain::alloc(ask);
    }
    if let Some(block) = scope::alloc_ask(ask) {
        return block;
    }
    let block = match mode::has_scopes() && !mode::is_sampling() {
        true => gate::alloc_behind(size),
        false => gate::alloc_counted(size),
    };
    if !block.is_null() {
        // SAFETY: the block is new, and has at least `size` bytes.
        unsafe { block.write_bytes(0, size) };
        return block;
    }
    alloc_ask_unusual(ask)
}

/// Allocates while samples are taken, and at the process's start.
#[inline(always)]
fn alloc_ask_unusual(ask: Ask) -> *mut u8 {
    start::ready();
    gate::serve_if_closed();
    if mode::is_sampling()
        && let Some(mean) = profile::due(ask.size)
    {
        return sampled::alloc_sampled(ask, mean, profile::here());
    }
    plain::alloc(ask)
}

/// Allocates a block at a multiple of `align`, a power of two. Returns null with errno ENOMEM if
/// there is no memory.
#[inline]
pub fn alloc_aligned(size: usize, align: usize) -> *mut u8 {
    if align <= ALIGN {
        return alloc(size);
    }
    let block = gate::alloc_fast_aligned(size, align);
    if block.is_null() {
        return alloc_aligned_slow(size, align, false);
    }
    block
}

/// Allocates a zeroed block like [`alloc_aligned`]. Does not write to a large block whose memory
/// comes zeroed from the system.
#[inline]
pub fn alloc_aligned_zeroed(size: usize, align: usize) -> *mut u8 {
    if align <= ALIGN {
        return alloc_zeroed(size);
    }
    alloc_aligned_slow(size, align, true)
}

#[cold]
#[inline(never)]
extern "C" fn alloc_aligned_slow(size: usize, align: usize, zeroed: bool) -> *mut u8 {
    alloc_ask(Ask {
        align,
        zeroed,
        ..Ask::of(size)
    })
}

/// Allocates a block that no fast path serves.
#[inline(always)]
pub(super) fn alloc_ask(ask: Ask) -> *mut u8 {
    if !mode::is_plain() {
        if let Some(block) = scope::alloc_ask(ask) {
            return block;
        }
        return alloc_ask_unusual(ask);
    }
    gate::serve_if_closed();
    plain::alloc(ask)
}

/// Frees `block`. Does nothing if `block` is null. Ends the process if `block` is neither in a slab
/// of malloc nor the address of another block in use.
///
/// # Safety
///
/// `block` is null or came from this module, and is not used any more.
#[inline(always)]
pub unsafe fn free(block: *mut u8) {
    let entry = entry_fast(block);
    if kmalloc::class_of_entry(entry).is_some() {
        // SAFETY: `entry_fast` found the entry of a class, so the fast paths are open. The caller
        // passes ownership of the block, which is of this class.
        unsafe { kmalloc::free_fast(block, entry) };
    } else {
        // SAFETY: the caller passes ownership of `block`, which is null or came from this module.
        unsafe { free_slow(block) };
    }
}

/// # Safety
///
/// `block` is null or came from this module, and is not used any more.
#[cold]
#[inline(never)]
unsafe extern "C" fn free_slow(block: *mut u8) {
    if block.is_null() {
        return;
    }
    let (entry, from) = (arena::entry(block as usize), profile::here());
    if let Some(class) = kmalloc::class_of_any(entry) {
        counted::freed_class(block, class, from);
        // SAFETY: the page map says that the block is of this class, and the caller passes
        // ownership of the block.
        unsafe { kmalloc::free_class(block, class) };
    // SAFETY: the caller passes ownership of the block.
    } else if unsafe { heaps::free_any(block) } {
        // The block was a heap's, which counts it.
    } else if let Some(run) = arena::run_at(block) {
        // SAFETY: the caller owns the block, which is this run.
        let size = unsafe { arena::size_in_run(block, run) };
        counted::freed_large(block, size, from);
        // SAFETY: the run is one block, and the caller passes ownership of it.
        unsafe { arena::free_block_run(run) };
    } else {
        let class = |size| kmalloc::sampled(kmalloc::class_of(size));
        let freed = |size| counted::freed_class(block, class(size), from);
        // SAFETY: the caller passes ownership of the block.
        if unsafe { guarded::free(block, freed) } {
            return;
        }
        if mode::reports() {
            counted::freed_large(block, arena::huge_size(block).unwrap_or(0), from);
        }
        // SAFETY: the caller passes ownership of the block, and `free_huge` refuses other
        // addresses.
        if !unsafe { arena::free_huge(block) } {
            blocks::not_ours("free", block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::usable_size;

    #[test]
    fn aligned_blocks_are_of_the_smallest_class_and_read_as_zeroes_on_request() {
        let sizes = core::iter::successors(Some(1), |size| Some(size + 1 + size / 5));
        for size in sizes.take_while(|&size| size < 700_000) {
            for align in (5..=16).map(|bit| 1 << bit) {
                // The second block of a refilled sheaf comes from the fast path.
                let blocks = [(); 2].map(|()| alloc_aligned(size, align));
                for block in blocks {
                    let class = kmalloc::class_of_any(arena::entry(block as usize));
                    assert_eq!(
                        class,
                        kmalloc::class_of_aligned(size, align),
                        "{size} {align}"
                    );
                    assert!((block as usize).is_multiple_of(align), "{size} {align}");
                    // SAFETY: the block is new.
                    unsafe { block.write_bytes(0xff, usable_size(block)) };
                }
                // SAFETY: the blocks are not used any more.
                blocks.into_iter().for_each(|block| unsafe { free(block) });
                let blocks = [(); 2].map(|()| alloc_aligned_zeroed(size, align));
                for block in blocks {
                    // SAFETY: the block is new.
                    let bytes = unsafe { core::slice::from_raw_parts(block, size) };
                    assert!(bytes.iter().all(|&byte| byte == 0), "{size} {align}");
                }
                // SAFETY: the blocks are not used any more.
                blocks.into_iter().for_each(|block| unsafe { free(block) });
            }
        }
    }
}
