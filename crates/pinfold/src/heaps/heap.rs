//! A heap as its owner sees it.

use super::state::{HEAP_OF, STATES, State, free_any, not_ours, state_of, usable_size};
use crate::arena;
use crate::fork;
use crate::mempolicy::{Mempolicy, Placement};
use crate::segment;
use crate::slab::heap_caches::{self, CacheError, Options};
use core::alloc::Layout;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Relaxed, Release};
use pinfold_rseq::FenceError;

/// The settings of a new heap. [`Heap::builder`] makes this value.
///
/// ```
/// use pinfold::heaps::Heap;
/// use pinfold::mempolicy::Mempolicy;
///
/// let policy = Mempolicy::parse("interleave")?;
/// let heap = Heap::builder("index").limit(64 << 20).policy(&policy).build()?;
/// assert_eq!(heap.name(), "index");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy)]
pub struct Builder<'n> {
    name: &'n str,
    limit: Option<usize>,
    options: Options,
}

impl<'n> Builder<'n> {
    /// Limits what the heap may hold, in bytes, including free memory in its slabs and sheaves. By
    /// default there is no limit. An allocation that would exceed the limit fails, after the heap
    /// gave back the free memory that it could reach: that of this CPU's sheaves and of all slabs,
    /// and at most a hundred times a second, unless a CPU is isolated, that of all CPUs' sheaves.
    #[must_use]
    pub const fn limit(mut self, bytes: usize) -> Self {
        self.limit = Some(bytes);
        self
    }

    /// Places the heap's memory by `policy` instead of the process's policy. Blocks that are
    /// mappings (62 MiB and more, or aligned to more than 64 KiB) follow the process's policy.
    #[must_use]
    pub fn policy(mut self, policy: &Mempolicy) -> Self {
        self.options.possible = Placement::is_possible(policy);
        self.options.placement = Placement::of(policy);
        self
    }

    /// Makes the heap's caches hardened or not, whatever `PINFOLD_HARDENED` says (see
    /// [`slab::Builder::hardened`](crate::slab::Builder::hardened)).
    #[must_use]
    pub const fn hardened(mut self, hardened: bool) -> Self {
        self.options.treatment.hardened = Some(hardened);
        self
    }

    /// Makes the heap. Takes the registry's lock once. Makes no slab yet.
    ///
    /// If the process runs on Pinfold's malloc and the name has only letters, digits and characters
    /// of `_.:-/`, `pinfold vmstat PID` and `/metrics` show what the heap holds as the counter
    /// `heap/NAME`, cut to 32 bytes. A second heap of the same name is not shown, and neither are
    /// heaps beyond the 128 counters that a process can show.
    ///
    /// # Errors
    ///
    /// [`HeapError`]
    pub fn build(self) -> Result<Heap, HeapError> {
        let own = self.options.create_own(self.name)?;
        let at = &STATES[own.id.index()];
        let mut memory = at.load(Relaxed);
        if memory.is_null() {
            let fresh = arena::alloc_metadata(Layout::new::<State>());
            let Some(fresh) = fresh else {
                own.retire();
                return Err(HeapError::NoMemory);
            };
            memory = fresh.as_ptr().cast();
        }
        // SAFETY: the memory has room for a state and is never unmapped. No other thread uses it,
        // because this thread alone has the heap's number.
        let state: &'static State = unsafe {
            memory.write(State::new(own.id, self.options));
            &*memory
        };
        state.account.set_limit(self.limit);
        // Release pairs with the acquire in `state::state`.
        at.store(memory, Release);
        HEAP_OF[own.id.index()].store(own.id.entry(), Relaxed);
        // A process without a segment shows nothing, and more heaps than there is room for are not
        // shown.
        let _ = segment::show_heap(self.name, &state.account);
        Ok(Heap { state })
    }
}

/// A heap: blocks of any size that are counted, limited and destroyed together. Every method may be
/// called from any thread at any time.
///
/// Dropping a heap frees all its blocks, unless a scope ever made malloc allocate from it
/// (`pinfold_malloc::scope`). Then blocks in use keep their memory.
///
/// ```
/// use pinfold::heaps::Heap;
///
/// let heap = Heap::new("request")?;
/// for _ in 0..1000 {
///     heap.alloc(64).expect("memory");
/// }
/// drop(heap); // Frees the blocks.
/// # Ok::<(), pinfold::heaps::HeapError>(())
/// ```
pub struct Heap {
    state: &'static State,
}

