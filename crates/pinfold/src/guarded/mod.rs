//! Guarded blocks: a few of a program's blocks, each beside a page that no code may access. They
//! find accesses beyond a block and after its free, in production, as the kernel's KFENCE does.
//!
//! ```text
//!  ┌────────┬────────┬────────┬────────┬────────┬────────┬─ ─
//!  │ closed │ slot 0 │ closed │ slot 1 │ closed │ slot 2 │
//!  └────────┴────────┴────────┴────────┴────────┴────────┴─ ─
//!            ······▓▓          ▓▓······  (closed)
//!            at the end        at the    freed
//!                              beginning
//! ```
//!
//! A *slot* is a page that holds one block. Which end of the page the block takes varies. The rest
//! of the page holds a pattern (`FILL`), which the free checks. The page is *closed* from the
//! free on, until the slot is used again: every access to it raises SIGSEGV. The handler
//! (`fault`) writes a report, and passes the signal on to the program.
//!
//! The allocator decides which blocks are guarded: it asks for samples (`profile::due`), and
//! calls [`alloc`] for those. At most one block in [`PAUSE`] milliseconds is guarded, so that the
//! system calls cost little whatever the program allocates. The oldest free slot is used next.
//!
//! # Protocol
//!
//! | state | who may change the slot | next |
//! |---|---|---|
//! | `UNUSED`, `FREED` | the thread that holds `ALLOCATING` | `BUSY` |
//! | `BUSY` | the thread that made it so | `LIVE`, `FREED` |
//! | `LIVE` | the thread that frees the block | `BUSY` |
//!
//! The change away from `LIVE` is a compare-exchange. If two threads free the same block, one
//! exchange fails, and that thread reports a double free. A report reads the slot without a lock.
//! Its words may be from different moments only if one thread uses the block while another frees
//! it.
//!
//! An allocation that finds `ALLOCATING` taken is not guarded. So a signal handler never waits.

mod fault;
mod report;
mod stack;

use crate::profile::{self, here};
use crate::sys;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
use fault::watch;
use report::What;
use stack::{Innermost, Stack};

/// The number of slots, and so the most guarded blocks at a time.
pub const SLOTS: usize = 512;
/// The least milliseconds from one guarded block to the next. The clock's resolution may make it a
/// few more.
pub const PAUSE: u64 = 1;
/// How long the process runs before the first block is guarded, in milliseconds. Runtimes install
/// their signal handlers in this time, and some do so only if no handler is installed yet.
const FIRST_PAUSE: u64 = 100;
/// The value of the bytes of a page that lie outside its block.
const FILL: u8 = 0xaa;

const UNUSED: u32 = 0;
const BUSY: u32 = 1;
const LIVE: u32 = 2;
const FREED: u32 = 3;

/// What is known of a slot.
struct Slot {
    state: AtomicU32,
    /// Whether a report was written since the allocation.
    is_reported: AtomicBool,
    block: AtomicUsize,
    /// The bytes that the program asked for.
    size: AtomicUsize,
    /// The number of the slot's last free, counted over all slots. A larger number is a later free.
    freed: AtomicU64,
    allocated_by: Stack,
    freed_by: Stack,
}

/// The first page of the pool: a closed one. 0 before [`prepare`].
static POOL: AtomicUsize = AtomicUsize::new(0);
static SLOTS_AT: AtomicPtr<Slot> = AtomicPtr::new(core::ptr::null_mut());
/// Whether a thread chooses a slot.
static ALLOCATING: AtomicBool = AtomicBool::new(false);
/// The time of the coarse clock from which on the next block may be guarded.
static NEXT: AtomicU64 = AtomicU64::new(0);
/// How many blocks were guarded, and how many of them were freed.
static MADE: AtomicU64 = AtomicU64::new(0);
static FREES: AtomicU64 = AtomicU64::new(0);

/// Returns whether `address` lies in the slots, which hold the addresses of all guarded blocks.
pub(crate) fn holds_slots(address: usize) -> bool {
    let slots = SLOTS_AT.load(Relaxed) as usize;
    slots != 0 && address.wrapping_sub(slots) < SLOTS * size_of::<Slot>()
}

