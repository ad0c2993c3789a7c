//! Where a block that is a run begins in the run.
//!
//! If all large blocks began at multiples of a granule, arrays that a program walks side by side
//! would compete for the same few sets of each CPU's caches. So most such blocks begin at one of
//! [`LINES`] cache lines, their *colour*. The colour follows from the run's address. So nothing
//! stores it, and the free of a wrong address is recognised.
//!
//! | the page map's entry | the block begins |
//! |---|---|
//! | [`LARGE`] | with the run |
//! | [`COLOURED`] | at the colour of the run |

use super::numa::{self, NodeRequest};
use super::parked::{self, Parked};
use super::runs::{Run, alloc_at_multiple, give_back};
use super::{
    GRANULE, LARGE, Purpose, address_of, entry, frame, index_of, index_of_run, kept, pageblocks,
    run_size, set_entry,
};
use crate::sanitizer;
use core::ptr::NonNull;

/// The page map's entry for a run that is one block, which begins at the run's colour.
pub const COLOURED: u16 = LARGE - 1;
/// The largest alignment of a block that begins at a colour: a cache line.
pub const COLOURED_ALIGN: usize = 64;

/// The number of colours: cache lines in the smallest page.
const LINES: usize = 1 << LINES_SHIFT;
const LINES_SHIFT: u32 = 6;
/// The largest offset of a block in its run.
const MOST: usize = (LINES - 1) * COLOURED_ALIGN;

const _: () = assert!(MOST < 4096 && LINES * COLOURED_ALIGN == 4096);

/// Returns where in its run a block begins. `head` is the run's first granule.
fn colour(head: u32) -> usize {
    // Two rounds of multiplying, so that no length of runs that follow each other gives them few
    // colours. The numbers are those of MurmurHash3's last step.
    let mut mixed = head.wrapping_mul(0x85eb_ca6b);
    mixed ^= mixed >> 13;
    mixed = mixed.wrapping_mul(0xc2b2_ae35);
    (mixed >> (u32::BITS - LINES_SHIFT)) as usize * COLOURED_ALIGN
}

/// Returns where a block begins in a run of its own that has the entry of a heap (`heaps`). The run
/// begins at `start`.
pub(crate) fn colour_of(start: NonNull<u8>) -> usize {
    colour(index_of(start.as_ptr() as usize))
}

/// Returns how many granules a new run needs for a block of `size` bytes, which is below
/// [`HUGE`](super::HUGE). `entry` is [`LARGE`] or [`COLOURED`].
pub fn granules_for(size: usize, entry: u16) -> usize {
    let most = if entry == COLOURED { MOST } else { 0 };
    (size + most).div_ceil(GRANULE).max(1)
}

/// Returns how many bytes each coloured block has that is allocated for `size` bytes, which is
/// below [`HUGE`](super::HUGE). A block has more if its colour is not the last one.
pub fn least_of_coloured(size: usize) -> usize {
    granules_for(size, COLOURED) * GRANULE - MOST
}

/// Allocates a run for a block: one that this CPU has parked (`parked`), or else as
/// [`alloc_run`](super::alloc_run) does. `entry` is [`LARGE`] or [`COLOURED`]. A program that wants
/// the block `zeroed` may leave most of it so (`pageblocks`).
pub fn alloc_block_run(granules: usize, node: usize, entry: u16, zeroed: bool) -> Option<Run> {
    let Some(parked) = parked::take(node, granules) else {
        let purpose = match granules >= pageblocks::LONG as usize && !zeroed {
            true => Purpose::LongBlock,
            false => Purpose::Other,
        };
        return alloc_at_multiple(granules, 1, node, (entry, false), purpose);
    };
    set_entry(parked.head, entry);
    numa::count(NodeRequest::only(node), granules);
    sanitizer::took_memory();
    NonNull::new(address_of(parked.head)).map(|start| Run {
        start,
        zeroed: false,
    })
}

/// Frees a run that is one block, as [`free_run`](super::free_run) does. This CPU may park the run.
///
/// # Safety
///
/// `start` begins a run that is one block, with the entry [`LARGE`] or [`COLOURED`], and no thread
/// uses the run any more.
pub unsafe fn free_block_run(start: NonNull<u8>) {
    let head = index_of_run(start);
    let run = frame(head);
    // SAFETY: the caller promises that `start` begins a run that no thread uses any more. So only
    // this thread uses these fields of its first frame.
    let granules = unsafe {
        let granules = u32::from((*run).granules);
        if (*run).purpose == Purpose::LongBlock {
            pageblocks::note_freed(start, granules);
            // If the run is parked, it serves again as memory that was used.
            (*run).purpose = Purpose::Other;
        }
        granules
    };
    set_entry(head, 0);
    parked::park(Parked { head, granules }, |run| {
        kept::large_less(run.granules as usize);
        give_back(run.head, run.granules);
    });
}

/// Returns where the block begins that is the run at `start`. Costs a few instructions and a load.
///
/// # Safety
///
/// A run in use begins at `start`.
pub unsafe fn block_of_run(start: NonNull<u8>) -> NonNull<u8> {
    let address = start.as_ptr() as usize;
    match entry(address) {
        // SAFETY: the caller promises that a run begins at `start`. A run has at least one granule,
        // and a colour is less.
        COLOURED => unsafe { start.add(colour(index_of(address))) },
        _ => start,
    }
}

/// Returns the run that is the block at `block`, or `None` if no such block begins there. Takes no
/// lock. Costs a few instructions and four loads. `block` may be any address.
pub fn run_at(block: *mut u8) -> Option<NonNull<u8>> {
    let address = block as usize;
    let offset = offset_in_run(block);
    match entry(address) {
        LARGE if offset == 0 => NonNull::new(block),
        COLOURED if offset == colour(index_of(address)) => {
            NonNull::new(address_of(index_of(address)))
        }
        _ => None,
    }
}

/// Returns the size, in bytes, of the block at `block`, whose run begins at `run` ([`run_at`]).
/// Costs two loads.
///
/// # Safety
///
/// The run is in use.
pub unsafe fn size_in_run(block: *mut u8, run: NonNull<u8>) -> usize {
    // SAFETY: the caller promises that the run is in use.
    unsafe { run_size(run) - offset_in_run(block) }
}

/// Returns how many bytes lie before a block in its run. `block` is a block that is a run. For any
/// other address, returns its offset in its granule.
pub fn offset_in_run(block: *mut u8) -> usize {
    block as usize & (GRANULE - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::MAX_RUN;

    #[test]
    fn runs_of_any_length_that_follow_each_other_begin_at_many_lines() {
        for granules in 1..=MAX_RUN {
            let mut taken = [0; LINES];
            (0..16).for_each(|nth| taken[colour(11 + nth * granules) / COLOURED_ALIGN] += 1);
            // Processors of today have 8 ways or more in each set of the first cache.
            assert!(taken.iter().all(|&blocks| blocks <= 6), "{granules}");
        }
    }
}
