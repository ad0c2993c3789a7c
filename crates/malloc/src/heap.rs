//! Blocks of any size and alignment: objects of a size class, runs, huge blocks.

use crate::gate::{self, alloc_fast, entry_fast};
use crate::{count, init, mode, profiled, settings};
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;
use pinfold::arena::{self, GRANULE, HUGE, LARGE};
use pinfold::internal::set_errno;
use pinfold::slab::kmalloc::{self, MAX_CLASS_SIZE, MAX_SMALL_SIZE};
use pinfold::{guarded, profile, slab};

/// Alignment of every block: the largest fundamental alignment of x86-64 and aarch64.
pub(crate) const ALIGN: usize = 16;

/// Allocates a block of `size` bytes. Returns null with errno ENOMEM if there is no memory.
#[inline(always)]
pub(crate) fn alloc(size: usize) -> *mut u8 {
    let block = alloc_fast(size);
    if block.is_null() {
        return alloc_slow(size);
    }
    block
}

// The slow paths are `extern "C"` and cannot unwind, so the fast paths may end in a jump to them.
#[cold]
#[inline(never)]
pub(crate) extern "C" fn alloc_slow(size: usize) -> *mut u8 {
    // Each call is a tail call, so this function saves no registers.
    if mode::is_plain() {
        return alloc_missed(size);
    }
    let block = gate::alloc_counted(size);
    if block.is_null() {
        return alloc_unusual(size);
    }
    block
}

/// Allocates a block after the CPU's sheaf was found empty, and for a size above 32 KiB.
#[inline(never)]
pub(crate) extern "C" fn alloc_missed(size: usize) -> *mut u8 {
    // If the fast path was closed only for a tick, the CPU's sheaf may have a block.
    if gate::tick_if_needed() {
        let block = gate::alloc_behind(size);
        if !block.is_null() {
            return block;
        }
    }
    alloc_plain(size, false)
}

/// Allocates a block that is not counted yet, while samples are taken. Also allocates at the
/// process's start.
#[cold]
#[inline(never)]
extern "C" fn alloc_unusual(size: usize) -> *mut u8 {
    if mode::is_sampling() {
        return profiled::alloc_uncounted(size);
    }
    alloc_first(size)
}

#[cold]
#[inline(never)]
extern "C" fn alloc_first(size: usize) -> *mut u8 {
    init::ready();
    gate::tick_if_needed();
    alloc_plain(size, false)
}

/// Allocates a block of `size` bytes that is not sampled. Zeroes the block if `zeroed` is true.
pub(crate) fn alloc_plain(size: usize, zeroed: bool) -> *mut u8 {
    let block = alloc_any(size, zeroed);
    count::requested(block, size);
    block
}

/// Allocates a block of `size` bytes at a multiple of `align`, a power of two, that is not sampled.
/// Zeroes the block if `zeroed` is true.
pub(crate) fn alloc_aligned_plain(size: usize, align: usize, zeroed: bool) -> *mut u8 {
    if align <= ALIGN {
        return alloc_plain(size, zeroed);
    }
    let block = alloc_aligned_any(size, align, zeroed);
    count::requested(block, size);
    block
}

/// Allocates a block of `size` bytes from its class, the arena or the system. Zeroes the block if
/// `zeroed` is true.
fn alloc_any(size: usize, zeroed: bool) -> *mut u8 {
    if size > MAX_SMALL_SIZE {
        // A program that allocates only larger blocks reaches no other path that ticks.
        slab::tick();
    }
    if size <= MAX_CLASS_SIZE {
        let class = kmalloc::class_of(size);
        let block = match zeroed {
            true => kmalloc::alloc_zeroed(class, size),
            false => kmalloc::alloc_missed(class, size),
        };
        if !block.is_null() {
            count::allocated_class(class);
            return block;
        }
    } else if let Some(block) = alloc_run(size, zeroed) {
        return block;
    }
    // Also reached for small sizes in a signal handler that interrupted the allocator: a mapping of
    // its own needs no lock.
    alloc_huge(size, ALIGN)
}