/// Makes the pool. Returns false if the system has no memory. The caller makes sure that no two
/// threads call this at the same time, and that the thread may load a library: the first call may
/// load the unwinder's.
pub fn prepare() -> bool {
    if POOL.load(Relaxed) != 0 {
        return true;
    }
    let bytes = pool_bytes();
    // Where walks are forbidden, reports name no callers.
    let can_record = profile::prepare_walks() || profile::walks_are_forbidden();
    if !can_record || !report::prepare() {
        return false;
    }
    let Some(slots) = sys::map_sparse(SLOTS * size_of::<Slot>()) else {
        return false;
    };
    // SAFETY: the mappings are new, and only this function knows them.
    let pool = sys::map_sparse(bytes).filter(|pool| unsafe { sys::close(pool.as_ptr(), bytes) });
    let Some(pool) = pool else {
        // SAFETY: the mapping is new, and only this function knows it.
        unsafe { sys::unmap(slots.as_ptr(), SLOTS * size_of::<Slot>()) };
        return false;
    };
    SLOTS_AT.store(slots.as_ptr().cast(), Relaxed);
    NEXT.store(sys::coarse_milliseconds() + FIRST_PAUSE, Relaxed);
    // Release pairs with the acquire in `slot_of`: a thread that sees the pool also sees the
    // slots.
    POOL.store(pool.as_ptr() as usize, Release);
    true
}

fn pool_bytes() -> usize {
    (2 * SLOTS + 1) * sys::page_size()
}

fn slot(nth: usize) -> &'static Slot {
    debug_assert!(nth < SLOTS);
    // SAFETY: the callers have seen the pool, so there are `SLOTS` slots. They are zeroed memory
    // that stays mapped, and all their fields are atomics.
    unsafe { &*SLOTS_AT.load(Relaxed).add(nth) }
}

/// Returns the page of a slot.
fn page_of(nth: usize) -> usize {
    POOL.load(Relaxed) + (2 * nth + 1) * sys::page_size()
}

/// Returns the number of the pool's page at an address: odd numbers are slots. Returns `None` for
/// an address outside the pool.
fn page_number(address: usize) -> Option<usize> {
    // Acquire pairs with the release in `prepare`.
    let pool = POOL.load(Acquire);
    let offset = address.wrapping_sub(pool);
    (pool != 0 && offset < pool_bytes()).then(|| offset / sys::page_size())
}

/// Returns the slot whose block is at `block`. Ends the process if the address is in the pool, and
/// no block in use begins there.
fn slot_of(block: *mut u8, what: What) -> Option<(usize, &'static Slot)> {
    let page = page_number(block as usize)?;
    let nth = (page.saturating_sub(1) / 2).min(SLOTS - 1);
    let found = slot(nth);
    // Acquire pairs with the release in `open`.
    let is_live = found.state.load(Acquire) == LIVE;
    if !is_live || found.block.load(Relaxed) != block as usize {
        report::end(nth, what, block as usize);
    }
    Some((nth, found))
}

/// Returns how many blocks were guarded so far, and how many of these were freed.
pub fn counts() -> (u64, u64) {
    (MADE.load(Relaxed), FREES.load(Relaxed))
}

/// Allocates a guarded block of `size` bytes at a multiple of `align`, a power of two. Zeroes the
/// block if `zeroed` is true.
///
/// Returns null if this allocation is not guarded: `size` is 0 or more than a page, `align` is more
/// than a page, the last block was guarded less than [`PAUSE`] ms ago, no slot is free, another
/// thread is choosing one, the pool does not exist, or the kernel refuses the page.
///
/// The recorded call stack leaves out what `profile::callers` leaves out for `from`.
///
/// Costs three system calls and a walk of the stack, which makes two more.
#[cold]
#[inline(never)]
pub fn alloc(size: usize, align: usize, zeroed: bool, from: usize) -> *mut u8 {
    let page = sys::page_size();
    let now = sys::coarse_milliseconds();
    let none = core::ptr::null_mut();
    if size == 0 || size > page || align > page || now < NEXT.load(Relaxed) {
        return none;
    }
    // Acquire pairs with the release in `prepare`.
    let is_made = POOL.load(Acquire) != 0;
    // Acquire and the release below pair: this thread sees what the last one did.
    let taken = || ALLOCATING.compare_exchange(false, true, Acquire, Relaxed);
    if !is_made || taken().is_err() {
        return none;
    }
    // Another thread may have guarded a block since the test above.
    let is_time = now >= NEXT.load(Relaxed);
    let nth = if is_time { choose() } else { None };
    if nth.is_some() {
        NEXT.store(now + PAUSE, Relaxed);
        watch();
    }
    ALLOCATING.store(false, Release);
    nth.map_or(none, |nth| open(nth, size, align, zeroed, from))
}

