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
//! # How an allocation is served
//!
//! | size | what serves it |
//! |---|---|
//! | up to 575 KiB | the cache of the size class |
//! | below 62 MiB | a run of the arena ([`pinfold::internal::arena`]) |
//! | 62 MiB and more | a mapping of its own |
//!
//! Each CPU has an array of pointers to free blocks for each size class, its *sheaf*. `malloc`
//! finds the size class and pops a block off the CPU's sheaf. For sizes up to 32 KiB, both are one
//! critical section. If the sheaf is empty, the slab layer supplies another sheaf.
//!
//! `free` reads the block's class from the page map, and pushes the block onto the CPU's
//! sheaf of that class.
//!
//! This crate defines the C malloc family under prefixed names, so that the C parts of a Rust
//! program keep the system's allocator. The crate `pinfold-names` defines the C library's names.
#![no_std]

#[doc(hidden)]
pub mod at_start;
#[doc(hidden)]
pub mod background;
pub mod c;
pub mod changeable;
mod control;
pub mod guard;
mod heap_dumps;
pub mod heap_profile;
pub mod settings;

use core::alloc::{GlobalAlloc, Layout};
use core::ptr::NonNull;
use pinfold::heaps::Heap;
use pinfold::internal::heap;

#[doc(hidden)]
pub use pinfold::internal::heap::scope::outside as outside_scopes;

/// Functions that `pinfold-names` inlines into `malloc`, `free` and the operators.
#[doc(hidden)]
pub mod inlined {
    pub use pinfold::internal::arena::huge_size;
    pub use pinfold::internal::heap::{
        alloc, alloc_aligned, alloc_aligned_zeroed, alloc_data, alloc_data_fast, alloc_data_slow,
        alloc_fast, alloc_slow, checks, fits, free, good_size, usable_size,
    };
    pub use pinfold::internal::profile::keep_frame;
    pub use pinfold_rseq::near;
}

/// Runs `f` while the calling thread's malloc allocates from `heap`. An allocation that would
/// exceed the heap's limit fails with ENOMEM.
///
/// "malloc" is the C library's names if the program runs on Pinfold's malloc, and Rust's global
/// allocator if that is `pinfold_malloc::Pinfold`. Any thread may free the blocks, inside or
/// outside of a scope. `realloc` keeps a block in its heap. A scope inside another replaces it
/// until it ends. A thread that is made in a scope begins outside of any.
///
/// The first scope of a process closes malloc's fast path for good, which costs each later malloc
/// of any thread some nanoseconds. A scope itself costs a few stores. Heap profiles and counts of
/// calls leave the heap's blocks out.
///
/// Returns `None`, and does not run `f`, on a processor architecture without scopes, and if there
/// is no memory to start the allocator.
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: pinfold_malloc::Pinfold = pinfold_malloc::Pinfold;
///
/// let tenant = pinfold::heaps::Heap::new("tenant-7")?;
/// let list = pinfold_malloc::scope(&tenant, || vec![1u8; 100_000]).expect("x86-64 has scopes");
/// assert!(tenant.held() >= list.len());
/// drop(list);
/// assert_eq!(tenant.held(), 0);
/// # Ok::<(), pinfold::heaps::HeapError>(())
/// ```
pub fn scope<R>(heap: &Heap, f: impl FnOnce() -> R) -> Option<R> {
    heap::scope::scope(heap, f)
}

/// The allocator, for `#[global_allocator]`. All instances are the same allocator.
///
/// On the common path an allocation or a free costs one critical section: no lock, no atomic
/// read-modify-write, no system call. Threads made before `main`, exit handlers and signal handlers
/// may allocate and free.
///
/// ```
/// use std::alloc::{GlobalAlloc, Layout};
///
/// let layout = Layout::new::<[u64; 8]>();
/// // SAFETY: the layout has a size, and the block is freed once, with the same layout.
/// unsafe {
///     let block = pinfold_malloc::Pinfold.alloc_zeroed(layout);
///     assert!(!block.is_null() && block.read() == 0);
///     pinfold_malloc::Pinfold.dealloc(block, layout);
/// }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Pinfold;

// SAFETY: blocks do not overlap. Each has at least the size and the alignment of its layout: every
// block is aligned to 16, and `alloc_aligned` finds larger alignments. Nothing here unwinds.
unsafe impl GlobalAlloc for Pinfold {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        heap::alloc_aligned(layout.size(), layout.align())
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, _layout: Layout) {
        // Finding the class by the address takes fewer instructions than by the layout.
        // SAFETY: `GlobalAlloc` requires that the caller passes ownership of a block from this
        // allocator.
        unsafe { heap::free(block) };
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        heap::alloc_aligned_zeroed(layout.size(), layout.align())
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: `GlobalAlloc` requires a block that this allocator made for `layout`.
        unsafe { heap::realloc_exact(block, layout, size) }
    }
}

impl Pinfold {
    /// Returns the largest size for which an allocation would return the same block as for
    /// `layout`, or 0 if no block is that large. A program that allocates this size may use all of
    /// the block.
    ///
    /// A block between 575 KiB and 62 MiB has up to 4032 usable bytes more, which depends on its
    /// address. The result is the layout's size if blocks end where the request ends: under
    /// `PINFOLD_SLAB_DEBUG`, and while blocks are guarded.
    ///
    /// ```
    /// use std::alloc::Layout;
    ///
    /// let size = pinfold_malloc::Pinfold::good_size(Layout::new::<[u8; 1100]>());
    /// assert_eq!(size, 1152);
    /// ```
    pub fn good_size(layout: Layout) -> usize {
        heap::good_size(layout.size(), layout.align())
    }

    /// Allocates a block for `layout`, and returns it with all bytes that the program may use.
    /// Returns `None` if there is no memory.
    ///
    /// The block is freed with a layout of the same alignment, and a size from `layout`'s to the
    /// returned one. A later `realloc` keeps the bytes of the layout that is passed to it.
    ///
    /// ```
    /// use std::alloc::{GlobalAlloc, Layout};
    ///
    /// let layout = Layout::from_size_align(1100, 8)?;
    /// let block = pinfold_malloc::Pinfold::alloc_at_least(layout).expect("memory");
    /// assert!(block.len() >= 1100);
    /// // SAFETY: the block came from this allocator, for a layout of this alignment.
    /// unsafe { pinfold_malloc::Pinfold.dealloc(block.cast().as_ptr(), layout) };
    /// # Ok::<(), std::alloc::LayoutError>(())
    /// ```
    pub fn alloc_at_least(layout: Layout) -> Option<NonNull<[u8]>> {
        let block = NonNull::new(heap::alloc_aligned(layout.size(), layout.align()))?;
        // SAFETY: the block is new.
        let size = unsafe { heap::usable_size(block.as_ptr()) };
        Some(NonNull::slice_from_raw_parts(block, size))
    }
}

/// Runs the examples of docs/heaps.md as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/heaps.md")]
struct Heaps;

/// Runs the example of docs/programs.md as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/programs.md")]
struct Programs;

/// Runs the README's examples as tests. They use `pinfold` and this crate.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Runs the example of this crate's README as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct OwnReadme;
