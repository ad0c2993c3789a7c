//! The allocator: musl's own without a feature.

#[cfg(feature = "pinfold-malloc")]
#[global_allocator]
static ALLOCATOR: pinfold_malloc::Pinfold = pinfold_malloc::Pinfold;

#[cfg(all(feature = "mimalloc", not(feature = "pinfold-malloc")))]
mod mimalloc {
    use std::alloc::{GlobalAlloc, Layout};

    struct Mimalloc;

    #[global_allocator]
    static ALLOCATOR: Mimalloc = Mimalloc;

    // SAFETY: the functions of mimalloc keep the promises of an allocator. They take the size and
    // alignment of the layout, as the crate mimalloc passes them.
    unsafe impl GlobalAlloc for Mimalloc {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            // SAFETY: any size, and an alignment that is a power of two.
            unsafe { libmimalloc_sys::mi_malloc_aligned(layout.size(), layout.align()).cast() }
        }

        unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
            // SAFETY: as above.
            unsafe { libmimalloc_sys::mi_zalloc_aligned(layout.size(), layout.align()).cast() }
        }

        unsafe fn dealloc(&self, at: *mut u8, _: Layout) {
            // SAFETY: the caller promises that `at` is a live block of this allocator.
            unsafe { libmimalloc_sys::mi_free(at.cast()) }
        }

        unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
            // SAFETY: as above, and the alignment is that of the block.
            unsafe { libmimalloc_sys::mi_realloc_aligned(at.cast(), size, layout.align()).cast() }
        }
    }
}