/// Takes an unused slot, or else the one that was freed first. The caller holds [`ALLOCATING`].
fn choose() -> Option<usize> {
    let is_free = |&nth: &usize| matches!(slot(nth).state.load(Relaxed), UNUSED | FREED);
    let nth = (0..SLOTS)
        .filter(is_free)
        .min_by_key(|&nth| slot(nth).freed.load(Relaxed))?;
    // Only this thread takes free slots. Acquire pairs with the release in `close`: this thread
    // sees what the last free wrote.
    slot(nth).state.swap(BUSY, Acquire);
    Some(nth)
}

/// Makes a block of a slot that the caller has taken. Returns null if the kernel refuses.
fn open(nth: usize, size: usize, align: usize, zeroed: bool, from: usize) -> *mut u8 {
    let (slot, page, bytes) = (slot(nth), page_of(nth), sys::page_size());
    // SAFETY: this thread has taken the slot, so no code uses its page.
    if !unsafe { sys::commit(page as *mut u8, bytes) } {
        slot.state.store(FREED, Release);
        return core::ptr::null_mut();
    }
    let at_end = (page + bytes - size) & !(align - 1);
    // The fractional parts of the golden ratio's multiples are as good as random here.
    let which = MADE
        .fetch_add(1, Relaxed)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        >> 63;
    let block = if which == 0 { at_end } else { page };
    // SAFETY: the page was opened, and belongs to this thread. The block lies in the page.
    unsafe {
        (page as *mut u8).write_bytes(FILL, block - page);
        let behind = block + size;
        (behind as *mut u8).write_bytes(FILL, page + bytes - behind);
        if zeroed {
            (block as *mut u8).write_bytes(0, size);
        }
    }
    slot.block.store(block, Relaxed);
    slot.size.store(size, Relaxed);
    slot.is_reported.store(false, Relaxed);
    slot.allocated_by.record(Innermost::CallerOf(from));
    slot.freed_by.forget();
    // Release pairs with the acquire in `slot_of`.
    slot.state.store(LIVE, Release);
    block as *mut u8
}

/// Returns the bytes of a guarded block, or `None` if the address is not in the pool. Ends the
/// process with a report if the address is in the pool, but no block in use begins there. Costs a
/// load for other addresses.
#[inline]
pub fn requested(block: *mut u8) -> Option<usize> {
    let (_, slot) = slot_of(block, What::Use)?;
    Some(slot.size.load(Relaxed))
}

/// Frees a guarded block. Returns false, and does nothing, if the address is not in the pool. Calls
/// `before` with the block's bytes, while the caller still owns the block.
///
/// Ends the process with a report if no block in use begins at the address, or if bytes beside the
/// block were overwritten. Costs two system calls and a walk of the stack, which makes two more.
///
/// # Safety
///
/// `block` is not used any more, if it is a block in use.
pub unsafe fn free(block: *mut u8, before: impl FnOnce(usize)) -> bool {
    let Some((nth, slot)) = slot_of(block, What::Free) else {
        return false;
    };
    // Acquire pairs with the release in `open`.
    let taken = slot.state.compare_exchange(LIVE, BUSY, Acquire, Relaxed);
    if taken.is_err() {
        report::end(nth, What::Free, block as usize);
    }
    let size = slot.size.load(Relaxed);
    before(size);
    // SAFETY: this thread has taken the slot, and the caller does not use the block any more.
    sys::keep_errno(|| unsafe { close(nth, block as usize, size) });
    true
}

/// Closes a slot that the caller has taken out of the state `LIVE`.
///
/// # Safety
///
/// The page of the slot is open, and no code uses it.
#[cold]
#[inline(never)]
unsafe fn close(nth: usize, block: usize, size: usize) {
    let (slot, page, bytes) = (slot(nth), page_of(nth), sys::page_size());
    // SAFETY: the page is open. The read is volatile, because a program with a fault may write to
    // the page.
    let content = |at: usize| unsafe { (page as *const u8).add(at).read_volatile() };
    let (before, behind) = (0..block - page, block + size - page..bytes);
    if let Some(at) = before.chain(behind).find(|&at| content(at) != FILL) {
        report::end(nth, What::Overwritten, page + at);
    }
    slot.freed_by.record(Innermost::CallerOf(here()));
    slot.freed.store(FREES.fetch_add(1, Relaxed) + 1, Relaxed);
    // SAFETY: no code uses the page.
    if unsafe { sys::close(page as *mut u8, bytes) } {
        // Release pairs with the acquire in `choose`.
        slot.state.store(FREED, Release);
    }
    // If the kernel did not close the page, no later access would be found. So the slot stays
    // `BUSY`, and is not used again.
}

/// Lets the child of a fork guard blocks, whatever the parent's other threads were doing.
pub fn in_child() {
    ALLOCATING.store(false, Relaxed);
    report::in_child();
    fault::in_child();
}
