//! Huge blocks: each a mapping of its own, found again by a table of addresses.
//!
//! A block begins with its mapping, or in the mapping's first page if it was a run of the arena
//! before ([`adopt`]). The table has the block's address and the mapping's size.
//!
//! A signal handler may free a huge block while it interrupts a thread that allocates one. If the
//! table had a lock, the handler would wait for the interrupted thread, and that thread cannot go
//! on before the handler returns. So the table has no lock.
//!
//! # The table
//!
//! The table has [`BUCKETS`] buckets of [`ENTRIES`] entries. Bits 21 and up of a block's address
//! name the block's home bucket. If that bucket is full, the block goes to the next bucket with
//! room, and adds 1 to `passed` of each full bucket before it. So a search ends at a bucket whose
//! `passed` is 0.
//!
//! The table is mapped for the first block. If a limit leaves no memory for it, [`FEW`] static
//! buckets are the table until the process ends.
//!
//! A thread enters a block in three steps:
//!
//! 1. It claims an entry: it exchanges the entry's address 0 for [`CLAIMED`].
//! 2. It writes the size.
//! 3. It publishes the entry: it stores the address.
//!
//! Only the owner of a block looks the block up, resizes it or frees it. So no other thread changes
//! a published entry.
//!
//! A block may belong to a heap (`heaps`). The entry has the heap's number in the low bits of the
//! size, which is whole pages.

use super::primitive::PLACES;
use super::waiting::{Place, Waiting};
use super::{ARENA_STAT, ArenaItem, GRANULE, budget, gave_back, held, huge_pages, took};
use crate::cache_units::MAX_CACHES;
use crate::{spared, sys};
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicUsize};

const BUCKETS: usize = 4096;
/// Buckets of the static table. They have room for 992 blocks.
const FEW: usize = 16;
const ENTRIES: usize = 62;
/// The bits of a size that have the number of the block's heap, or 0 for a block without a heap.
const HEAP: usize = MAX_CACHES - 1;
/// Stands for an address in an entry that is being filled in. No block has this address.
const CLAIMED: usize = 1;

#[repr(C)]
struct Bucket {
    passed: AtomicUsize,
    _unused: usize,
    addresses: [AtomicUsize; ENTRIES],
    /// The sizes of the mappings, and the heaps' numbers ([`HEAP`]).
    sizes: [AtomicUsize; ENTRIES],
}

impl Bucket {
    const fn empty() -> Bucket {
        Bucket {
            passed: AtomicUsize::new(0),
            _unused: 0,
            addresses: [const { AtomicUsize::new(0) }; ENTRIES],
            sizes: [const { AtomicUsize::new(0) }; ENTRIES],
        }
    }
}

/// Bytes of a huge page.
const HUGE_PAGE: usize = huge_pages::HUGE_PAGE as usize * GRANULE;

/// Moved pages become a huge block only while there are fewer huge blocks than the mappings that
/// the kernel allows a process, divided by this number.
const SHARE_MOVED: usize = 8;

/// Blocks in the table.
static BLOCKS: AtomicUsize = AtomicUsize::new(0);
/// From this number of blocks on, `adopt` makes no more. 0 until [`read`].
static MOST: AtomicUsize = AtomicUsize::new(0);

/// Returns how many mappings the kernel allows the process, or 0 until [`read`].
pub(super) fn mappings_most() -> usize {
    MOST.load(Relaxed) * SHARE_MOVED
}

/// Reads how many mappings the kernel allows. Called at the start, because a thread that allocates
/// opens no files.
pub(super) fn read() {
    MOST.store(sys::mappings_most() / SHARE_MOVED, Relaxed);
}

/// Freed blocks that wait until no CPU is isolated any more.
static WAITING: Waiting = Waiting {
    places: [const {
        Place {
            address: AtomicUsize::new(0),
            size: AtomicUsize::new(0),
        }
    }; PLACES],
    bytes: AtomicUsize::new(0),
};

static FIRST: [Bucket; FEW] = [const { Bucket::empty() }; FEW];
/// The table: null before the first block, then [`FIRST`] or a mapping.
static TABLE: AtomicPtr<Bucket> = AtomicPtr::new(null_mut());

fn table() -> &'static [Bucket] {
    let mut at = TABLE.load(Acquire);
    if at.is_null() {
        at = open_table();
    }
    if core::ptr::eq(at, &raw const FIRST[0]) {
        return &FIRST;
    }
    // SAFETY: `at` is a zeroed mapping of `BUCKETS` buckets, which is never unmapped. All fields
    // are atomic or unused.
    unsafe { core::slice::from_raw_parts(at, BUCKETS) }
}