impl Heap {
    /// Makes a heap without a limit. `name` is cut to 32 bytes.
    ///
    /// # Errors
    ///
    /// [`HeapError`]
    pub fn new(name: &str) -> Result<Heap, HeapError> {
        Heap::builder(name).build()
    }

    /// Returns a builder for a heap with settings of its own.
    pub const fn builder(name: &str) -> Builder<'_> {
        Builder {
            name,
            limit: None,
            options: Options::NONE,
        }
    }

    /// Allocates a block of `size` bytes, aligned to 16. Returns `None` if the heap may not hold
    /// more, or the system has no memory. May return `None` in a signal handler that interrupted a
    /// slow path.
    ///
    /// Costs one critical section for up to 64 KiB on the common path.
    #[inline]
    pub fn alloc(&self, size: usize) -> Option<NonNull<u8>> {
        NonNull::new(self.state.alloc_fast(size)).or_else(|| self.alloc_slow(size, 1, false))
    }

    /// Allocates a block, and waits for a fork that is under way.
    #[cold]
    #[inline(never)]
    fn alloc_slow(&self, size: usize, align: usize, zeroed: bool) -> Option<NonNull<u8>> {
        fork::retry(|| self.state.alloc(size, align, zeroed).ok())
    }

    /// Allocates a block of `size` bytes that read as zeroes. Otherwise as [`alloc`](Self::alloc),
    /// but some instructions slower.
    pub fn alloc_zeroed(&self, size: usize) -> Option<NonNull<u8>> {
        self.alloc_slow(size, 1, true)
    }

    /// Allocates a block of `size` bytes at a multiple of `align`. Returns `None` if `align` is not
    /// a power of two. Otherwise as [`alloc`](Self::alloc).
    pub fn alloc_aligned(&self, size: usize, align: usize) -> Option<NonNull<u8>> {
        align.is_power_of_two().then_some(())?;
        self.alloc_slow(size, align, false)
    }

    #[cfg(feature = "allocator-api2")]
    pub(super) fn alloc_zeroed_at(&self, layout: Layout) -> Option<NonNull<u8>> {
        self.alloc_slow(layout.size(), layout.align(), true)
    }

    /// Frees a block. Costs as much as [`alloc`](Self::alloc). Ends the process if the address is
    /// not in the memory of a heap.
    ///
    /// `free`, `pinfold_free` and `realloc` of Pinfold's malloc also accept the block.
    ///
    /// # Safety
    ///
    /// The block came from a heap, and no thread uses it any more.
    #[inline]
    pub unsafe fn free(&self, block: NonNull<u8>) {
        // SAFETY: the caller passes ownership of the block.
        if !unsafe { free_any(block.as_ptr()) } {
            not_ours("free", block.as_ptr());
        }
    }

    /// Grows or shrinks a block, and moves its content if need be. A block that still uses half of
    /// its room stays where it is. Returns `None`, and leaves the block unchanged, if the block
    /// cannot grow.
    ///
    /// # Safety
    ///
    /// The block came from this heap and was not freed. If the result is `Some`, the caller uses
    /// only the new address.
    pub unsafe fn realloc(&self, block: NonNull<u8>, size: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller owns the block, which a failed call leaves as it is.
        fork::retry(|| unsafe { self.state.realloc(block, size, 1) }.ok())
    }

    /// Returns how many bytes of a block its user may use.
    ///
    /// # Safety
    ///
    /// The block came from a heap and was not freed.
    pub unsafe fn usable_size(&self, block: NonNull<u8>) -> usize {
        // SAFETY: the caller owns the block.
        unsafe { usable_size(block.as_ptr()) }
            .unwrap_or_else(|| not_ours("size of", block.as_ptr()))
    }

    /// Returns whether `block` is a block of this heap.
    ///
    /// # Safety
    ///
    /// The caller owns `block`, which came from a heap or from Pinfold's malloc.
    pub unsafe fn contains(&self, block: *const u8) -> bool {
        // SAFETY: the caller owns the block.
        let heap = unsafe { state_of(block.cast_mut()) };
        heap.is_some_and(|heap| core::ptr::eq(heap, self.state))
    }

    /// Returns how many bytes the heap holds: slabs, runs and mappings, including their free parts.
    /// One load.
    pub fn held(&self) -> usize {
        self.state.account.held()
    }

    /// Returns the limit in bytes, or `None` if the heap is not limited.
    pub fn limit(&self) -> Option<usize> {
        self.state.account.limit()
    }

    /// Changes the limit. The heap keeps what it holds, even beyond the new limit.
    pub fn set_limit(&self, bytes: Option<usize>) {
        self.state.account.set_limit(bytes);
    }

    /// Returns the name that the heap was made with, cut to 32 bytes.
    pub fn name(&self) -> &str {
        self.state.own().name()
    }

    /// Returns what the heap holds and held. Takes the locks of its caches.
    pub fn statistics(&self) -> Statistics {
        let account = &self.state.account;
        let (mut free, mut slabs) = (0, 0);
        self.state.for_each_cache(|cache| {
            let size = cache.geometry.size;
            for node in cache.parts() {
                let (count, in_use) = node.count_and_in_use(cache);
                slabs += count * cache.geometry.granules * arena::GRANULE;
                free += (count * cache.geometry.per_slab).saturating_sub(in_use) * size;
            }
        });
        Statistics {
            held: account.held(),
            peak: account.peak(),
            limit: account.limit(),
            refusals: account.refusals(),
            free_in_slabs: free,
            large: account.held().saturating_sub(slabs),
        }
    }

    /// Returns the address of the heap's state, and does not end the heap.
    #[doc(hidden)]
    pub fn into_raw(self) -> *const () {
        core::ptr::from_ref(ManuallyDrop::new(self).state).cast()
    }

    /// Returns the heap of an address from [`into_raw`](Self::into_raw).
    ///
    /// # Safety
    ///
    /// The heap of this address exists, and the caller drops at most one value of it.
    #[doc(hidden)]
    pub unsafe fn from_raw(state: *const ()) -> Heap {
        // SAFETY: the caller promises the address of a state, whose memory is never unmapped.
        let state = unsafe { &*state.cast() };
        Heap { state }
    }

    /// Gives the heap's free memory back, including objects in the CPUs' sheaves. Interrupts each
    /// CPU that runs a thread of this process.
    ///
    /// # Errors
    ///
    /// [`FenceError`], if the CPUs cannot be fenced, and with `EBUSY` in a signal handler that
    /// interrupted the allocator. The CPUs then keep their sheaves.
    pub fn shrink(&self) -> Result<(), FenceError> {
        let drained = self.state.drain();
        self.state.for_each_cache(|cache| {
            cache.shrink();
        });
        drained
    }

    /// Destroys the heap and frees all its blocks at once, also those that a scope's malloc
    /// allocated. Costs an interrupt of each CPU that runs a thread of this process, a walk over
    /// the page map (two bytes for each 64 KiB of the process's memory), and a free of each slab
    /// and each large block. If the heap has blocks that are mappings, also a walk over the table
    /// of mappings, of up to 4 MiB.
    ///
    /// # Errors
    ///
    /// [`FenceError`], if the CPUs cannot be fenced, and with `EBUSY` in a signal handler that
    /// interrupted the allocator. The heap's blocks then stay for good.
    ///
    /// # Safety
    ///
    /// No thread uses a block of the heap any more, and none is in a scope of it. After a scope,
    /// "a block" includes what the C library and other code allocated there and kept: buffers of
    /// standard streams, thread-local values, tables that were filled at their first use.
    pub unsafe fn destroy(self) -> Result<(), FenceError> {
        let this = ManuallyDrop::new(self);
        // SAFETY: the caller promises that the blocks are unused. Nothing uses the heap after this
        // call.
        unsafe { this.end() }
    }

    /// Frees all blocks, and gives the heap's numbers back. The steps are those in the head of
    /// `heaps`.
    ///
    /// # Safety
    ///
    /// No thread uses the heap or a block of it, now or later.
    unsafe fn end(&self) -> Result<(), FenceError> {
        let state = self.state;
        state.drain()?;
        let mut all = true;
        state.for_each_cache(|cache| all &= cache.abandon());
        if !all {
            // A signal handler that interrupted the allocator. The blocks stay.
            return Err(FenceError { errno: libc::EBUSY });
        }
        let number = state.number.entry();
        let is_ours = |entry: u16| {
            let heap = HEAP_OF.get(usize::from(entry));
            heap.is_some_and(|heap| heap.load(Relaxed) == number)
        };
        let mut all = true;
        let free = |start: NonNull<u8>, entry| {
            // SAFETY: the run is a large block, or a slab that `abandon` dropped. The caller
            // promises that no thread uses it.
            unsafe {
                match entry == number || heap_caches::open_guard(start.as_ptr(), entry) {
                    true => arena::free_run(start),
                    false => all = false,
                }
            }
        };
        // SAFETY: the caller promises that no other thread uses the heap. Slabs and large blocks of
        // heaps mark all their granules.
        unsafe {
            arena::for_each_run(is_ours, free);
            match state.huge.load(Relaxed) {
                0 => {}
                count => arena::free_huge_of(number, count),
            }
        }
        // A run whose guard page stays closed keeps its entry, so the numbers are not used again.
        if all {
            self.retire();
        }
        Ok(())
    }

    /// Gives the numbers of the heap and its caches back. The caches have no slabs.
    fn retire(&self) {
        if !segment::hide_at((&raw const self.state.account).cast()) {
            // The numbers are not used again, because the account may still be read.
            return;
        }
        self.state.for_each_cache(|cache| {
            HEAP_OF[cache.id.index()].store(0, Relaxed);
            cache.retire();
        });
        let own = self.state.own();
        HEAP_OF[own.id.index()].store(0, Relaxed);
        own.retire();
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        if !self.state.was_entered.load(Relaxed) {
            // SAFETY: no scope ever allocated from the heap, so its blocks came from its own
            // methods. The callers of `alloc` do not use them after the heap is dropped, and
            // collections borrow the heap.
            let _ = unsafe { self.end() };
            return;
        }
        // Code that knows nothing of the heap may hold its blocks.
        let shown = (&raw const self.state.account).cast();
        if segment::hide_at(shown) && self.shrink().is_ok() && self.held() == 0 {
            self.retire();
        }
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap")
            .field("name", &self.name())
            .field("held", &self.held())
            .finish_non_exhaustive()
    }
}

