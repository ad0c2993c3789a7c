//! Runs of one block that grow, shrink or move with their pages.
//!
//! `realloc` would copy a large block each time the block grows. Instead:
//!
//! 1. The run grows in place into free granules behind it ([`resize_run`]).
//! 2. If these granules are in use, the run is copied to dirty memory, if possible with as many
//!    free granules behind it as the run has ([`alloc_growing_run`]). So the next growth needs no
//!    copy. A copy to resident memory costs less than the page faults that follow a move of pages.
//! 3. If too little memory is dirty, or if the block is sparse, the kernel moves the pages of a
//!    long run to a mapping of its own ([`move_run`]). From then on the block is a huge block,
//!    which the kernel grows. A short run is copied to fresh memory.
//!
//! A mapping remembers the address at which it was made. So the kernel never joins moved pages with
//! their new neighbours, and pages that move within a region split its mapping for good. A mapping
//! of its own disappears when the block is freed.

use super::runs::{Arena, Run, alloc_at_multiple, arena_of, give_back};
use super::window;
use super::{
    GRANULE, HUGE, LARGE, MAX_RUN, Purpose, State, address_of, block_of_run, budget, frame, held,
    huge, index_of_run, kept, numa, offset_in_run, pageblocks, set_entry,
};
use crate::sys::Mapped;
use core::ptr::NonNull;

/// Allocates a run for a block of `size` bytes at a multiple of `align`, a power of two larger than
/// [`GRANULE`]. Costs as much as [`alloc_run`](super::alloc_run).
///
/// Returns `None` when `alloc_run` does, and if no run is large enough ([`is_aligned_run`]).
pub fn alloc_aligned_run(size: usize, align: usize, node: usize) -> Option<Run> {
    if !is_aligned_run(size, align) {
        return None;
    }
    let granules = size.div_ceil(GRANULE).max(1);
    let align = (align / GRANULE) as u32;
    alloc_at_multiple(granules, align, node, (LARGE, false), Purpose::Other)
}

/// Returns whether a run can begin at a multiple of `align`, a power of two larger than
/// [`GRANULE`], and have `size` bytes.
pub fn is_aligned_run(size: usize, align: usize) -> bool {
    let most = MAX_RUN as usize + 1;
    size < HUGE && align < HUGE && size.div_ceil(GRANULE).max(1) + align / GRANULE <= most
}

/// Changes the length of a run that is one block to `granules`, in place. Returns false, and
/// changes nothing, if the run cannot grow there. Shrinking always succeeds.
///
/// Takes the arena's lock, and may map memory by a system call.
///
/// # Safety
///
/// `start` begins a run that is one block, and only the caller uses the run.
pub unsafe fn resize_run(start: NonNull<u8>, granules: usize) -> bool {
    let head = index_of_run(start);
    // SAFETY: the caller promises that `start` begins a run that only the caller uses. So no other
    // thread uses the run's first frame.
    let run = unsafe { &mut *frame(head) };
    let old = u32::from(run.granules);
    if granules > MAX_RUN as usize {
        return false;
    }
    let new = granules as u32;
    if new <= old {
        run.granules = new as u16;
        if new < pageblocks::LONG && run.purpose == Purpose::LongBlock {
            run.purpose = Purpose::Other;
        }
        if new < old {
            // SAFETY: both granules are in the run, which the caller promises is its own.
            unsafe { cut(head + new) };
            kept::large_less((old - new) as usize);
            give_back(head + new, old - new);
        }
        return true;
    }
    if budget::near(held() as usize, (new - old) as usize * GRANULE) {
        return false;
    }
    let node = window::node_of(start.as_ptr() as usize);
    let Some(mut arena) = arena_of(node).lock_or_divert() else {
        return false;
    };
    let is_long = new >= pageblocks::LONG;
    let mut clean = arena.take_at(node, head + old, new - old, is_long);
    if clean.is_none() && arena.take_parked(node, |run| run.head == head + old) {
        clean = arena.take_at(node, head + old, new - old, is_long);
    }
    let Some(clean) = clean else {
        return false;
    };
    run.granules = new as u16;
    if clean < new - old && run.purpose == Purpose::LongBlock {
        run.purpose = Purpose::Other;
    }
    arena.hand_out(node, new - old, clean);
    drop(arena);
    kept::large_more((new - old) as usize);
    true
}

/// Makes the granule before `index` the last of a run, and the granule at `index` the first of
/// another. Sets their states, because the frames may still have the states of free runs that once
/// ended or began there. Does not write the state of the run's own first or last frame, which is
/// [`State::Busy`] already and which a holder of the arena's lock may be reading.
///
/// # Safety
///
/// Both granules are in a run that only the caller uses.
unsafe fn cut(index: u32) {
    // SAFETY: the caller promises that both granules are in its own run.
    unsafe {
        for frame in [frame(index - 1), frame(index)] {
            if (*frame).state != State::Busy {
                (*frame).state = State::Busy;
            }
        }
    }
}