/// Returns whether `address` lies in the table, which holds the addresses of all huge blocks.
pub(crate) fn holds_table(address: usize) -> bool {
    let first = &raw const FIRST as usize;
    let mapped = TABLE.load(Acquire) as usize;
    address.wrapping_sub(first) < size_of_val(&FIRST)
        || (mapped != 0 && address.wrapping_sub(mapped) < BUCKETS * size_of::<Bucket>())
}

#[cold]
fn open_table() -> *mut Bucket {
    let size = BUCKETS * size_of::<Bucket>();
    let mapping = sys::map_memory(size);
    let first = (&raw const FIRST[0]).cast_mut();
    let fresh = mapping.map_or(first, |at| at.as_ptr().cast());
    // Release pairs with the acquires here and in `table`: a thread that sees the table's address
    // also sees its zeroes.
    match TABLE.compare_exchange(null_mut(), fresh, Release, Acquire) {
        Ok(_) => fresh,
        Err(other) => {
            if let Some(mapping) = mapping {
                // SAFETY: this thread made the mapping, and did not publish it.
                unsafe { sys::unmap(mapping.as_ptr(), size) };
            }
            other
        }
    }
}

/// Returns whether a block's pages may move before their new address is entered in the table. With
/// the static table they may not, because that table could be full by then.
fn may_move() -> bool {
    table().len() == BUCKETS
}

/// Returns the bucket that a search for `address` reaches after `steps` steps.
fn bucket(table: &[Bucket], address: usize, steps: usize) -> &Bucket {
    &table[((address >> 21) + steps) % table.len()]
}

const _: () = assert!(MAX_CACHES.is_power_of_two() && MAX_CACHES <= 4096);

/// Enters a block of heap `heap`, or of none if this is 0. Returns false if the table has no room.
fn enter(address: usize, size: usize, heap: u16) -> bool {
    let table = table();
    for steps in 0..table.len() {
        let bucket = bucket(table, address, steps);
        let free = bucket.addresses.iter().position(|entry| {
            entry.load(Relaxed) == 0 && entry.compare_exchange(0, CLAIMED, Acquire, Relaxed).is_ok()
        });
        if let Some(entry) = free {
            bucket.sizes[entry].store(size | usize::from(heap), Relaxed);
            // Release pairs with the acquire in `find`: a thread that finds the address also sees
            // the size.
            bucket.addresses[entry].store(address, Release);
            BLOCKS.fetch_add(1, Relaxed);
            return true;
        }
        bucket.passed.fetch_add(1, Relaxed);
    }
    for bucket in table {
        bucket.passed.fetch_sub(1, Relaxed);
    }
    false
}

/// Returns the entry of a block: how many buckets it is after its home bucket, its bucket, and its
/// index in the bucket.
fn find(address: usize) -> Option<(usize, &'static Bucket, usize)> {
    if TABLE.load(Relaxed).is_null() {
        return None;
    }
    let table = table();
    for steps in 0..table.len() {
        let bucket = bucket(table, address, steps);
        let entry = bucket
            .addresses
            .iter()
            .position(|entry| entry.load(Acquire) == address);
        if let Some(entry) = entry {
            return Some((steps, bucket, entry));
        }
        if bucket.passed.load(Relaxed) == 0 {
            return None;
        }
    }
    None
}

/// Takes a block out of the table. Returns its size and its heap.
fn leave(address: usize) -> Option<(usize, u16)> {
    let (steps, found, entry) = find(address)?;
    let size = found.sizes[entry].load(Relaxed);
    // If two threads free the same block by mistake, the exchange fails for one of them.
    found.addresses[entry]
        .compare_exchange(address, 0, Release, Relaxed)
        .ok()?;
    BLOCKS.fetch_sub(1, Relaxed);
    for step in 0..steps {
        bucket(table(), address, step).passed.fetch_sub(1, Relaxed);
    }
    Some((size & !HEAP, (size & HEAP) as u16))
}

/// Adds `more` mapped bytes to the memory in huge blocks and to the held memory. Subtracts `less`
/// unmapped bytes from both, and adds them to the returned memory.
fn mapped(more: usize, less: usize) {
    if more > 0 {
        ARENA_STAT.add(0, ArenaItem::Huge, more as u64);
        took(0, more);
    }
    if less > 0 {
        ARENA_STAT.sub(0, ArenaItem::Huge, less as u64);
        gave_back(0, less);
    }
}

/// Allocates a zeroed block of at least `size` bytes at a multiple of `align`, a power of two.
///
/// Returns `None` if the system has no memory. Costs up to three system calls. Takes no lock, so
/// that signal handlers may call it at any point.
pub fn alloc(size: usize, align: usize) -> Option<NonNull<u8>> {
    alloc_for(size, align, 0, true)
}

