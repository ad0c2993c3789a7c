//! Huge pages for long blocks.
//!
//! A *pageblock* is 2 MiB of a plain region, at a multiple of 2 MiB: as much as a huge page backs.
//! A program that writes to all of a long block takes 512 page faults for each pageblock, or one if
//! the pageblock is a huge page. But a program may also write to few pages of a long block, and
//! then the huge pages would take up to 512 times as much memory.
//!
//! So the arena looks at what the program does. When a block of [`LONG`] granules or more is freed
//! that was made of fresh memory, [`note_freed`] reads some of its pages. While at most one in
//! [`EMPTY`] of the pages that were read was zero, the pageblocks of the next long blocks get huge
//! pages. A block that the program wants zeroed gets none, and is not looked at, because a program
//! that fills a block does not need it zeroed. A block that grows is judged as it began.
//!
//! # States of a pageblock
//!
//! * **small**: the kernel backs it with small pages, as it was mapped. It becomes preferred when a
//!   long block takes all of it as fresh memory ([`prefer`]).
//! * **preferred**: the kernel backs it with a huge page, if it has one. It becomes small before a
//!   part of it is purged or moves away ([`refuse`]).
//!
//! So fresh memory of a plain region always has small pages, and a short run there takes no more
//! memory than it has. Dirty memory of a preferred pageblock serves any caller.
//!
//! # Who may write what
//!
//! Only a thread that owns all granules of a pageblock prefers it, and only a thread that owns one
//! of its granules refuses it. So no thread prefers a pageblock while another one refuses it. The
//! lock of the node's arena orders the two, because each granule comes from the free runs or goes
//! there between them. Two threads may refuse a pageblock at the same time, which does no harm. The
//! words guard no other memory, so all orderings are relaxed.

use super::huge_pages::{self, HUGE_PAGE};
use super::sparse::{self, Looked};
use super::window::MAX_WINDOW;
use super::{GRANULE, REGION, REGION_GRANULES, address_of, huge, window};
use crate::{spared, sys};
use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;

/// Granules of the shortest long block: 4 MiB. It has a whole pageblock wherever it begins.
pub(super) const LONG: u32 = 2 * HUGE_PAGE;
/// If more than one in this many pages of freed long blocks is zero, long blocks get small pages.
/// So if the program goes on as before, huge pages take about a sixteenth more memory at most.
const EMPTY: u32 = 16;
/// After this many pages, what was seen before counts half as much.
const REMEMBERED: u32 = 1024;

/// Pageblocks in a region. Each can be a mapping of its own, and stay so for good. So with more
/// regions than half of the mappings that the kernel allows could cover (64 GiB by default), no
/// more pageblocks are preferred.
const PAGEBLOCKS: usize = REGION_GRANULES / HUGE_PAGE as usize;

/// The preferred pageblocks of each region, a bit for each.
static PREFERRED: [AtomicU32; MAX_WINDOW / REGION] =
    [const { AtomicU32::new(0) }; MAX_WINDOW / REGION];
const _: () = assert!(PAGEBLOCKS == u32::BITS as usize);

/// How many pages of freed long blocks were looked at (the upper half), and how many of these were
/// zero (the lower half).
static SEEN: AtomicU32 = AtomicU32::new(0);

/// Looks at a long block of fresh memory that is freed. Leaves that out while a thread has isolated
/// its CPU: if a page that was never written is read, its first write interrupts all CPUs.
///
/// # Safety
///
/// The run at `start` has `granules`, at least [`LONG`], and no other thread uses it.
pub(super) unsafe fn note_freed(start: NonNull<u8>, granules: u32) {
    if spared::any() {
        return;
    }
    // SAFETY: the caller promises that only this thread uses the run, and that it is long.
    let Looked { all, zero } = unsafe { sparse::look(start, granules as usize * GRANULE) };
    let seen = SEEN.load(Relaxed);
    let (mut all, mut zero) = ((seen >> 16) + all as u32, (seen & 0xffff) + zero as u32);
    if all > REMEMBERED {
        (all, zero) = (all / 2, zero / 2);
    }
    // Another thread may store at the same time. Then one of the two blocks is forgotten.
    SEEN.store(all << 16 | zero, Relaxed);
}

/// Returns whether the program fills its long blocks, as far as it has freed any.
pub(super) fn are_filled() -> bool {
    let seen = SEEN.load(Relaxed);
    let (all, zero) = (seen >> 16, seen & 0xffff);
    all > 0 && zero * EMPTY <= all
}

/// Asks for huge pages for the pageblocks that lie whole in `granules` from `first` on, if long
/// blocks should have them. The granules are clean, belong to a long block, and lie in one region.
/// Costs a system call if there is such a pageblock.
pub(super) fn prefer(first: u32, granules: u32) {
    let from = first.next_multiple_of(HUGE_PAGE);
    let to = (first + granules) / HUGE_PAGE * HUGE_PAGE;
    if from >= to || window::is_dense(first) || !huge_pages::are_wanted_for_long_blocks() {
        return;
    }
    if window::count() > huge::mappings_most() / (2 * PAGEBLOCKS) {
        return;
    }
    let (word, bits) = bits(from, to);
    word.fetch_or(bits, Relaxed);
    // SAFETY: the granules are mapped, and the caller owns them.
    unsafe { sys::prefer_huge(address_of(from), (to - from) as usize * GRANULE) };
}

/// Asks for small pages again for the preferred pageblocks that `granules` from `first` on touch.
/// The granules lie in one region, and the caller owns them. Costs a load, and a system call if
/// there is such a pageblock.
pub(crate) fn refuse(first: u32, granules: u32) {
    let (word, bits) = bits(first, first + granules);
    let preferred = word.load(Relaxed) & bits;
    if preferred == 0 {
        return;
    }
    let region = first / REGION_GRANULES as u32 * REGION_GRANULES as u32;
    let from = region + preferred.trailing_zeros() * HUGE_PAGE;
    let to = region + (u32::BITS - preferred.leading_zeros()) * HUGE_PAGE;
    // SAFETY: these pageblocks are mapped, because they were preferred and none of them was
    // unmapped since. The others between them have small pages already.
    unsafe { sys::refuse_huge(address_of(from), (to - from) as usize * GRANULE) };
    // After the advice, so that another thread, or a forked child, that finds the bit clear finds
    // small pages too.
    word.fetch_and(!bits, Relaxed);
}

/// Returns whether granule `index` lies in a preferred pageblock. One load.
pub(super) fn is_preferred(index: u32) -> bool {
    let (word, bits) = bits(index, index + 1);
    word.load(Relaxed) & bits != 0
}

/// Returns the word of the region of granule `first`, and the bits of the pageblocks from that of
/// `first` to that of the granule before `end`.
fn bits(first: u32, end: u32) -> (&'static AtomicU32, u32) {
    let pageblock = |index: u32| index % REGION_GRANULES as u32 / HUGE_PAGE;
    let from = u32::MAX << pageblock(first);
    let to = u32::MAX >> (u32::BITS - 1 - pageblock(end - 1));
    (&PREFERRED[first as usize / REGION_GRANULES], from & to)
}
