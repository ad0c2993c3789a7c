//! Which blocks are sampled, and how their frees are recognised.
//!
//! While samples are taken (`sampling`), the fast path of malloc is closed (`gate`), and that of
//! free stays open. The slow path counts the block's bytes and takes the block in one critical
//! section ([`gate::alloc_counted`]). If it cannot, it asks whether a sample is due
//! ([`profile::due`]).
//!
//! A *sampled* block is recognised when it is freed:
//!
//! * A block of a size class comes from the class's twin (`slab::kmalloc`), whose number in the
//!   page map the fast path of free does not know.
//! * A larger block always takes the slow path of free. Once samples were started, this path looks
//!   every larger block up in the table of sampled blocks.
//!
//! In a heap profile, a block of the class *stands in* for each sampled block of a class, so that
//! the profile knows in which slab the sampled block would lie without it (`fragments`).
//!
//! `realloc` in place leaves a sampled block sampled. A run or a huge block that grows in place may
//! be sampled because of the growth ([`profile::grown`]). A block that moves counts as freed and
//! allocated.
//!
//! A block that is sampled for guarding alone, and is not guarded, is a plain block. A *guarded*
//! block lies outside the arenas, so its free takes the slow path.

use super::gate::{self, alloc_behind};
use super::mode::{self, GUARD, PROFILE};
use super::plain::{self, Ask};
use super::{blocks, counted};
use crate::profile::{self, Resize, StandIn};
use crate::slab::kmalloc;
use crate::sys::keep_errno;
use crate::{arena, guarded, slab};
use core::ptr::null_mut;

/// Allocates like `heap::alloc` while samples are taken, before the block's bytes are counted.
#[cold]
#[inline(never)]
pub(super) extern "C" fn alloc_uncounted(size: usize) -> *mut u8 {
    gate::serve_if_closed();
    if let Some(mean) = profile::due(size) {
        return alloc_due(size, mean);
    }
    let block = alloc_behind(size);
    if block.is_null() {
        return plain::alloc_missed(size);
    }
    block
}

/// Allocates a block without pointers, like [`alloc_uncounted`].
#[cold]
#[inline(never)]
pub(super) extern "C" fn alloc_data_uncounted(size: usize) -> *mut u8 {
    gate::serve_if_closed();
    if let Some(mean) = profile::due(size) {
        return alloc_data_due(size, mean);
    }
    plain::alloc(Ask::data(size))
}

/// Allocates a block whose sample is due.
// `extern "C"`, so that `alloc_uncounted` ends in a jump: the caller's frame is the program's.
#[inline(never)]
extern "C" fn alloc_due(size: usize, mean: u64) -> *mut u8 {
    // In a program whose other calls are all fast, only this call serves other processes' requests.
    slab::tick();
    alloc_sampled(Ask::of(size), mean, profile::here())
}

/// Allocates a block without pointers whose sample is due, like [`alloc_due`].
// A function of its own, because a flag of `alloc_due` would take stack in `realloc`.
#[inline(never)]
extern "C" fn alloc_data_due(size: usize, mean: u64) -> *mut u8 {
    slab::tick();
    alloc_sampled(Ask::data(size), mean, profile::here())
}

/// Allocates a block that is sampled. `mean` is what [`profile::due`] returned. `from` is in the
/// frame of the allocator's outermost function ([`profile::here`]).
// Inlined, because calls that need much stack go through this function.
#[inline(always)]
pub(super) fn alloc_sampled(ask: Ask, mean: u64, from: usize) -> *mut u8 {
    let what_for = mode::samples();
    let block = alloc_guarded(ask, from);
    let (block, is_known) = match what_for & !GUARD {
        0 if block.is_null() => (plain::alloc(ask), false),
        0 => (block, false),
        _ if block.is_null() => alloc_known(ask),
        _ => (block, true),
    };
    if is_known && !block.is_null() {
        enter(block, ask, mean, from);
    } else if !block.is_null() && what_for & !GUARD != 0 {
        profile::dropped();
    }
    block
}

/// Enters the sample of a block, with a block that stands in for it.
// Not inlined, as the function below, so that their variables take no stack where calls go deep.
#[inline(never)]
fn enter(block: *mut u8, ask: Ask, mean: u64, from: usize) {
    let stand_in = match mode::samples() & PROFILE {
        0 => StandIn::NONE,
        // The sample of a block that is large beside the interval stands for this block alone.
        _ => kmalloc::stand_in(block, mean <= 1 || ask.size as u64 / 4 >= mean),
    };
    enter_with(block, ask.size, mean, stand_in, from);
}

#[inline(never)]
fn enter_with(block: *mut u8, size: usize, mean: u64, stand_in: StandIn, from: usize) {
    keep_errno(|| {
        let unused = profile::allocated(block, size, mean, stand_in, from);
        // SAFETY: the block came from `stand_in`, and its sample is gone.
        unsafe { kmalloc::release(unused) };
    });
}

/// Allocates a guarded block. Returns null if the block is not to be guarded.
fn alloc_guarded(ask: Ask, from: usize) -> *mut u8 {
    if mode::samples() & GUARD == 0 {
        return null_mut();
    }
    let block = keep_errno(|| guarded::alloc(ask.size, ask.align, ask.zeroed, from));
    if !block.is_null() {
        let class = kmalloc::class_of(ask.size);
        counted::allocated_class(class);
        counted::requested_guarded(class, ask.size);
    }
    block
}

