//! A heap's state, how its blocks are allocated and freed, and how a block's heap is found.

use super::classes::{self, CLASSES};
use crate::account::Account;
use crate::arena::{self, GRANULE, HUGE, budget};
use crate::cache_units::{CacheId, HELD, MAIN, MAX_CACHES, SPARE};
use crate::slab::heap_caches::{self, Descriptor, Options, Place, Refused};
use crate::{fork, sanitizer, slab, sys};
use core::alloc::Layout;
use core::fmt::Write;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicUsize};
use pinfold_rseq::FenceError;

/// Every block's address is a multiple of this.
const ALIGN: usize = 16;
/// The largest alignment of a large block that begins at a colour of its run.
const COLOURED_ALIGN: usize = arena::COLOURED_ALIGN;
/// The bits of a tag that are the number of a heap.
const NUMBER: u32 = (1 << NUMBER_BITS) - 1;
const NUMBER_BITS: u32 = MAX_CACHES.ilog2();
/// The fewest milliseconds between two fences of a heap that reaches its limit.
const BETWEEN_DRAINS: u32 = 10;

/// The number of the heap that a cache's number belongs to, or 0. See the module `heaps`.
pub(super) static HEAP_OF: [AtomicU16; MAX_CACHES] = [const { AtomicU16::new(0) }; MAX_CACHES];
/// The states of heaps by their numbers. A state's memory passes to the next heap with the number.
pub(super) static STATES: [AtomicPtr<State>; MAX_CACHES] =
    [const { AtomicPtr::new(null_mut()) }; MAX_CACHES];
/// Whether any heap ever had a block that is a mapping. Until then, frees of mappings look for no
/// heap.
static ANY_HUGE: AtomicBool = AtomicBool::new(false);

/// A heap's state.
#[repr(align(64))]
pub(crate) struct State {
    /// The numbers of the caches by class, or 0 for a class that was not used yet.
    pub(super) caches: [AtomicU16; CLASSES],
    /// The heap's own number.
    pub(super) number: CacheId,
    /// Whether a sanitizer wants to see each allocation and free.
    is_watched: bool,
    /// The settings of the heap's caches.
    options: Options,
    pub(super) account: Account,
    /// Whether a scope ever made malloc allocate from the heap.
    pub(super) was_entered: AtomicBool,
    /// How many blocks are mappings.
    pub(super) huge: AtomicUsize,
    /// When the heap last fenced because of its limit, in milliseconds, wrapping.
    drained: AtomicU32,
}

/// The reason that a heap serves no block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The block would exceed the heap's limit.
    Limit,
    /// The system has no memory, or a lock cannot be taken now.
    Other,
}

/// What a caller asks for.
#[derive(Clone, Copy)]
pub(super) struct Ask {
    pub(super) size: usize,
    /// A power of two.
    pub(super) align: usize,
    /// Whether the block must read as zeroes.
    pub(super) zeroed: bool,
}

impl State {
    pub(super) fn new(number: CacheId, options: Options) -> State {
        State {
            caches: [const { AtomicU16::new(0) }; CLASSES],
            number,
            is_watched: sanitizer::orders_accesses(),
            options,
            account: Account::new(),
            was_entered: AtomicBool::new(false),
            huge: AtomicUsize::new(0),
            drained: AtomicU32::new(0),
        }
    }

    /// Returns the tag of threads in a scope of this heap: the heap's number, and above it the
    /// lowest bits of how many caches have had the number. So the tag that a thread forgot to
    /// remove does not name a later heap.
    pub(super) fn tag(&self) -> u32 {
        // C programs get the tag as an `int` that is not negative.
        let birth = heap_caches::birth_of(self.number) << NUMBER_BITS & i32::MAX as u32;
        birth | u32::from(self.number.entry())
    }

