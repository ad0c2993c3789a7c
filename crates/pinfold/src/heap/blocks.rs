//! What is known of a block: its size, and whether it is in use.

use crate::arena::{self, COLOURED, LARGE};
use crate::guarded;
use crate::heaps;
use crate::slab::kmalloc;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU8};
use pinfold_rseq::env;

/// Alignment of every block: the largest fundamental alignment of x86-64 and aarch64.
pub const ALIGN: usize = 16;

/// The environment variable that says whether hardened and debugged caches check the size that a
/// sized free passes.
pub const SIZED_FREE: &str = "PINFOLD_SIZED_FREE";

/// Returns whether [`SIZED_FREE`] is not `ignore`. Reads the environment at the first call.
pub(super) fn checks_sized_free() -> bool {
    const UNREAD: u8 = 2;
    static ANSWER: AtomicU8 = AtomicU8::new(UNREAD);
    // Relaxed: all threads read the same value in the environment.
    match ANSWER.load(Relaxed) {
        UNREAD => {
            let answer = env::parsed(SIZED_FREE, parse_sized_free) != Some(false);
            ANSWER.store(u8::from(answer), Relaxed);
            answer
        }
        answer => answer == 1,
    }
}

/// Returns whether the value of [`SIZED_FREE`] means that sizes are checked. Returns `None` for an
/// invalid value.
pub fn parse_sized_free(value: &[u8]) -> Option<bool> {
    match value {
        b"check" => Some(true),
        b"ignore" => Some(false),
        _ => None,
    }
}

/// Returns how many bytes of `block` the program may use. Returns 0 if `block` is null.
///
/// # Safety
///
/// `block` is null, or came from this module and was not freed.
pub unsafe fn usable_size(block: *mut u8) -> usize {
    if block.is_null() {
        return 0;
    }
    let entry = arena::entry(block as usize);
    if let Some(class) = kmalloc::class_of_any(entry) {
        // In a debugged block the red zone follows the bytes that the program asked for, so the
        // program may use only these.
        // SAFETY: the caller owns the block, and the page map names its class.
        return unsafe { kmalloc::requested(block, class) }
            .unwrap_or(kmalloc::size_of_class(class));
    }
    if let Some(run) = arena::run_at(block) {
        // SAFETY: the caller owns the block, which is this run.
        return unsafe { arena::size_in_run(block, run) };
    }
    // SAFETY: the caller owns the block.
    if let Some(size) = unsafe { heaps::usable_size(block) } {
        return size;
    }
    if let Some(size) = guarded::requested(block) {
        return size;
    }
    arena::huge_size(block).unwrap_or_else(|| not_ours("size of", block))
}

/// Returns how many bytes of `block` the program may use, as [`usable_size`] does. Returns 0 if no
/// block in use begins there, the cache checks this, and the handler of reports lets the program go
/// on.
///
/// # Safety
///
/// `block` is null, came from this module and was not freed, or is any address in the slabs of a
/// cache that checks.
pub unsafe fn usable_size_checked(block: *mut u8) -> usize {
    if !is_in_use(block) {
        return 0;
    }
    // SAFETY: the caller owns `block`, which is null or came from this module.
    unsafe { usable_size(block) }
}

/// Returns true if a block in use begins at `block`, or if no cache that checks contains `block`.
/// Otherwise reports the fault.
#[inline(always)]
pub(super) fn is_in_use(block: *mut u8) -> bool {
    !kmalloc::any_checks() || is_in_use_checked(block)
}

#[cold]
#[inline(never)]
fn is_in_use_checked(block: *mut u8) -> bool {
    let class = kmalloc::class_of_any(arena::entry(block as usize));
    class.is_none_or(|class| kmalloc::is_in_use(block, class))
}

/// Whether `realloc` ever left a block where it was because there was no memory for a smaller one.
/// The program may free such a block with a size of a smaller class.
static HAS_LARGER: AtomicBool = AtomicBool::new(false);

/// Notes that a block stays where it is, although a smaller class would serve its new size.
pub(super) fn note_larger() {
    HAS_LARGER.store(true, Relaxed);
}

/// Checks the size and alignment that a free names, if they are checked at all. Returns false if
/// they do not fit a small object, after a report. Ends the process if `size` is beyond a larger
/// block. Returns true in all other cases, also for an address at which no block begins.
#[inline(always)]
pub fn fits(block: *mut u8, size: usize, align: usize) -> bool {
    !kmalloc::any_checks() || fits_checked(block, size, align)
}

#[cold]
#[inline(never)]
fn fits_checked(block: *mut u8, size: usize, align: usize) -> bool {
    if !checks_sized_free() {
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
    let room = match arena::run_at(block) {
        // SAFETY: the page map says that the run is in use as this block.
        Some(run) => Some(unsafe { arena::size_in_run(block, run) }),
        None => arena::huge_size(block),
    };
    if room.is_some_and(|room| size > room) {
        crate::abort_with_callers(format_args!(
            "free {block:p} with a size of {size} bytes: the block has {} bytes",
            room.unwrap_or(0)
        ));
    }
    true
}

/// Ends the process, because no block begins at the address.
#[cold]
pub(super) fn not_ours(what: &str, block: *mut u8) -> ! {
    let entry = arena::entry(block as usize);
    match kmalloc::name_of_entry(entry) {
        _ if matches!(entry, LARGE | COLOURED) => crate::abort_with_callers(format_args!(
            "{what} {block:p}: the address lies inside a block"
        )),
        Some(name) => crate::abort_with_callers(format_args!(
            "{what} {block:p}: the address belongs to cache {name}, not to malloc"
        )),
        None if arena::holds(block as usize) => crate::abort_with_callers(format_args!(
            "{what} {block:p}: {}",
            arena::describe_unused(block as usize)
        )),
        None => crate::abort_with_callers(format_args!(
            "{what} {block:p}: the address is not a block of malloc's, or the block was freed before"
        )),
    }
}