/// Allocates a block whose free recognises that the block is sampled, and returns true with it. If
/// there is no memory for such a block, returns a plain one and false.
fn alloc_known(ask: Ask) -> (*mut u8, bool) {
    let Some(class) = ask.class() else {
        return (plain::alloc(ask), true);
    };
    let twin = kmalloc::sampled(class);
    let block = match ask.zeroed {
        true => kmalloc::alloc_zeroed(twin, ask.size),
        false => kmalloc::alloc_from(twin, ask.size),
    };
    if block.is_null() {
        return (plain::alloc(ask), false);
    }
    counted::allocated_class(class);
    counted::requested(block, ask.size);
    (block, true)
}

/// Samples `block` of `size` bytes if a sample is due. For blocks that `alloc_sampled` did not
/// make, and whose free always looks in the table of sampled blocks.
#[cold]
pub(super) fn made_large(block: *mut u8, size: usize) {
    if mode::is_sampling()
        && let Some(mean) = profile::due(size)
    {
        let from = profile::here();
        keep_errno(|| profile::allocated(block, size, mean, StandIn::NONE, from));
    }
}

/// Reallocates by `f`, and keeps the sample of the block up to date. If a block outside the size
/// classes has no sample and grows in place, the growth may be sampled.
///
/// # Safety
///
/// `block` came from the heap and was not freed. `f` returns null and leaves the block unchanged,
/// or returns the block or another one of `size` bytes.
#[cold]
#[inline(never)]
pub(super) unsafe fn realloc(block: *mut u8, size: usize, f: impl FnOnce() -> *mut u8) -> *mut u8 {
    let class = kmalloc::class_of_any(arena::entry(block as usize));
    if class.is_some_and(|class| !kmalloc::is_sampled(class)) {
        return f();
    }
    let from = profile::here();
    // The block's address may belong to another block as soon as the content has moved, so the
    // sample leaves the table first.
    let lifted = profile::lift(block, from);
    let room = match class {
        Some(_) => Room::OfClass,
        // SAFETY: the caller promises that the block is in use.
        None if counts_growth() => Room::Grows(unsafe { usable_size(block) }),
        None => Room::Fixed,
    };
    if lifted.is_none() && !matches!(room, Room::Grows(_)) {
        return f();
    }
    let moved = f();
    let old = Old { lifted, room, from };
    // SAFETY: the caller promises that `f` has resized the block, or left it unchanged.
    unsafe { old.settle(block, moved, size) };
    moved
}

/// What `realloc` found of a block before it resized the block.
struct Old {
    lifted: Option<profile::Lifted>,
    room: Room,
    /// The frame of [`realloc`].
    from: usize,
}

/// Whether growth of a block counts.
enum Room {
    /// No, because the block is of a size class.
    OfClass,
    /// No, because no samples are taken.
    Fixed,
    /// Yes. Holds the bytes of room.
    Grows(usize),
}

impl Old {
    /// Puts the sample back, drops it, or samples the growth. `moved` is the block that `realloc`
    /// returns for `block`, or null.
    ///
    /// # Safety
    ///
    /// If `moved` is `block`, the block is in use and has `size` bytes.
    // Not inlined, so that its variables take no stack in `realloc`, which goes deep.
    #[inline(never)]
    unsafe fn settle(&self, block: *mut u8, moved: *mut u8, size: usize) {
        if moved != block {
            let unused = match self.lifted {
                Some(lifted) if moved.is_null() => {
                    profile::put_back(lifted, block, None, self.from)
                }
                Some(lifted) => profile::drop_lifted(lifted),
                None => return,
            };
            // SAFETY: the block stood in for one whose sample is gone.
            return unsafe { kmalloc::release(unused) };
        }
        let room = match self.room {
            Room::OfClass => None,
            Room::Fixed => Some((0, 0)),
            // SAFETY: the caller promises that the block is in use.
            Room::Grows(before) => Some((before, unsafe { usable_size(block) })),
        };
        let resize = Resize { size, room };
        match self.lifted {
            Some(lifted) => {
                let unused = profile::put_back(lifted, block, Some(resize), self.from);
                // SAFETY: as above.
                unsafe { kmalloc::release(unused) };
            }
            None => sample_growth(block, resize, self.from),
        }
    }
}

/// Returns how many bytes of `block` the program may use.
///
/// # Safety
///
/// `block` came from the heap and was not freed.
// Not inlined, so that its variables take no stack in `realloc`, which goes deep.
#[inline(never)]
unsafe fn usable_size(block: *mut u8) -> usize {
    // SAFETY: the caller passes on what it promises.
    unsafe { blocks::usable_size(block) }
}

/// Returns whether the growth of blocks takes part in the countdown. If samples are taken for
/// guarding alone, only new blocks are sampled. If no samples are taken, a sample keeps its weight.
fn counts_growth() -> bool {
    mode::samples() & !GUARD != 0
}

/// Samples a block without a sample if its growth is due.
fn sample_growth(block: *mut u8, resize: Resize, from: usize) {
    let growth = resize.growth();
    if growth > 0
        && let Some(mean) = profile::due(growth)
    {
        keep_errno(|| profile::grown(block, resize, mean, from));
    }
}