/// Sets the calling thread's tag to `heap`. Returns the tag before, or `None` on an architecture
/// without tags.
pub(crate) fn tag(heap: &Heap) -> Option<u32> {
    let before = pinfold_rseq::tag()?;
    heap.state.was_entered.store(true, Relaxed);
    pinfold_rseq::set_tag(heap.state.tag());
    Some(before)
}

/// Sets the calling thread's tag to what [`tag`] returned.
pub(crate) fn untag(before: u32) {
    pinfold_rseq::set_tag(before);
}

/// What a heap holds, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// What the heap holds now, including free memory.
    pub held: usize,
    /// The most that it ever held.
    pub peak: usize,
    /// The most that it may hold.
    pub limit: Option<usize>,
    /// How often the limit refused a slab or a block. Some of these allocations succeeded
    /// afterwards with memory that the heap had kept.
    pub refusals: usize,
    /// The part of `held` that is free objects in slabs. Objects in sheaves count as in use.
    pub free_in_slabs: usize,
    /// The part of `held` that is large blocks.
    pub large: usize,
}

/// The reason that a heap cannot be made.
///
/// ```
/// use pinfold::heaps::{Heap, HeapError};
/// use pinfold::mempolicy::Mempolicy;
///
/// let absent = Mempolicy::parse("bind:1023")?;
/// let far = Heap::builder("far").policy(&absent).build();
/// assert_eq!(far.err(), Some(HeapError::NoNodes));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeapError {
    /// All numbers that heaps and caches can have are in use. A heap needs one, and one more for
    /// each size class that it uses.
    TooMany,
    /// The system has no memory.
    NoMemory,
    /// None of the nodes that the heap's policy names has memory that this process may use.
    NoNodes,
}

impl From<CacheError> for HeapError {
    fn from(error: CacheError) -> HeapError {
        match error {
            CacheError::TooMany | CacheError::TooLarge => HeapError::TooMany,
            CacheError::NoMemory => HeapError::NoMemory,
            CacheError::NoNodes => HeapError::NoNodes,
        }
    }
}

pinfold_rseq::error_texts! { HeapError:
    HeapError::TooMany => "3,674 heaps and caches exist already: destroy some";
    HeapError::NoMemory => "the system has no memory for a new heap";
    HeapError::NoNodes => "none of the nodes of the heap's policy may be used here; see \
        Mems_allowed_list in /proc/self/status";
}
