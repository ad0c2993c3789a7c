//! Pinfold as a program's allocator: [`Pinfold`] for Rust, and the C malloc family.
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: pinfold_malloc::Pinfold = pinfold_malloc::Pinfold;
//!
//! let numbers: Vec<u64> = (0..1000).collect();
//! assert_eq!(numbers.iter().sum::<u64>(), 499_500);
//! ```
//!
//! # The way of an allocation
//!
//! 1. `heap::alloc` finds the size's class, and pops a block off the current CPU's sheaf
//!    ([`pinfold::slab::kmalloc`]): one critical section.
//! 2. When the sheaf is empty, the slab layer brings the next one.
//! 3. Above 512 KiB a block is a run of the arena ([`pinfold::page`]), from 62 MiB on a mapping of
//!    its own.
//!
//! `heap::free` reads the block's class from the page map, and pushes the block onto the sheaf of
//! its class.
//!
//! The C family has prefixed names here, so that a Rust program's C parts keep the system's allocator. `pinfold-preload`, which
//! becomes `libpinfold.so`, gives it its own names.
#![no_std]

#[doc(hidden)]
pub mod background;
pub mod c;
mod c_align;
pub mod c_cache;
pub mod c_counter;
pub mod c_grace;
pub mod c_pages;
pub mod c_place;
pub mod c_policy;
pub mod c_report;
pub mod c_reserve;
pub mod c_shared;
pub mod c_shepherd;
pub mod c_slabinfo;
mod c_text;
mod count;
mod heap;
mod init;
pub mod settings;

use core::alloc::{GlobalAlloc, Layout};

/// The calls that a library with names of its own wants inlined in them.
#[doc(hidden)]
pub mod inlined {
    pub use pinfold_rseq::near;

    /// A block of `size` bytes from the CPU's cache; null where [`alloc`] has to look further.
    #[inline(always)]
    pub fn alloc_fast(size: usize) -> *mut u8 {
        crate::heap::alloc_fast(size)
    }

    /// As [`pinfold_malloc`](crate::c::pinfold_malloc).
    #[inline(always)]
    pub fn alloc(size: usize) -> *mut u8 {
        crate::heap::alloc(size)
    }

    /// As [`pinfold_free`](crate::c::pinfold_free).
    ///
    /// # Safety
    ///
    /// As there.
    #[inline(always)]
    pub unsafe fn free(block: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { crate::heap::free(block) };
    }
}

/// The allocator, for `#[global_allocator]`. All instances are the same.
///
/// Costs one critical section on the common path of allocating and freeing: no lock, no atomic read-modify-write, no
/// system call. Safe to use from threads made before `main`, in exit handlers and in signal handlers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pinfold;

// SAFETY: blocks are disjoint, as large as asked for and aligned: classes up to 16 bytes of alignment by their sizes,
// larger alignments by `alloc_aligned`. Nothing here unwinds.
unsafe impl GlobalAlloc for Pinfold {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        heap::alloc_aligned(layout.size(), layout.align())
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, _layout: Layout) {
        // The address says the class in fewer instructions than the size.
        // SAFETY: the caller's promise.
        unsafe { heap::free(block) };
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        heap::alloc_aligned_zeroed(layout.size(), layout.align())
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { heap::realloc_exact(block, layout, size) }
    }
}