/// Allocates a run for `size` bytes. Returns `None` if `size` is [`HUGE`] or more, or if there is
/// no memory.
fn alloc_run(size: usize, zeroed: bool) -> Option<*mut u8> {
    if size >= HUGE {
        return None;
    }
    let granules = size.div_ceil(GRANULE).max(1);
    let node = arena::node_here();
    let run = slab::or_reclaim(|| arena::alloc_run(granules, node, LARGE, false))?;
    Some(run_of(run, size, zeroed))
}

/// Makes a block of `size` bytes from a new run. Zeroes the block if `zeroed` is true.
fn run_of(run: arena::Run, size: usize, zeroed: bool) -> *mut u8 {
    let block = run.start.as_ptr();
    if zeroed && !run.zeroed {
        // SAFETY: the run is new, so this thread owns it, and it has at least `size` bytes.
        unsafe { arena::zero_run(run.start, size) };
    }
    count::allocated_large(size.div_ceil(GRANULE).max(1) * GRANULE);
    block
}

/// Allocates a block as a mapping of its own, or as a run of the arena if the system refuses the
/// mapping.
fn alloc_huge(size: usize, align: usize) -> *mut u8 {
    slab::make_room(size);
    if let Some(block) = slab::or_reclaim_for(size, || arena::alloc_huge(size, align)) {
        count::allocated_large(arena::huge_size(block.as_ptr()).unwrap_or(size));
        return block.as_ptr();
    }
    if align <= GRANULE && size <= isize::MAX as usize {
        let granules = size.div_ceil(GRANULE).max(1);
        if let Some(run) = arena::alloc_run(granules, arena::node_here(), LARGE, false) {
            // A new mapping reads as zeroes, and callers rely on zeroes. So the run is zeroed too.
            return run_of(run, size, true);
        }
    }
    set_errno(libc::ENOMEM);
    count::failed();
    null_mut()
}

/// Allocates a zeroed block of `size` bytes. Returns null with errno ENOMEM if there is no memory.
#[inline]
pub(crate) fn alloc_zeroed(size: usize) -> *mut u8 {
    let block = alloc_fast(size);
    if block.is_null() {
        return alloc_zeroed_slow(size);
    }
    // SAFETY: `alloc_fast` has just handed out the block, which has at least `size` bytes.
    unsafe { block.write_bytes(0, size) };
    block
}

#[cold]
#[inline(never)]
extern "C" fn alloc_zeroed_slow(size: usize) -> *mut u8 {
    if mode::is_plain() {
        gate::tick_if_needed();
        return alloc_plain(size, true);
    }
    let block = gate::alloc_counted(size);
    if !block.is_null() {
        // SAFETY: the block is new, and has at least `size` bytes.
        unsafe { block.write_bytes(0, size) };
        return block;
    }
    alloc_aligned_unusual(size, ALIGN, true)
}

/// Allocates while samples are taken, and at the process's start.
#[inline(always)]
fn alloc_aligned_unusual(size: usize, align: usize, zeroed: bool) -> *mut u8 {
    init::ready();
    gate::tick_if_needed();
    if mode::is_sampling()
        && let Some(mean) = profile::due(size)
    {
        return profiled::alloc_sampled((size, align, zeroed), mean, profile::here());
    }
    alloc_aligned_plain(size, align, zeroed)
}

/// Allocates a block at a multiple of `align`, a power of two. Returns null with errno ENOMEM if
/// there is no memory.
#[inline]
pub(crate) fn alloc_aligned(size: usize, align: usize) -> *mut u8 {
    if align <= ALIGN {
        return alloc(size);
    }
    alloc_aligned_slow(size, align, false)
}

/// Allocates a zeroed block like [`alloc_aligned`]. Does not write to a large block whose memory
/// comes zeroed from the system.
#[inline]
pub(crate) fn alloc_aligned_zeroed(size: usize, align: usize) -> *mut u8 {
    if align <= ALIGN {
        return alloc_zeroed(size);
    }
    alloc_aligned_slow(size, align, true)
}

