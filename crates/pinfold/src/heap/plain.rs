//! Blocks that are not sampled, from their class, the arena or the system.

use super::blocks::ALIGN;
use super::{counted, gate};
use crate::arena::{self, COLOURED, COLOURED_ALIGN, GRANULE, HUGE, LARGE};
use crate::slab;
use crate::slab::kmalloc::{self, MAX_CLASS_SIZE, MAX_SMALL_SIZE};
use crate::sys::{self, set_errno};
use core::ptr::null_mut;

/// What a caller asks for.
#[derive(Clone, Copy)]
pub(super) struct Ask {
    pub(super) size: usize,
    /// A power of two.
    pub(super) align: usize,
    /// Whether the block must read as zeroes.
    pub(super) zeroed: bool,
    /// Whether the block will hold no pointers, so that it must share no granule with others.
    pub(super) data: bool,
}

impl Ask {
    /// Asks for `size` bytes, aligned for any type.
    #[inline]
    pub(super) fn of(size: usize) -> Ask {
        Ask {
            size,
            align: ALIGN,
            zeroed: false,
            data: false,
        }
    }

    /// Asks for `size` bytes without pointers, aligned for any type.
    #[inline]
    pub(super) fn data(size: usize) -> Ask {
        Ask {
            data: true,
            ..Ask::of(size)
        }
    }

    /// Returns the size class or data twin that serves, or `None` if none does.
    pub(super) fn class(self) -> Option<usize> {
        let class = match self.align {
            ..=ALIGN => (self.size <= MAX_CLASS_SIZE).then(|| kmalloc::class_of(self.size)),
            _ => kmalloc::class_of_aligned(self.size, self.align),
        }?;
        Some(if self.data {
            kmalloc::data(class)
        } else {
            class
        })
    }

    /// Returns how many bytes of the block a program may use at least, wherever the block comes
    /// from. Returns `None` if there are not so many addresses.
    #[inline(never)]
    pub(super) fn room(self) -> Option<usize> {
        let Ask { size, align, .. } = self;
        if let Some(class) = self.class() {
            return Some(kmalloc::size_of_class(class));
        }
        let is_run = size < HUGE && (align <= GRANULE || arena::is_aligned_run(size, align));
        match is_run {
            // A larger block would be a mapping.
            true if align <= COLOURED_ALIGN => Some(arena::least_of_coloured(size).min(HUGE - 1)),
            true => Some(size.max(1).next_multiple_of(GRANULE).min(HUGE - 1)),
            false => size.max(1).checked_next_multiple_of(sys::page_size()),
        }
    }
}

/// Allocates a block after the CPU's sheaf was found empty, and for a size above 32 KiB.
#[inline(never)]
pub(super) extern "C" fn alloc_missed(size: usize) -> *mut u8 {
    gate::serve_if_closed();
    alloc(Ask::of(size))
}

/// Allocates a block that is not sampled, from its class, the arena or the system.
pub(super) fn alloc(ask: Ask) -> *mut u8 {
    let block = alloc_any(ask);
    counted::requested(block, ask.size);
    block
}

fn alloc_any(ask: Ask) -> *mut u8 {
    let Ask { size, align, .. } = ask;
    if size > MAX_SMALL_SIZE || align > ALIGN {
        // A program that asks only for such blocks reaches no other path that ticks.
        slab::tick();
    }
    if let Some(class) = ask.class() {
        let block = match ask.zeroed {
            true => kmalloc::alloc_zeroed(class, size),
            // Mostly, the fast path has just found the CPU's sheaf empty.
            false => kmalloc::alloc_missed(class, size),
        };
        if !block.is_null() {
            counted::allocated_class(class);
            return block;
        }
    } else if align > GRANULE {
        if let Some(run) = arena::alloc_aligned_run(size, align, arena::node_here()) {
            return run_of(run, size, ask.zeroed);
        }
    } else if let Some(block) = alloc_run(ask) {
        return block;
    }
    // Also reached for small sizes in a signal handler that interrupted the allocator: a mapping of
    // its own needs no lock. It is as large as the block that it stands for, because programs ask
    // for that size before they allocate (`good_size`).
    alloc_huge(ask.room().unwrap_or(size), align.max(ALIGN), ask.zeroed)
}

/// Allocates a block that is a run. Returns `None` if it has [`HUGE`] bytes or more, or if there is
/// no memory.
fn alloc_run(ask: Ask) -> Option<*mut u8> {
    if ask.size >= HUGE {
        return None;
    }
    let entry = match ask.align <= COLOURED_ALIGN {
        true => COLOURED,
        false => LARGE,
    };
    let granules = arena::granules_for(ask.size, entry);
    let node = arena::node_here();
    let run = slab::or_reclaim(|| arena::alloc_block_run(granules, node, entry, ask.zeroed))?;
    Some(run_of(run, ask.size, ask.zeroed))
}

/// Makes a block of `size` bytes from a new run. Zeroes the block if `zeroed` is true.
fn run_of(run: arena::Run, size: usize, zeroed: bool) -> *mut u8 {
    // SAFETY: the run is new and in use.
    let block = unsafe { arena::block_of_run(run.start) }.as_ptr();
    if zeroed && !run.zeroed {
        // SAFETY: the run is new, so this thread owns it. It has `size` bytes from the block on.
        unsafe { arena::zero_run(run.start, arena::offset_in_run(block) + size) };
    }
    // SAFETY: the run is new and in use.
    counted::allocated_large(unsafe { arena::size_in_run(block, run.start) });
    block
}

/// Allocates a block as a mapping of its own, or as a run of the arena if the system refuses the
/// mapping. A program that wants the block `zeroed` may leave most of it so.
fn alloc_huge(size: usize, align: usize, zeroed: bool) -> *mut u8 {
    if let Some(block) = map_huge(size, align, zeroed).or_else(|| alloc_run_for_huge(size, align)) {
        return block;
    }
    set_errno(libc::ENOMEM);
    counted::failed();
    null_mut()
}

/// Allocates a block as a mapping of its own.
// Not inlined, and the function below neither, so that `alloc_huge` takes little stack.
#[inline(never)]
fn map_huge(size: usize, align: usize, zeroed: bool) -> Option<*mut u8> {
    slab::make_room(size);
    let alloc = || arena::alloc_huge_for(size, align, 0, zeroed);
    let block = slab::or_reclaim_for(size, alloc)?.as_ptr();
    counted::allocated_large(arena::huge_size(block).unwrap_or(size));
    Some(block)
}

/// Allocates a run in place of a mapping that the system has refused.
#[inline(never)]
fn alloc_run_for_huge(size: usize, align: usize) -> Option<*mut u8> {
    if align > GRANULE || size > isize::MAX as usize {
        return None;
    }
    let granules = arena::granules_for(size, LARGE);
    let run = arena::alloc_run(granules, arena::node_here(), LARGE, false)?;
    // A new mapping reads as zeroes, and callers rely on zeroes. So the run is zeroed too.
    Some(run_of(run, size, true))
}