/// Moves the pages of a run that is one block to a mapping of its own, a huge block of at least
/// `size` bytes. The block begins as far behind the mapping's beginning as it began behind the
/// run's. Returns `None`, and does nothing, if that cannot be done.
///
/// Costs a few system calls. Only for long runs, because each such block takes a mapping. If the
/// process has many huge blocks already, returns `None`, so that mappings are left for the program.
///
/// # Safety
///
/// `start` begins a run that is one block, and only the caller uses the run.
pub unsafe fn move_run(start: NonNull<u8>, size: usize) -> Option<NonNull<u8>> {
    let head = index_of_run(start);
    // SAFETY: the caller promises that `start` begins a run. Its first frame has its length.
    let old = u32::from(unsafe { (*frame(head)).granules });
    let node = window::node_of(start.as_ptr() as usize);
    let bytes = old as usize * GRANULE;
    // SAFETY: the caller promises that `start` begins a run.
    let offset = offset_in_run(unsafe { block_of_run(start) }.as_ptr());
    // The run may have room for `size` bytes. Then the pages stay.
    let more = size.checked_add(offset)?.checked_sub(bytes);
    let more = more.filter(|&more| more > 0)?;
    if budget::near(held() as usize, more) {
        return None;
    }
    map_behind(node, head + old);
    // The kernel moves the pages of one mapping only. Pages of different kinds are in several.
    pageblocks::refuse(head, old);
    // SAFETY: these are all pages of the run, which the caller promises is its own.
    let new = unsafe { huge::adopt(start.as_ptr(), bytes, size, offset) }?;
    set_entry(head, 0);
    kept::large_less(old as usize);
    super::moved_away(node, bytes);
    numa::gave_back(node, bytes);
    refill(node, head, old);
    Some(new)
}

/// Maps the granules from `index` on if they are absent. Otherwise the kernel could lengthen the
/// mapping of the run before them into these addresses, which belong to the arena.
fn map_behind(node: usize, index: u32) {
    if let Some(mut arena) = arena_of(node).lock_or_divert() {
        arena.map_front(node, index, 1);
    }
}

/// Allocates a run for a block that has grown and may grow again. The page map's entry of the first
/// granule becomes `entry`: [`LARGE`] or [`COLOURED`](super::COLOURED). Prefers dirty runs, which
/// need no page faults, and runs that leave as many free granules behind the block as the block
/// has. Unless `fresh` is true, at least half of the run is dirty.
///
/// Returns `None` when [`alloc_run`](super::alloc_run) does, and if `fresh` is false and too little
/// is dirty. Takes the arena's lock, and may map memory by a system call.
pub fn alloc_growing_run(
    granules: usize,
    node: usize,
    entry: u16,
    fresh: bool,
) -> Option<NonNull<u8>> {
    let granules = u32::try_from(granules).ok()?;
    if granules > MAX_RUN {
        return None;
    }
    let mut arena = arena_of(node).lock_or_divert()?;
    let room = (2 * granules).min(MAX_RUN);
    let find = |arena: &mut Arena| {
        let mut lengths = [room, granules].into_iter();
        lengths.find_map(|length| arena.free.find(State::Dirty, length, false))
    };
    let mut dirty = find(&mut arena);
    if dirty.is_none() && arena.take_parked(node, |_| true) {
        dirty = find(&mut arena);
    }
    let (head, clean) = if let Some(head) = dirty {
        arena.free.take_front(head, granules);
        (head, 0)
    } else if budget::near(held() as usize, granules as usize * GRANULE) {
        return None;
    } else if let Some(mixed) = arena.take_mixed(node, granules, granules >= pageblocks::LONG) {
        mixed
    } else if fresh {
        (take_roomy(&mut arena, node, granules)?, granules)
    } else {
        return None;
    };
    // SAFETY: the run was taken out of the free runs above, so only this thread uses its frame.
    let run = unsafe { &mut *frame(head) };
    (run.head, run.granules, run.purpose) = (head, granules as u16, Purpose::Other);
    arena.hand_out(node, granules, clean);
    drop(arena);
    set_entry(head, entry);
    kept::large_more(granules as usize);
    NonNull::new(address_of(head))
}

/// Takes `granules` of a clean run, if possible with as many free granules behind them. Makes a
/// region only if no free run is long enough. Returns the first granule.
fn take_roomy(arena: &mut Arena, node: usize, granules: u32) -> Option<u32> {
    let room = (2 * granules).min(MAX_RUN);
    let head = clean_run(arena, node, granules, room)
        .or_else(|| clean_run(arena, node, granules, granules))
        .or_else(|| {
            arena.add_region(node, false)?;
            clean_run(arena, node, granules, room)
        })?;
    arena.free.take_front(head, granules);
    if granules >= pageblocks::LONG {
        pageblocks::prefer(head, granules);
    }
    Some(head)
}

/// Returns the first granule of `room` free granules, of which at least the first `granules` are
/// clean. The others may be absent.
fn clean_run(arena: &mut Arena, node: usize, granules: u32, room: u32) -> Option<u32> {
    if let Some(head) = arena.free.find(State::Clean, room, false) {
        return Some(head);
    }
    let head = arena.free.find(State::Absent, room, false)?;
    let before = arena.free.clean_before(head);
    if before < granules {
        let Mapped::Done = arena.map_front(node, head, granules - before) else {
            return None;
        };
    }
    Some(head - before)
}

/// Maps the granules of a run whose pages have moved away, and makes them a clean run. If they
/// stayed unmapped, each of these holes would split a mapping, and the kernel limits how many
/// mappings a process has.
///
/// In a signal handler that interrupted the lock's holder, and while another thread forks, the lock
/// cannot be taken. The arena then never uses these addresses again.
fn refill(node: usize, head: u32, granules: u32) {
    let Some(mut arena) = arena_of(node).lock_or_divert() else {
        return;
    };
    let state = match window::map_granules(node, head, granules) {
        Mapped::Done => State::Clean,
        _ => {
            arena.unmapped(node, granules);
            State::Absent
        }
    };
    kept::use_less(node, granules as usize);
    arena.free.free(head, granules, state, 0);
}
