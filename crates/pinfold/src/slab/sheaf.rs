//! Sheaves: arrays of objects ready to be handed out.
//!
//! A sheaf is a [`stack`](pinfold_rseq::stack) in a block of its own, 1 KiB large and aligned:
//!
//! ```text
//!  slot 0, 1   2 … 126-k    127-k    128-k … 127
//!  ┌────────┬─────────────┬────────┬──────────────────┐
//!  │ links  │   unused    │  null  │  k objects' room │
//!  └────────┴─────────────┴────────┴──────────────────┘
//! ```
//!
//! with k the sheaf's capacity, which stands in the highest byte of slot 1. A [`Sheaf`] is the address of the next free slot: it
//! says which block, and how many objects are in it. In a barn, slots 0 and 1 link to its neighbours.
//!
//! Who may touch a sheaf: while its word stands in a CPU's unit, only that CPU's operations; while it is in a barn, the
//! holder of the node's lock; else the one thread that took it out. Blocks are never given back to the system, so that
//! a stale word can be looked at, though not believed.

use crate::lock::Lock;
use crate::page;
use core::alloc::Layout;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU64, AtomicUsize};
use pinfold_rseq::STACK_ALIGN;

/// Slots in a block.
const SLOTS: usize = STACK_ALIGN / 8;
/// The most objects that a sheaf can hold: all slots but the links and the guard.
pub(super) const CAPACITY_MOST: usize = SLOTS - 3;

/// Where in slot 1 the capacity is; addresses of user space are lower.
const CAPACITY_SHIFT: u32 = 56;
const LINK: u64 = (1 << CAPACITY_SHIFT) - 1;

/// A sheaf, owned by the thread that has this value, as the word that stands in a unit: the next free slot's address.
#[derive(Debug)]
pub(super) struct Sheaf {
    top: *mut *mut u8,
}

/// Blocks without an owner, linked through slot 0, for every cache.
static POOL: Lock<usize> = Lock::new(0);

/// The first slot for objects in the block at `base`.
fn bottom(base: usize, capacity: usize) -> *mut *mut u8 {
    (base + STACK_ALIGN - 8 * capacity) as *mut *mut u8
}

/// Returns whether a word from a unit has nothing to pop: no sheaf, or an empty one. Another thread
/// may own the sheaf by now, and the answer may be wrong. Every caller that acts on the answer
/// compares the word again.
pub(super) fn word_is_empty(word: u64) -> bool {
    // SAFETY: a word other than 0 points behind a slot of a block, and blocks stay mapped.
    word == 0 || unsafe { &*((word - 8) as *const AtomicUsize) }.load(Relaxed) == 0
}

/// Whether a word from a unit has no room: no sheaf, or a full one.
pub(super) fn word_is_full(word: u64) -> bool {
    (word as usize).is_multiple_of(STACK_ALIGN)
}

/// Returns how many objects the sheaf of a unit's word has, or `None` if there is no sheaf. Any
/// thread may ask about any CPU's word, because the answer comes from the word and the block's
/// header.
pub(super) fn objects_in_word(word: u64) -> Option<usize> {
    // The word stands for no longer than this call.
    let sheaf = Sheaf {
        top: word as *mut *mut u8,
    };
    (word != 0).then(|| sheaf.len())
}

impl Sheaf {
    /// An empty sheaf; `None` when there is no memory, or in a signal handler that interrupted the pool.
    pub(super) fn new(capacity: usize) -> Option<Sheaf> {
        let base = pool_take().or_else(|| {
            let layout = Layout::from_size_align(STACK_ALIGN, STACK_ALIGN).ok()?;
            Some(page::alloc_meta(layout)?.as_ptr() as usize)
        })?;
        let mut sheaf = Sheaf {
            top: bottom(base, capacity),
        };
        sheaf.resize(capacity);
        Some(sheaf)
    }