    /// Returns the heap's own descriptor, which has no objects.
    pub(super) fn own(&self) -> &'static Descriptor {
        // SAFETY: the heap owns the descriptor, and `self` is only used while the heap exists.
        unsafe { heap_caches::kept_alive(self.number) }
    }

    /// Allocates a block of `size` bytes from the CPU's sheaf. Returns null if the sheaf is empty,
    /// and if the size has no class.
    #[inline(always)]
    pub(crate) fn alloc_fast(&self, size: usize) -> *mut u8 {
        if size > classes::MAX_SIZE || self.is_watched {
            return null_mut();
        }
        // Acquire pairs with the release in `make`.
        match self.caches[classes::of(size)].load(Acquire) {
            0 => null_mut(),
            entry => Place::of(CacheId::from_entry(entry), MAIN).pop_fast(),
        }
    }

    /// Allocates a block of `size` bytes at a multiple of `align`, a power of two.
    pub(crate) fn alloc(
        &'static self,
        size: usize,
        align: usize,
        zeroed: bool,
    ) -> Result<NonNull<u8>, Refusal> {
        let ask = Ask {
            size,
            align: align.max(ALIGN),
            zeroed,
        };
        let turn = fork::turn();
        if let Some(block) = self.serve(ask) {
            return Ok(block);
        }
        // During a fork, the heap's own free memory may be out of reach.
        if !self.account.is_full_for(self.charge_of(ask)) || fork::has_forked_since(turn) {
            return Err(Refusal::Other);
        }
        self.reclaim_here();
        if let Some(block) = self.serve(ask) {
            return Ok(block);
        }
        if self.may_drain() && heap_caches::try_drain(|cache| self.has(cache)) {
            self.for_each_cache(give_all);
            return self.serve(ask).ok_or(Refusal::Limit);
        }
        Err(Refusal::Limit)
    }

    fn serve(&'static self, ask: Ask) -> Option<NonNull<u8>> {
        let Some(class) = classes::of_aligned(ask.size, ask.align) else {
            return match ask.size < HUGE && ask.align <= GRANULE {
                true => self.alloc_run(ask),
                false => self.alloc_huge(ask),
            };
        };
        let Some(cache) = self.cache(class) else {
            // No number is left for the cache.
            return self.alloc_run(ask);
        };
        let block = NonNull::new(match (&cache.slot_layout, self.is_watched) {
            // The user may write to the whole object.
            (Some(slot_layout), _) => cache.alloc_debugged_here(slot_layout, usize::MAX),
            (None, true) => cache.alloc_watched(),
            (None, false) => cache.alloc_slow(),
        })?;
        if ask.zeroed {
            // SAFETY: the block is new, and has at least `size` bytes.
            unsafe { block.write_bytes(0, ask.size) };
        }
        Some(block)
    }

    /// Returns the cache of a class. Makes the cache if it does not exist yet.
    fn cache(&'static self, class: usize) -> Option<&'static Descriptor> {
        // Acquire pairs with the release in `make`: a thread that sees the number also sees the
        // cache.
        match self.caches[class].load(Acquire) {
            0 => self.make(class),
            // SAFETY: the heap owns the cache, and the caller uses the heap.
            entry => Some(unsafe { heap_caches::kept_alive(CacheId::from_entry(entry)) }),
        }
    }

    #[cold]
    #[inline(never)]
    fn make(&'static self, class: usize) -> Option<&'static Descriptor> {
        let size = classes::size(class);
        let mut name = sys::Text::<33>::new();
        let heap = self.own().name();
        // A name that is too long is cut, as the names of all caches are.
        let _ = write!(
            name,
            "{}-{size:05}",
            &heap[..sys::whole_characters(heap, 26)]
        );
        let align = (1 << size.trailing_zeros()).min(GRANULE);
        let layout = Layout::from_size_align(size, align).ok()?;
        let cache = self
            .options
            .create_of_heap(name.as_str(), layout, &self.account)
            .ok()?;
        let entry = cache.id.entry();
        HEAP_OF[cache.id.index()].store(self.number.entry(), Relaxed);
        // Release pairs with the acquires in `cache` and `alloc_fast`: a thread that sees the
        // number also sees the cache.
        match self.caches[class].compare_exchange(0, entry, Release, Acquire) {
            Ok(_) => Some(cache),
            Err(other) => {
                // Another thread was first. No thread has seen this thread's cache.
                HEAP_OF[cache.id.index()].store(0, Relaxed);
                cache.retire_or_divert();
                // SAFETY: the heap owns the cache, and the caller uses the heap.
                Some(unsafe { heap_caches::kept_alive(CacheId::from_entry(other)) })
            }
        }
    }

    /// Allocates a block that is a run.
    #[inline(never)]
    fn alloc_run(&'static self, ask: Ask) -> Option<NonNull<u8>> {
        let granules = granules_of(ask);
        let run = self.account.charged(granules * GRANULE, || {
            slab::or_reclaim(|| self.own().alloc_run(granules))
        })?;
        let offset = match ask.align <= COLOURED_ALIGN {
            true => arena::colour_of(run.start),
            false => 0,
        };
        if ask.zeroed && !run.zeroed {
            // SAFETY: the run is new, so this thread owns it. It has `offset + size` bytes.
            unsafe { arena::zero_run(run.start, offset + ask.size) };
        }
        // SAFETY: a colour is less than a page, and the run has room for it.
        Some(unsafe { run.start.add(offset) })
    }

    /// Allocates a block that is a mapping.
    #[inline(never)]
    fn alloc_huge(&'static self, ask: Ask) -> Option<NonNull<u8>> {
        let size = ask.size.max(1).checked_next_multiple_of(sys::page_size())?;
        budget::is_possible(size).then_some(())?;
        let block = self.account.charged(size, || {
            slab::make_room(size);
            let alloc = || arena::alloc_huge_for(size, ask.align, self.number.entry(), ask.zeroed);
            slab::or_reclaim_for(size, alloc)
        })?;
        self.huge.fetch_add(1, Relaxed);
        ANY_HUGE.store(true, Relaxed);
        Some(block)
    }

    /// Resizes a block of this heap. Returns an error, and leaves the block unchanged, if the heap
    /// serves no larger block.
    ///
    /// # Safety
    ///
    /// `block` is a block of this heap that only the caller uses.
    pub(crate) unsafe fn realloc(
        &'static self,
        block: NonNull<u8>,
        size: usize,
        align: usize,
    ) -> Result<NonNull<u8>, Refusal> {
        // SAFETY: the caller owns the block.
        let Some(room) = (unsafe { usable_size(block.as_ptr()) }) else {
            not_ours("realloc", block.as_ptr());
        };
        if size <= room && size >= room / 2 {
            return Ok(block);
        }
        if arena::heap_of_huge(block.as_ptr()).is_some() && size >= HUGE && align <= ALIGN {
            // SAFETY: the caller owns the block, which is a mapping of `room` bytes.
            let resized = unsafe { self.resize_huge(block, room, size) };
            if let Some(moved) = resized {
                return Ok(moved);
            }
        }
        let fresh = match self.alloc(size, align, false) {
            Ok(fresh) => fresh,
            // The block has room, so it stays.
            Err(_) if size <= room => return Ok(block),
            Err(refusal) => return Err(refusal),
        };
        // SAFETY: both blocks have the smaller of the two sizes, and two blocks do not overlap. The
        // caller passes ownership of `block`.
        unsafe {
            fresh.copy_from_nonoverlapping(block, room.min(size));
            free_any(block.as_ptr());
        }
        Ok(fresh)
    }

    /// Resizes a block that is a mapping of `before` bytes. The kernel moves the pages. Returns
    /// `None`, and leaves the block unchanged, if it refuses, or if the heap may not hold more.
    ///
    /// # Safety
    ///
    /// `block` is such a block of this heap, and only the caller uses it.
    #[inline(never)]
    unsafe fn resize_huge(
        &self,
        block: NonNull<u8>,
        before: usize,
        size: usize,
    ) -> Option<NonNull<u8>> {
        let size = size.checked_next_multiple_of(sys::page_size())?;
        let moved = self.account.charged(size.saturating_sub(before), || {
            slab::make_room(size.saturating_sub(before));
            // SAFETY: the caller owns the block.
            let resize = || unsafe { arena::resize_huge(block.as_ptr(), size) };
            slab::or_reclaim_for(size, resize)
        })?;
        self.account.uncharge(before.saturating_sub(size));
        Some(moved)
    }

    pub(super) fn for_each_cache(&self, mut f: impl FnMut(&'static Descriptor)) {
        let entries = self.caches.iter().map(|cache| cache.load(Acquire));
        entries.filter(|&entry| entry != 0).for_each(|entry| {
            // SAFETY: the heap owns the cache, and the caller uses the heap.
            f(unsafe { heap_caches::kept_alive(CacheId::from_entry(entry)) });
        });
    }

    /// Gives the memory of free objects back to the arena, as far as this thread reaches it without
    /// stopping another CPU.
    #[cold]
    #[inline(never)]
    fn reclaim_here(&self) {
        self.for_each_cache(|cache| {
            for kind in [MAIN, SPARE, HELD] {
                if let Some(sheaf) = cache.place(kind).take_if(|word| word != 0) {
                    cache.put(cache.here(), sheaf);
                }
            }
            give_all(cache);
        });
    }

    /// Returns whether the heap has not fenced for a short time.
    fn may_drain(&self) -> bool {
        let now = sys::coarse_milliseconds() as u32;
        let is_due = now.wrapping_sub(self.drained.load(Relaxed)) >= BETWEEN_DRAINS;
        if is_due {
            self.drained.store(now, Relaxed);
        }
        is_due && !crate::topology::facts::any_quiet()
    }

    /// Returns how many bytes the heap is charged if it has no free memory for what is asked: a
    /// slab of the class, a run, or a mapping.
    fn charge_of(&self, ask: Ask) -> usize {
        let class = classes::of_aligned(ask.size, ask.align);
        let entry = class.map_or(0, |class| self.caches[class].load(Acquire));
        if entry != 0 {
            // SAFETY: the heap owns the cache, and the caller uses the heap.
            let cache = unsafe { heap_caches::kept_alive(CacheId::from_entry(entry)) };
            return cache.geometry.granules * GRANULE;
        }
        match ask.size < HUGE && ask.align <= GRANULE {
            true => granules_of(ask) * GRANULE,
            false => ask.size,
        }
    }

    /// Returns whether a cache is this heap's.
    fn has(&self, cache: &Descriptor) -> bool {
        heap_number(cache.id.entry()) == self.number.entry()
    }

    /// Moves the sheaves of all CPUs to the barns.
    ///
    /// # Errors
    ///
    /// [`FenceError`], if the CPUs cannot be fenced. `EBUSY` also in a signal handler that
    /// interrupted a thread which stops CPUs or takes idle sheaves.
    pub(super) fn drain(&self) -> Result<(), FenceError> {
        let drained = heap_caches::drain_or_fail(|cache| self.has(cache));
        drained.map_err(|refused| match refused {
            Refused::Lock => FenceError { errno: libc::EBUSY },
            Refused::Fence(error) => error,
        })
    }
}

/// Returns how many granules a block has that is a run.
fn granules_of(ask: Ask) -> usize {
    let colour = match ask.align <= COLOURED_ALIGN {
        true => sys::page_size(),
        false => 0,
    };
    (ask.size + colour).div_ceil(GRANULE)
}

/// Gives a cache's barns and empty slabs back to the arena.
fn give_all(cache: &Descriptor) {
    cache.give_all();
}

/// Returns the number of the heap that `entry`, an entry of the page map, belongs to, or 0.
#[inline]
fn heap_number(entry: u16) -> u16 {
    // Relaxed: the caller owns a block with this entry, and the thread that allocated the block saw
    // the number.
    HEAP_OF
        .get(usize::from(entry))
        .map_or(0, |heap| heap.load(Relaxed))
}

/// Returns the state of the heap with this number, if there is one.
fn state(number: u16) -> Option<&'static State> {
    let state = STATES.get(usize::from(number))?.load(Acquire);
    // SAFETY: a state's memory is never unmapped. The pointer is of a whole state: the release in
    // `Builder::build` pairs with the acquire above.
    let state = (!state.is_null()).then(|| unsafe { &*state })?;
    // A heap that was destroyed has no number.
    (heap_number(number) == number).then_some(state)
}

/// Returns the heap of `block`, or `None` if the block belongs to no heap.
///
/// # Safety
///
/// The caller owns `block`.
pub(crate) unsafe fn state_of(block: *mut u8) -> Option<&'static State> {
    let entry = arena::entry(block as usize);
    match heap_number(entry) {
        0 if entry == 0 && ANY_HUGE.load(Relaxed) => state(arena::heap_of_huge(block)?.0),
        0 => None,
        number => state(number),
    }
}