#[inline(never)]
fn alloc_aligned_slow(size: usize, align: usize, zeroed: bool) -> *mut u8 {
    if !mode::is_plain() {
        return alloc_aligned_unusual(size, align, zeroed);
    }
    alloc_aligned_plain(size, align, zeroed)
}

fn alloc_aligned_any(size: usize, align: usize, zeroed: bool) -> *mut u8 {
    slab::tick();
    if let Some(class) = kmalloc::class_of_aligned(size, align) {
        let block = match zeroed {
            true => kmalloc::alloc_zeroed(class, size),
            false => kmalloc::alloc_class(class),
        };
        if !block.is_null() {
            count::allocated_class(class);
            return block;
        }
    } else if align <= GRANULE {
        if let Some(block) = alloc_run(size, zeroed) {
            return block;
        }
    } else if let Some(run) = arena::alloc_aligned_run(size, align, arena::node_here()) {
        return run_of(run, size, zeroed);
    }
    alloc_huge(size, align)
}

/// Frees `block`. Does nothing if `block` is null. Ends the process if the page map has no block
/// there.
///
/// # Safety
///
/// `block` is null or came from this module, and is not used any more.
#[inline(always)]
pub(crate) unsafe fn free(block: *mut u8) {
    let entry = entry_fast(block);
    if kmalloc::class_of_entry(entry).is_some() {
        // SAFETY: `entry_fast` found the entry of a class, so the fast paths are open. The caller
        // passes ownership of the block, which is of this class.
        unsafe { kmalloc::free_fast(block, entry) };
    } else {
        // SAFETY: the caller passes ownership of `block`, which is null or came from this module.
        unsafe { free_slow(block) };
    }
}

/// # Safety
///
/// `block` is null or came from this module, and is not used any more.
#[cold]
#[inline(never)]
unsafe extern "C" fn free_slow(block: *mut u8) {
    let Some(start) = NonNull::new(block) else {
        return;
    };
    let entry = arena::entry(block as usize);
    if let Some(class) = kmalloc::class_of_any(entry) {
        count::freed_class(block, class);
        // SAFETY: the page map says that the block is of this class, and the caller passes
        // ownership of the block.
        unsafe { kmalloc::free_class(block, class) };
    } else if entry == LARGE && (block as usize).is_multiple_of(GRANULE) {
        // SAFETY: only the first granule of a run that is one block has the entry `LARGE`, so a run
        // begins at the block.
        let size = unsafe { arena::run_size(start) };
        count::freed_large(block, size);
        // SAFETY: the run is one block, and the caller passes ownership of it.
        unsafe { arena::free_run(start) };
    } else {
        let class = |size| kmalloc::sampled(kmalloc::class_of(size));
        // SAFETY: the caller passes ownership of the block.
        if unsafe { guarded::free(block, |size| count::freed_class(block, class(size))) } {
            return;
        }
        if mode::reports() {
            count::freed_large(block, arena::huge_size(block).unwrap_or(0));
        }
        // SAFETY: the caller passes ownership of the block, and `free_huge` refuses other
        // addresses.
        if !unsafe { arena::free_huge(block) } {
            not_ours("free", block);
        }
    }
}

/// Returns how many bytes of `block` the program may use. Returns 0 if `block` is null.
///
/// # Safety
///
/// `block` is null, or came from this module and was not freed.
pub(crate) unsafe fn usable_size(block: *mut u8) -> usize {
    let Some(start) = NonNull::new(block) else {
        return 0;
    };
    let entry = arena::entry(block as usize);
    if let Some(class) = kmalloc::class_of_any(entry) {
        // In a debugged block the red zone follows the bytes that the program asked for.
        // SAFETY: the caller owns the block, and the page map names its class.
        return unsafe { kmalloc::requested(block, class) }
            .unwrap_or(kmalloc::size_of_class(class));
    }
    if entry == LARGE && (block as usize).is_multiple_of(GRANULE) {
        // SAFETY: only the first granule of a run that is one block has the entry `LARGE`, so a run
        // begins at the block.
        return unsafe { arena::run_size(start) };
    }
    if let Some(size) = guarded::requested(block) {
        return size;
    }
    arena::huge_size(block).unwrap_or_else(|| not_ours("size of", block))
}