    /// Makes the empty sheaf one of `capacity` objects.
    pub(super) fn resize(&mut self, capacity: usize) {
        self.header()
            .store((capacity as u64) << CAPACITY_SHIFT, Relaxed);
        self.top = bottom(self.base(), capacity);
        // SAFETY: the slot below the bottom is in the block, which is ours.
        unsafe { *self.top.sub(1) = core::ptr::null_mut() };
    }

    /// The sheaf that a unit's word stands for; `None` for 0.
    ///
    /// # Safety
    ///
    /// The caller has just taken the word out of its unit, and with it the sheaf.
    pub(super) unsafe fn from_word(word: u64) -> Option<Sheaf> {
        (word != 0).then_some(Sheaf {
            top: word as *mut *mut u8,
        })
    }

    /// The word to put into a unit; the sheaf is the unit's once that has happened.
    pub(super) fn word(&self) -> u64 {
        self.top as u64
    }

    fn base(&self) -> usize {
        (self.top as usize - 8) & !(STACK_ALIGN - 1)
    }

    /// How many objects it holds at most.
    fn capacity(&self) -> usize {
        (self.header().load(Relaxed) >> CAPACITY_SHIFT) as usize
    }

    fn bottom(&self) -> *mut *mut u8 {
        bottom(self.base(), self.capacity())
    }

    pub(super) fn len(&self) -> usize {
        // Saturating: for a stale word, as `info` reads it, the top can lie below the bottom.
        (self.top as usize).saturating_sub(self.bottom() as usize) / 8
    }

    pub(super) fn is_empty(&self) -> bool {
        word_is_empty(self.word())
    }

    pub(super) fn is_full(&self) -> bool {
        word_is_full(self.word())
    }

    /// The objects, lowest slot first.
    pub(super) fn objects(&mut self) -> &mut [*mut u8] {
        // SAFETY: the slots from the bottom to the top hold objects, and the sheaf is ours.
        unsafe { core::slice::from_raw_parts_mut(self.bottom(), self.len()) }
    }

    /// All the room, used or not; for filling it from the end. Follow with [`set_len`](Self::set_len).
    pub(super) fn slots(&mut self) -> &mut [*mut u8] {
        // SAFETY: the block has as many slots there, initialised since the block's memory was zeroed.
        unsafe { core::slice::from_raw_parts_mut(self.bottom(), self.capacity()) }
    }

    pub(super) fn set_len(&mut self, length: usize) {
        self.top = self.bottom().wrapping_add(length);
    }

    pub(super) fn pop(&mut self) -> *mut u8 {
        // SAFETY: there is a slot below the top, at least the guard.
        let object = unsafe { *self.top.sub(1) };
        if !object.is_null() {
            self.top = self.top.wrapping_sub(1);
        }
        object
    }

    pub(super) fn push(&mut self, object: *mut u8) {
        debug_assert!(!self.is_full());
        // SAFETY: a sheaf that is not full has a free slot at its top.
        unsafe { *self.top = object };
        self.top = self.top.wrapping_add(1);
    }

    /// The block's link to the sheaf below it in a list, or to the next block of the pool.
    pub(super) fn below(&self) -> *mut u64 {
        self.base() as *mut u64
    }

    /// Slot 1: the capacity, and in a list the link to the sheaf above.
    fn header(&self) -> &AtomicU64 {
        // SAFETY: blocks stay mapped, and all accesses to this slot are atomic.
        unsafe { &*(self.base() as *const AtomicU64).add(1) }
    }

    /// The word of the sheaf above it in a list.
    fn above(&self) -> u64 {
        self.header().load(Relaxed) & LINK
    }

    fn link_above(&self, word: u64) {
        let capacity = self.header().load(Relaxed) & !LINK;
        self.header().store(capacity | word, Relaxed);
    }

    /// Gives the block back to the pool; the sheaf is empty.
    pub(super) fn discard(self) {
        match POOL.lock_or_divert(page::is_lock_held) {
            Some(mut pool) => {
                // SAFETY: slot 0 is the block's link.
                unsafe { *self.below() = *pool as u64 };
                *pool = self.base();
            }
            None => self.set_aside(),
        }
    }