/// Returns the heap of the scope that the calling thread is in.
pub(crate) fn here() -> Option<&'static State> {
    match pinfold_rseq::tag() {
        None | Some(0) => None,
        Some(tag) => {
            let number = (tag & NUMBER) as u16;
            state(number).filter(|heap| heap.tag() == tag)
        }
    }
}

/// Frees `block` if it belongs to a heap. Returns whether it does.
///
/// # Safety
///
/// The caller owns `block`, which may be any block of malloc's or of a heap, and gives it up if it
/// belongs to a heap.
#[inline]
pub(crate) unsafe fn free_any(block: *mut u8) -> bool {
    let entry = arena::entry(block as usize);
    match heap_number(entry) {
        // SAFETY: the caller passes ownership of the block.
        0 => entry == 0 && ANY_HUGE.load(Relaxed) && unsafe { free_huge(block) },
        number if number == entry => {
            // SAFETY: the caller passes ownership of the block.
            unsafe { free_run(block, number) };
            true
        }
        _ => {
            // SAFETY: the caller passes ownership of the block, and the entry is that of its cache.
            unsafe { free_object(block, entry) };
            true
        }
    }
}

/// Frees a block of a cache of a heap.
///
/// # Safety
///
/// The caller owns the block, whose entry in the page map is `entry`, and gives it up.
#[inline]
unsafe fn free_object(block: *mut u8, entry: u16) {
    let main = Place::of(CacheId::from_entry(entry), MAIN);
    // SAFETY: the caller passes ownership of the block.
    if sanitizer::orders_accesses() || !unsafe { main.push_fast(block) } {
        // SAFETY: the caller passes ownership of the block.
        unsafe { free_object_slow(block, entry) };
    }
}