/// Allocates a block as [`alloc`] does, for the heap with number `heap`, or for none if this is 0.
/// A program that wants the block `zeroed` may leave most of it so (`pageblocks`).
pub fn alloc_for(size: usize, align: usize, heap: u16, zeroed: bool) -> Option<NonNull<u8>> {
    let size = size.max(1).checked_next_multiple_of(sys::page_size())?;
    if size > isize::MAX as usize || align > isize::MAX as usize {
        return None;
    }
    let block = sys::map_aligned(size, align)?;
    if !enter(block.as_ptr() as usize, size, heap) {
        // SAFETY: the block was mapped above, and no other code knows it.
        unsafe { sys::unmap(block.as_ptr(), size) };
        return None;
    }
    if size >= HUGE_PAGE && huge_pages::are_wanted_for_mapping(zeroed) {
        // SAFETY: the block was mapped above, and has whole pages.
        unsafe { sys::prefer_huge(block.as_ptr(), size) };
    }
    mapped(size, 0);
    Some(block)
}

/// Unmaps the block at `address`, or lets it wait while a thread has isolated its CPU (`waiting`).
/// Returns false, and does nothing, if there is no such block. Costs a look-up and a system call.
/// If blocks waited for the end of an isolation, also costs one for each of them.
///
/// # Safety
///
/// No thread uses the block any more.
pub unsafe fn free(address: *mut u8) -> bool {
    let Some((size, _)) = leave(address as usize) else {
        return false;
    };
    let mapping = mapping_of(address);
    if !may_wait() {
        unmap_waiting();
    } else if WAITING.put(mapping as usize, size) {
        if !may_wait() {
            unmap_waiting();
        }
        return true;
    }
    // SAFETY: the table had a mapping of this size for the address, and `leave` took it out for
    // this thread alone. The caller promises that no thread uses the block.
    unsafe { sys::unmap(mapping, size) };
    mapped(0, size);
    true
}

/// Returns whether freed blocks wait: a CPU is isolated, no limit is near, and the user has not
/// limited how much free memory stays.
fn may_wait() -> bool {
    spared::any() && budget::dirty_limit().is_none() && !budget::is_beyond_mark(held() as usize)
}

/// Unmaps the freed blocks that waited for the end of an isolation. Costs a fence and a load if
/// there are none, and else a system call for each.
pub fn unmap_waiting() {
    WAITING.take_all(|mapping, size| {
        // SAFETY: `free` gave the mapping up, and only this call has taken it out.
        unsafe { sys::unmap(mapping as *mut u8, size) };
        mapped(0, size);
    });
}

/// Returns how many huge blocks there are, without those that wait for the end of an isolation. One
/// load.
pub fn count() -> usize {
    BLOCKS.load(Relaxed)
}

/// Returns how many bytes the block at `address` has, or `None` if there is no such block. Costs a
/// look-up in the table.
pub fn size(address: *mut u8) -> Option<usize> {
    let (_, bucket, entry) = find(address as usize)?;
    Some((bucket.sizes[entry].load(Relaxed) & !HEAP) - offset_of(address))
}

/// Returns the number of the heap of the block at `address`, and the size of the block's mapping.
/// Returns `None` if there is no such block, or if it belongs to no heap.
pub fn heap_of(address: *mut u8) -> Option<(u16, usize)> {
    let (_, bucket, entry) = find(address as usize)?;
    let size = bucket.sizes[entry].load(Relaxed);
    Some(((size & HEAP) as u16, size & !HEAP)).filter(|&(heap, _)| heap != 0)
}

/// Frees all blocks of heap `heap`, which has `count` of them. Walks the table until it has found
/// them.
///
/// # Safety
///
/// No thread uses a block of the heap any more, and none frees or resizes one meanwhile.
pub unsafe fn free_all_of(heap: u16, count: usize) {
    let entries = table()
        .iter()
        .flat_map(|bucket| bucket.addresses.iter().zip(&bucket.sizes));
    let of_heap = entries.filter_map(|(address, size)| {
        // Acquire pairs with the release in `enter`: the size is that of the address.
        let address = address.load(Acquire);
        let is_block = address > CLAIMED && size.load(Relaxed) & HEAP == usize::from(heap);
        is_block.then_some(address as *mut u8)
    });
    for block in of_heap.take(count) {
        // SAFETY: the table says that the block is the heap's. The caller promises that no thread
        // uses it.
        unsafe { free(block) };
    }
}

/// Changes the size of the mapping of the block at `address`. The caller owns the block.
fn note_size(address: *mut u8, size: usize) {
    if let Some((_, bucket, entry)) = find(address as usize) {
        let heap = bucket.sizes[entry].load(Relaxed) & HEAP;
        bucket.sizes[entry].store(size | heap, Relaxed);
    }
}

