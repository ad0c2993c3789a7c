//! Blocks that are not sampled, from their class, the arena or the system.

use super::blocks::ALIGN;
use super::{counted, gate};
use crate::arena::{self, GRANULE, HUGE, LARGE};
use crate::slab;
use crate::slab::kmalloc::{self, MAX_CLASS_SIZE, MAX_SMALL_SIZE};
use crate::sys::set_errno;
use core::ptr::null_mut;

/// Allocates a block after the CPU's sheaf was found empty, and for a size above 32 KiB.
#[inline(never)]
pub(super) extern "C" fn alloc_missed(size: usize) -> *mut u8 {
    gate::serve_if_closed();
    alloc_plain(size, false)
}

/// Allocates a block of `size` bytes that is not sampled. Zeroes the block if `zeroed` is true.
pub(super) fn alloc_plain(size: usize, zeroed: bool) -> *mut u8 {
    let block = alloc_any(size, zeroed);
    counted::requested(block, size);
    block
}

/// Allocates a block of `size` bytes at a multiple of `align`, a power of two, that is not sampled.
/// Zeroes the block if `zeroed` is true.
pub(super) fn alloc_aligned_plain(size: usize, align: usize, zeroed: bool) -> *mut u8 {
    if align <= ALIGN {
        return alloc_plain(size, zeroed);
    }
    let block = alloc_aligned_any(size, align, zeroed);
    counted::requested(block, size);
    block
}

/// Allocates a block of `size` bytes from its class, the arena or the system. Zeroes the block if
/// `zeroed` is true.
fn alloc_any(size: usize, zeroed: bool) -> *mut u8 {
    if size > MAX_SMALL_SIZE {
        // A program that allocates only larger blocks reaches no other path that ticks.
        slab::tick();
    }
    if size <= MAX_CLASS_SIZE {
        let class = kmalloc::class_of(size);
        let block = match zeroed {
            true => kmalloc::alloc_zeroed(class, size),
            false => kmalloc::alloc_missed(class, size),
        };
        if !block.is_null() {
            counted::allocated_class(class);
            return block;
        }
    } else if let Some(block) = alloc_run(size, zeroed) {
        return block;
    }
    // Also reached for small sizes in a signal handler that interrupted the allocator: a mapping of
    // its own needs no lock.
    alloc_huge(size, ALIGN)
}

/// Allocates a run for `size` bytes. Returns `None` if `size` is [`HUGE`] or more, or if there is
/// no memory.
fn alloc_run(size: usize, zeroed: bool) -> Option<*mut u8> {
    if size >= HUGE {
        return None;
    }
    let granules = size.div_ceil(GRANULE).max(1);
    let node = arena::node_here();
    let run = slab::or_reclaim(|| arena::alloc_run(granules, node, LARGE, false))?;
    Some(run_of(run, size, zeroed))
}

/// Makes a block of `size` bytes from a new run. Zeroes the block if `zeroed` is true.
fn run_of(run: arena::Run, size: usize, zeroed: bool) -> *mut u8 {
    let block = run.start.as_ptr();
    if zeroed && !run.zeroed {
        // SAFETY: the run is new, so this thread owns it, and it has at least `size` bytes.
        unsafe { arena::zero_run(run.start, size) };
    }
    counted::allocated_large(size.div_ceil(GRANULE).max(1) * GRANULE);
    block
}

/// Allocates a block as a mapping of its own, or as a run of the arena if the system refuses the
/// mapping.
fn alloc_huge(size: usize, align: usize) -> *mut u8 {
    if let Some(block) = map_huge(size, align).or_else(|| alloc_run_for_huge(size, align)) {
        return block;
    }
    set_errno(libc::ENOMEM);
    counted::failed();
    null_mut()
}

/// Allocates a block as a mapping of its own.
// Not inlined, and the function below neither, so that `alloc_huge` takes little stack.
#[inline(never)]
fn map_huge(size: usize, align: usize) -> Option<*mut u8> {
    slab::make_room(size);
    let block = slab::or_reclaim_for(size, || arena::alloc_huge(size, align))?.as_ptr();
    counted::allocated_large(arena::huge_size(block).unwrap_or(size));
    Some(block)
}

/// Allocates a run in place of a mapping that the system has refused.
#[inline(never)]
fn alloc_run_for_huge(size: usize, align: usize) -> Option<*mut u8> {
    if align > GRANULE || size > isize::MAX as usize {
        return None;
    }
    let granules = size.div_ceil(GRANULE).max(1);
    let run = arena::alloc_run(granules, arena::node_here(), LARGE, false)?;
    // A new mapping reads as zeroes, and callers rely on zeroes. So the run is zeroed too.
    Some(run_of(run, size, true))
}

fn alloc_aligned_any(size: usize, align: usize, zeroed: bool) -> *mut u8 {
    slab::tick();
    if let Some(class) = kmalloc::class_of_aligned(size, align) {
        let block = match zeroed {
            true => kmalloc::alloc_zeroed(class, size),
            false => kmalloc::alloc_class(class),
        };
        if !block.is_null() {
            counted::allocated_class(class);
            return block;
        }
    } else if align <= GRANULE {
        if let Some(block) = alloc_run(size, zeroed) {
            return block;
        }
    } else if let Some(run) = arena::alloc_aligned_run(size, align, arena::node_here()) {
        return run_of(run, size, zeroed);
    }
    alloc_huge(size, align)
}