/// # Safety
///
/// As for [`free_object`].
#[cold]
#[inline(never)]
unsafe fn free_object_slow(block: *mut u8, entry: u16) {
    // Pins the cache: once the block is in a slab, nothing of this thread keeps the heap from being
    // dropped, and the cache from being made again for another heap.
    if let Some(cache) = heap_caches::pin_by_entry(entry) {
        // SAFETY: the caller passes ownership of the block, which is of this cache.
        unsafe {
            match sanitizer::orders_accesses() {
                true => cache.free_watched(block),
                false => cache.free_slow(block),
            }
        }
    }
}

/// Frees a large block of heap `number`. Ends the process if no block begins at the address.
///
/// # Safety
///
/// The caller owns the block and gives it up.
#[cold]
#[inline(never)]
unsafe fn free_run(block: *mut u8, number: u16) {
    let Some(start) = run_of(block) else {
        not_ours("free", block);
    };
    // SAFETY: `run_of` found that the block is this run, which the caller owns.
    let bytes = unsafe { arena::run_size(start) };
    // SAFETY: for the same reason.
    unsafe { arena::free_run(start) };
    if let Some(state) = state(number) {
        state.account.uncharge(bytes);
    }
}

/// Frees a block that is a mapping, if it belongs to a heap.
///
/// # Safety
///
/// The caller owns the block, and gives it up if it belongs to a heap.
#[cold]
#[inline(never)]
unsafe fn free_huge(block: *mut u8) -> bool {
    let Some((number, size)) = arena::heap_of_huge(block) else {
        return false;
    };
    // SAFETY: the caller passes ownership of the block.
    if unsafe { arena::free_huge(block) }
        && let Some(state) = state(number)
    {
        state.huge.fetch_sub(1, Relaxed);
        state.account.uncharge(size);
    }
    true
}