/// Moves pages of a mapping to a huge block of at least `size` bytes elsewhere, which begins
/// `offset` bytes behind its mapping. Returns `None`, and changes nothing, if that cannot be done.
/// After success, nothing is mapped where the pages were.
///
/// # Safety
///
/// `[start, start + old)` are whole pages that only the caller uses, fewer than `offset + size`
/// bytes. `offset` is less than a page.
pub(super) unsafe fn adopt(
    start: *mut u8,
    old: usize,
    size: usize,
    offset: usize,
) -> Option<NonNull<u8>> {
    let size = size
        .checked_add(offset)?
        .checked_next_multiple_of(sys::page_size())?;
    if !may_move() || BLOCKS.load(Relaxed) >= MOST.load(Relaxed) {
        return None;
    }
    // SAFETY: the caller promises that these are whole pages, and that no other thread uses them.
    let mapping = unsafe { sys::remap(start, old, size) }?;
    // The kernel lengthens a mapping in place if nothing is mapped behind it. But the addresses
    // there belong to the arena, so the mapping is shortened again.
    // SAFETY: the pages are the caller's, and `remap` above made the mapping `size` bytes long.
    if mapping.as_ptr() == start && unsafe { sys::remap(start, size, old) }.is_some() {
        return None;
    }
    // SAFETY: `offset` is less than a page, and the mapping has at least one.
    let block = unsafe { mapping.add(offset) };
    if !enter(block.as_ptr() as usize, size, 0) {
        no_room(block.as_ptr(), size);
    }
    if huge_pages::are_wanted_for_mapping(false) {
        // The pages may come from a run for which the arena asked for small pages.
        // SAFETY: `remap` made this mapping for the new block.
        unsafe { sys::prefer_huge(mapping.as_ptr(), size) };
    }
    mapped(size, 0);
    Some(block)
}

/// Ends the process, because the table of huge blocks is full and the pages have already moved.
#[cold]
fn no_room(block: *mut u8, size: usize) -> ! {
    sys::die(format_args!(
        "no room to note the block at {block:p} ({size} bytes)"
    ))
}

/// Grows or shrinks the block at `address` to at least `size` bytes. The kernel moves the pages,
/// and copies no bytes. Returns `None`, and leaves the block as it was, if that cannot be done.
/// Costs a system call.
///
/// # Safety
///
/// `address` is a huge block that only the caller uses.
pub unsafe fn resize(address: *mut u8, size: usize) -> Option<NonNull<u8>> {
    let (mapping, offset) = (mapping_of(address), offset_of(address));
    let size = size.max(1).checked_add(offset)?;
    let size = size.checked_next_multiple_of(sys::page_size())?;
    let old = self::size(address)? + offset;
    if size <= old {
        // SAFETY: the table says that the mapping has `old` bytes, and only the caller uses it. The
        // kernel cuts the end off, and does not move a mapping that shrinks.
        unsafe { sys::remap(mapping, old, size) }?;
        note_size(address, size);
        mapped(0, old - size);
        return NonNull::new(address);
    }
    if !may_move() {
        return None;
    }
    // Takes the block out of the table first. Once the kernel has moved the pages, another thread
    // may get a block at the old address, and enter it.
    let (_, heap) = leave(address as usize)?;
    // SAFETY: the table said that the mapping has `old` bytes, and only the caller uses it.
    let moved = unsafe { sys::remap(mapping, old, size) };
    // SAFETY: the block's offset is less than a page, and the new mapping has at least one.
    let moved = moved.map(|mapping| unsafe { mapping.add(offset) });
    let (block, now) = moved.map_or((address, old), |block| (block.as_ptr(), size));
    if !enter(block as usize, now, heap) {
        no_room(block, now);
    }
    mapped(now - old, 0);
    moved
}

/// Returns where the mapping of the block at `address` begins.
fn mapping_of(address: *mut u8) -> *mut u8 {
    address.wrapping_sub(offset_of(address))
}

/// Returns how many bytes of its mapping lie before the block at `address`.
fn offset_of(address: *mut u8) -> usize {
    address as usize & (sys::page_size() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{GRANULE, LARGE, alloc_run, free_run, move_run};

    #[test]
    fn no_pages_move_while_the_process_has_its_share_of_mappings() {
        let run = alloc_run(40, 0, LARGE, false).unwrap().start;
        // A share of 0, because other tests may free their huge blocks meanwhile.
        let most = MOST.swap(0, Relaxed);
        // SAFETY: the test owns the run, which stays because the move is refused.
        assert_eq!(unsafe { move_run(run, 80 * GRANULE) }, None);
        MOST.store(most, Relaxed);
        // SAFETY: the test owns the run, and does not use it after the move.
        let moved = unsafe { move_run(run, 80 * GRANULE) };
        match moved {
            // SAFETY: the test gives the block up.
            Some(block) => assert!(unsafe { free(block.as_ptr()) }),
            // SAFETY: the test gives the run up.
            None => unsafe { free_run(run) },
        }
        assert!(moved.is_some());
    }
}