    /// Puts the block on the list of those whose thread could not have the pool.
    #[cold]
    fn set_aside(self) {
        let mut next = ASIDE.load(Relaxed);
        loop {
            // SAFETY: slot 0 is the block's link.
            unsafe { *self.below() = next as u64 };
            // Release pairs with the acquire in `pool_take`: the link is seen.
            match ASIDE.compare_exchange_weak(next, self.base(), Release, Relaxed) {
                Ok(_) => return,
                Err(other) => next = other,
            }
        }
    }
}

/// Blocks that were given back while the pool could not be had. The next thread that finds the pool
/// empty takes them all.
static ASIDE: AtomicUsize = AtomicUsize::new(0);

/// Takes a block out of the pool. Waits until a fork is over: malloc comes here with its node's
/// lock held only, and then no fork has the pool.
fn pool_take() -> Option<usize> {
    let mut pool = POOL.lock_unless(page::is_lock_held)?;
    if *pool == 0 {
        // Acquire pairs with the release in `set_aside`.
        *pool = ASIDE.swap(0, Acquire);
    }
    let base = *pool;
    if base == 0 {
        return None;
    }
    // SAFETY: blocks in the pool have the next one's address in slot 0.
    *pool = unsafe { *(base as *const u64) } as usize;
    Some(base)
}

/// A pile of sheaves: put on and taken off the top, and taken from under the bottom.
#[derive(Debug, Default)]
pub(super) struct SheafList {
    top: u64,
    bottom: u64,
    pub(super) length: usize,
}

impl SheafList {
    pub(super) const fn new() -> Self {
        SheafList {
            top: 0,
            bottom: 0,
            length: 0,
        }
    }

    /// Objects in all of them. Reads a link of each.
    pub(super) fn objects(&self) -> usize {
        let (mut word, mut objects) = (self.top, 0);
        while let Some(length) = objects_in_word(word) {
            objects += length;
            let sheaf = Sheaf {
                top: word as *mut *mut u8,
            };
            // SAFETY: slot 0 links the sheaves of the list, which are the caller's.
            word = unsafe { *sheaf.below() };
        }
        objects
    }

    pub(super) fn put(&mut self, sheaf: Sheaf) {
        // SAFETY: slots 0 and 1 are the block's links; sheaves in the list and this one are the caller's.
        unsafe {
            *sheaf.below() = self.top;
            sheaf.link_above(0);
            match Sheaf::from_word(self.top) {
                Some(old) => old.link_above(sheaf.word()),
                None => self.bottom = sheaf.word(),
            }
        }
        self.top = sheaf.word();
        self.length += 1;
    }

    /// Takes the sheaf that was put last.
    pub(super) fn take(&mut self) -> Option<Sheaf> {
        // SAFETY: as in `put`; the sheaf is taken out here.
        let sheaf = unsafe { Sheaf::from_word(self.top) }?;
        // SAFETY: as in `put`.
        unsafe {
            self.top = *sheaf.below();
            match Sheaf::from_word(self.top) {
                Some(next) => next.link_above(0),
                None => self.bottom = 0,
            }
        }
        self.length -= 1;
        Some(sheaf)
    }

    /// Takes the sheaf that has been in the list the longest.
    pub(super) fn take_oldest(&mut self) -> Option<Sheaf> {
        // SAFETY: as in `take`.
        let sheaf = unsafe { Sheaf::from_word(self.bottom) }?;
        // SAFETY: as in `put`.
        unsafe {
            self.bottom = sheaf.above();
            match Sheaf::from_word(self.bottom) {
                Some(next) => *next.below() = 0,
                None => self.top = 0,
            }
        }
        self.length -= 1;
        Some(sheaf)
    }
}

pub(super) fn is_lock_held(thread: u64) -> bool {
    POOL.is_held_by(thread)
}

pub(super) fn lock_for_fork() {
    POOL.lock_for_fork();
}

pub(super) fn unlock_after_fork() {
    POOL.unlock_after_fork();
}