/// Returns the run that is the large block at `block`, or `None` if no block begins there.
fn run_of(block: *mut u8) -> Option<NonNull<u8>> {
    let start = NonNull::new(arena::start_of_run(block as usize).cast_mut())?;
    let offset = (block as usize).wrapping_sub(start.as_ptr() as usize);
    (offset == 0 || offset == arena::colour_of(start)).then_some(start)
}

/// Returns how many bytes of a heap's block its user may use. Returns `None` if the block belongs
/// to no heap.
///
/// # Safety
///
/// The caller owns `block`, which may be any block of malloc's or of a heap.
pub(crate) unsafe fn usable_size(block: *mut u8) -> Option<usize> {
    let entry = arena::entry(block as usize);
    match heap_number(entry) {
        0 if entry == 0 && ANY_HUGE.load(Relaxed) => {
            arena::heap_of_huge(block).map(|(_, size)| size)
        }
        0 => None,
        number if number == entry => {
            let start = run_of(block).unwrap_or_else(|| not_ours("size of", block));
            // SAFETY: `run_of` found that the block is this run, which the caller owns.
            let bytes = unsafe { arena::run_size(start) };
            Some(bytes - (block as usize - start.as_ptr() as usize))
        }
        // SAFETY: the caller owns the block, so its cache exists.
        _ => Some(unsafe { heap_caches::kept_alive(CacheId::from_entry(entry)) }.room()),
    }
}

/// Ends the process, because no block of a heap begins at the address.
#[cold]
pub(super) fn not_ours(what: &str, block: *mut u8) -> ! {
    crate::abort_with_callers(format_args!(
        "{what} {block:p}: no block of a heap begins at the address"
    ))
}
