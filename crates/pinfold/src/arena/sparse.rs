//! Blocks of which the program has written only a part: coroutines' stacks, sparse arrays, buffers
//! that stay almost empty.

use super::{GRANULE, index_of_run, pageblocks};
use crate::sys;
use core::ptr::NonNull;

/// Runs of at least this many bytes may be sparse ([`is_sparse`]).
const SPARSE_FROM: usize = 1 << 20;
/// The number of parts of a run at whose borders [`look`] reads a page. A prime number, because
/// programs often write at multiples of a power of two.
const LOOKED_AT: usize = 17;

/// How many pages of a run [`look`] has read, and how many of them were zero.
pub(super) struct Looked {
    pub(super) all: usize,
    pub(super) zero: usize,
}

/// Reads at most 17 pages of the first `size` bytes of a run in use, each up to its first word that
/// is not zero.
///
/// # Safety
///
/// The run has `size` bytes, at least 1 MiB, and no other thread writes to it.
pub(super) unsafe fn look(start: NonNull<u8>, size: usize) -> Looked {
    let page = sys::page_size();
    // An odd number of pages, so that few samples lie at multiples of a large power of two.
    let step = ((size / LOOKED_AT / page) | 1) * page;
    let is_zero = |offset: &usize| {
        let words = start.as_ptr().wrapping_add(*offset).cast::<u64>();
        // SAFETY: `offset` is a multiple of the page size, and the page lies in the run. All bytes
        // of the run were written by a holder, or are zeroes of the kernel.
        (0..page / 8).all(|nth| unsafe { words.add(nth).read_volatile() } == 0)
    };
    let offsets = (step..size - page).step_by(step);
    Looked {
        all: offsets.clone().count(),
        zero: offsets.filter(is_zero).count(),
    }
}

/// Returns whether less than a quarter of the first `size` bytes of a run in use seems to have been
/// written. Reads at most 17 pages, and counts those that are zero. A run of less than 1 MiB is
/// never sparse.
///
/// # Safety
///
/// The run has `size` bytes, and no other thread writes to it.
pub unsafe fn is_sparse(start: NonNull<u8>, size: usize) -> bool {
    if size < SPARSE_FROM {
        return false;
    }
    // SAFETY: the caller promises the same.
    let Looked { all, zero } = unsafe { look(start, size) };
    4 * zero > 3 * all
}

/// Zeroes the first `size` bytes of a run in use.
///
/// Writing zeroes makes each page resident, and a program may touch few pages of a large zeroed
/// block. But giving the pages back costs a program that fills its blocks a page fault for each
/// page. So only the pages of a run that [is sparse](is_sparse) go back to the system.
///
/// # Safety
///
/// The run has `size` bytes, and only the caller uses it.
pub unsafe fn zero_run(start: NonNull<u8>, size: usize) {
    let at = start.as_ptr();
    // SAFETY: the caller promises that only the caller uses the run, which has whole pages.
    unsafe {
        let pages = size.next_multiple_of(sys::page_size());
        if !is_sparse(start, size) {
            at.write_bytes(0, size);
            return;
        }
        pageblocks::refuse(index_of_run(start), size.div_ceil(GRANULE) as u32);
        if !sys::purge(at, pages) {
            at.write_bytes(0, size);
        }
    }
}
