//! Making reserved granules usable: they, their records, and the node that they prefer.

use super::{Frame, GRANULE, MAP, PRIVATE, address_of};
use crate::{nodes, sys};
use core::sync::atomic::Ordering::Relaxed;

/// Commits granules of `node`, with their records.
pub(super) fn commit(node: usize, first: u32, count: u32) -> bool {
    let (start, size) = (address_of(first), count as usize * GRANULE);
    // SAFETY: the granules lie in the node's parts of the reservation, and are not in use.
    unsafe {
        if !commit_records(first, count) || !sys::commit(start, size) {
            return false;
        }
        if nodes::count() > 1 && !nodes::is_the_kernels(node) {
            sys::prefer_node(start, size, Some(nodes::id(node)));
        }
    }
    true
}

/// Commits the frames, private parts and map entries of granules; those that share a page with others are committed already or early.
///
/// # Safety
///
/// The granules lie in the reservation.
unsafe fn commit_records(first: u32, count: u32) -> bool {
    let page = sys::page_size();
    let commit = |start: usize, end: usize| {
        let start = start & !(page - 1);
        // SAFETY: whole pages of the reservation of frames or of the map.
        unsafe { sys::commit(start as *mut u8, end.next_multiple_of(page) - start) }
    };
    let entries = MAP.biased.load(Relaxed) + 2 * MAP.first.load(Relaxed);
    let (first, end) = (first as usize, (first + count) as usize);
    let frames = MAP.frames.load(Relaxed) as usize;
    let private = MAP.private.load(Relaxed) as usize;
    let frame = size_of::<Frame>();
    commit(frames + first * frame, frames + end * frame)
        && commit(private + first * PRIVATE, private + end * PRIVATE)
        && commit(entries + 2 * first, entries + 2 * end)
}