/// Returns how many bytes of `block` the program may use, as [`usable_size`] does. Returns 0 if the
/// block's cache checks, and its handler of reports goes on after the report that no block in use
/// begins there.
///
/// # Safety
///
/// The same as for [`usable_size`]. A cache that checks takes any address in its slabs.
pub(crate) unsafe fn usable_size_checked(block: *mut u8) -> usize {
    if !is_in_use(block) {
        return 0;
    }
    // SAFETY: the caller owns `block`, which is null or came from this module.
    unsafe { usable_size(block) }
}

/// Returns true if a block in use begins at `block`, or if it is in no cache that checks.
/// Otherwise reports the fault.
#[inline(always)]
pub(crate) fn is_in_use(block: *mut u8) -> bool {
    !kmalloc::any_checks() || is_in_use_checked(block)
}

#[cold]
#[inline(never)]
fn is_in_use_checked(block: *mut u8) -> bool {
    let class = kmalloc::class_of_any(arena::entry(block as usize));
    class.is_none_or(|class| kmalloc::is_in_use(block, class))
}

/// Whether a block stayed where it is because there was no memory for a smaller one. Such a block
/// may be freed with a size that its class is too large for.
static HAS_LARGER: AtomicBool = AtomicBool::new(false);

/// Notes that a block stays where it is, although it is used for fewer bytes than its class is for.
pub(crate) fn note_larger() {
    HAS_LARGER.store(true, Relaxed);
}

/// Returns true if `block` may have been allocated for `size` bytes at a multiple of `align`, or if
/// no cache checks. Otherwise reports the fault. Does nothing for addresses that are no blocks.
#[inline(always)]
pub(crate) fn fits(block: *mut u8, size: usize, align: usize) -> bool {
    !kmalloc::any_checks() || fits_checked(block, size, align)
}

#[cold]
#[inline(never)]
fn fits_checked(block: *mut u8, size: usize, align: usize) -> bool {
    if !settings::checks_sized_free() {
        return true;
    }
    let entry = arena::entry(block as usize);
    if let Some(class) = kmalloc::class_of_any(entry) {
        let size = match HAS_LARGER.load(Relaxed) {
            true => size.max(kmalloc::size_of_class(class) / 2),
            false => size,
        };
        return kmalloc::fits(block, class, size, align.max(ALIGN));
    }
    let is_run = entry == LARGE && (block as usize).is_multiple_of(GRANULE);
    let room = match NonNull::new(block).filter(|_| is_run) {
        // SAFETY: only the first granule of a run that is one block has the entry `LARGE`, so a run
        // begins at the block.
        Some(start) => Some(unsafe { arena::run_size(start) }),
        None => arena::huge_size(block),
    };
    if room.is_some_and(|room| size > room) {
        pinfold::abort_with_callers(format_args!(
            "free {block:p} with a size of {size} bytes: the block has {} bytes",
            room.unwrap_or(0)
        ));
    }
    true
}

/// Ends the process, because no block begins at the address.
#[cold]
fn not_ours(what: &str, block: *mut u8) -> ! {
    let entry = arena::entry(block as usize);
    match kmalloc::name_of_entry(entry) {
        _ if entry == LARGE => pinfold::abort_with_callers(format_args!(
            "{what} {block:p}: the address lies inside a block"
        )),
        Some(name) => pinfold::abort_with_callers(format_args!(
            "{what} {block:p}: the address belongs to cache {name}, not to malloc"
        )),
        None if arena::holds(block as usize) => pinfold::abort_with_callers(format_args!(
            "{what} {block:p}: {}",
            arena::describe_unused(block as usize)
        )),
        None => pinfold::abort_with_callers(format_args!(
            "{what} {block:p}: the address is not a block of malloc's, or the block was freed before"
        )),
    }
}
