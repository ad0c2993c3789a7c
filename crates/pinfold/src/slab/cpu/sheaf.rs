//! Sheaves: arrays of pointers to free objects, which CPUs and barns exchange.
//!
//! A sheaf is a [`stack`](pinfold_rseq::stack) in a block of 1 KiB, aligned to 1 KiB:
//!
//! ```text
//!  slot 0, 1   2 … 126-k    127-k    128-k … 127
//!  ┌────────┬─────────────┬────────┬──────────────────┐
//!  │ links  │   unused    │  null  │  k objects' room │
//!  └────────┴─────────────┴────────┴──────────────────┘
//! ```
//!
//! k is the sheaf's capacity. The highest byte of slot 1 holds it. The address of the next free
//! slot, the *top*, names both the block and the number of objects in it. That address is the
//! sheaf's *word*: a CPU's unit holds it, and so does a [`Sheaf`]. In a barn, slots 0 and 1 link
//! the sheaf to its neighbours.
//!
//! # Who may touch a sheaf
//!
//! | the sheaf is | only this may touch it |
//! |---|---|
//! | in a CPU's unit | operations on that CPU |
//! | in a barn | the holder of the part's lock |
//! | in hand | the thread that took it out |
//!
//! A thread may read a word from a unit, and read the sheaf after another thread took it. So blocks
//! never go back to the system: a stale word leads to readable memory. What the thread reads there
//! may be wrong. So it compares the unit's word again, in one operation, before it acts.

use crate::arena;
use crate::lock::{Llist, Lock, Rank, Word};
use core::alloc::Layout;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::STACK_ALIGN;

/// The lowest bit of the capacity in slot 1. In addresses of user space, this bit and the higher
/// ones are zero, so a link and the capacity can share the slot.
const CAPACITY_SHIFT: u32 = 56;
const LINK: u64 = (1 << CAPACITY_SHIFT) - 1;

/// A sheaf that belongs to the thread that has this value. Holds the sheaf's word.
#[derive(Debug)]
pub(crate) struct Sheaf {
    top: *mut *mut u8,
}

/// Unused blocks of all caches, linked through slot 0.
static POOL: Lock<u64> = Lock::new(Rank::Sheaves, 0);

/// Returns the first slot for objects in the block at `base`.
fn bottom(base: usize, capacity: usize) -> *mut *mut u8 {
    (base + STACK_ALIGN - 8 * capacity) as *mut *mut u8
}

/// Returns whether a word from a unit has nothing to pop: it is no sheaf, or an empty one. The
/// answer may be wrong if another thread has taken the sheaf since the word was loaded. So a caller
/// compares the unit's word with this one again before it acts on the answer.
pub(crate) fn word_is_empty(word: u64) -> bool {
    objects_in_word(word).unwrap_or(0) == 0
}

/// Returns whether a word from a unit has no room for a push: it is no sheaf, or a full one.
pub(crate) fn word_is_full(word: u64) -> bool {
    (word as usize).is_multiple_of(STACK_ALIGN)
}

/// Returns how many objects the sheaf of a unit's word has, or `None` if the word is 0. Any thread
/// may ask about any CPU's word, because the answer comes from the word and from slot 1 of the
/// block, which stays mapped.
pub(crate) fn objects_in_word(word: u64) -> Option<usize> {
    // This value does not own the sheaf. Only `len` uses it.
    let sheaf = Sheaf {
        top: word as *mut *mut u8,
    };
    (word != 0).then(|| sheaf.len())
}

impl Sheaf {
    /// Makes an empty sheaf. Returns `None` if there is no memory. May return `None` in a signal
    /// handler that may not wait for a lock of the allocator.
    pub(crate) fn new(capacity: usize) -> Option<Sheaf> {
        let base = pool_take().or_else(|| {
            let layout = Layout::from_size_align(STACK_ALIGN, STACK_ALIGN).ok()?;
            Some(arena::alloc_metadata(layout)?.as_ptr() as usize)
        })?;
        let mut sheaf = Sheaf {
            top: bottom(base, capacity),
        };
        sheaf.resize(capacity);
        Some(sheaf)
    }

    /// Sets the capacity of an empty sheaf.
    pub(crate) fn resize(&mut self, capacity: usize) {
        self.header()
            .store((capacity as u64) << CAPACITY_SHIFT, Relaxed);
        self.top = bottom(self.base(), capacity);
        // SAFETY: a capacity is at most `MAX_CAPACITY`, so the slot below the bottom is in the
        // block. This value owns the block.
        unsafe { *self.top.sub(1) = core::ptr::null_mut() };
    }

    /// Returns the sheaf of a word, or `None` if the word is 0.
    ///
    /// # Safety
    ///
    /// The caller has removed the word from its unit or list, so that no other thread can take the
    /// sheaf.
    pub(crate) unsafe fn from_word(word: u64) -> Option<Sheaf> {
        (word != 0).then_some(Sheaf {
            top: word as *mut *mut u8,
        })
    }

    /// Returns the sheaf's word. Once a thread stores it into a unit, the sheaf belongs to the
    /// unit.
    pub(crate) fn word(&self) -> u64 {
        self.top as u64
    }

    fn base(&self) -> usize {
        (self.top as usize - 8) & !(STACK_ALIGN - 1)
    }

    /// Returns how many objects the sheaf can hold.
    fn capacity(&self) -> usize {
        (self.header().load(Relaxed) >> CAPACITY_SHIFT) as usize
    }

    fn bottom(&self) -> *mut *mut u8 {
        bottom(self.base(), self.capacity())
    }

    pub(crate) fn len(&self) -> usize {
        // Saturates, because `info` reads stale words. If the block has a smaller capacity by then,
        // a stale top may lie below the bottom.
        (self.top as usize).saturating_sub(self.bottom() as usize) / 8
    }

    pub(crate) fn is_empty(&self) -> bool {
        word_is_empty(self.word())
    }

    pub(crate) fn is_full(&self) -> bool {
        word_is_full(self.word())
    }

    /// Returns the objects, lowest slot first.
    pub(crate) fn objects(&mut self) -> &mut [*mut u8] {
        // SAFETY: the slots from the bottom to the top hold objects, and this value owns the sheaf.
        unsafe { core::slice::from_raw_parts_mut(self.bottom(), self.len()) }
    }

    /// Returns all slots for objects, used or not. A caller that fills them then calls
    /// [`set_len`](Self::set_len).
    pub(crate) fn slots(&mut self) -> &mut [*mut u8] {
        // SAFETY: the block has `capacity` slots from the bottom on. They are initialised, because
        // the block's memory was zeroed.
        unsafe { core::slice::from_raw_parts_mut(self.bottom(), self.capacity()) }
    }

    pub(crate) fn set_len(&mut self, length: usize) {
        debug_assert!(length <= self.capacity());
        self.top = self.bottom().wrapping_add(length);
    }

    pub(crate) fn pop(&mut self) -> *mut u8 {
        // SAFETY: the slot below the top is an object's, or the null below the bottom. This value
        // owns the block.
        let object = unsafe { *self.top.sub(1) };
        if !object.is_null() {
            self.top = self.top.wrapping_sub(1);
        }
        object
    }

    /// Puts an object on the sheaf.
    ///
    /// # Safety
    ///
    /// The sheaf is not [full](Self::is_full).
    pub(crate) unsafe fn push(&mut self, object: *mut u8) {
        debug_assert!(!self.is_full());
        // SAFETY: the caller promises that the sheaf has room, so the slot at the top is in the
        // block. This value owns the block.
        unsafe { *self.top = object };
        self.top = self.top.wrapping_add(1);
    }

    /// Returns the address of slot 0: the link to the sheaf below in a list, or to the next block
    /// in the pool.
    pub(crate) fn below(&self) -> *mut u64 {
        self.base() as *mut u64
    }

    /// Returns slot 1: the capacity, and in a list the link to the sheaf above.
    fn header(&self) -> &AtomicU64 {
        // SAFETY: slot 1 lies in the sheaf's block, blocks stay mapped, and every access to slot 1
        // is atomic.
        unsafe { &*(self.base() as *const AtomicU64).add(1) }
    }

    /// Returns the word of the sheaf above this one in a list.
    fn above(&self) -> u64 {
        self.header().load(Relaxed) & LINK
    }

    fn link_above(&self, word: u64) {
        let capacity = self.header().load(Relaxed) & !LINK;
        self.header().store(capacity | word, Relaxed);
    }

    /// Gives the block of an empty sheaf back to the pool.
    pub(crate) fn discard(self) {
        match POOL.lock_or_divert() {
            Some(mut pool) => {
                // SAFETY: this value owns the block, and slot 0 is for links.
                unsafe { *self.below() = *pool };
                *pool = self.base() as u64;
            }
            // SAFETY: this value owns the block, and slot 0 is for links.
            None => ASIDE.add(self.base() as u64, |next| unsafe { *self.below() = next }),
        }
    }
}

/// Blocks that were given back while the pool's lock could not be taken, linked through slot 0 as
/// those in the pool. The next thread that finds the pool empty makes them the pool.
static ASIDE: Llist = Llist::new(AtomicU64::new(0));

/// Takes a block out of the pool. Waits while a fork holds the pool's lock. A thread in malloc
/// holds its node's lock here. So it meets no fork but one whose handler interrupted a holder of
/// the pool's lock, and does not wait for that one.
fn pool_take() -> Option<usize> {
    let mut pool = POOL.lock_or_divert_inside()?;
    if *pool == 0 {
        *pool = ASIDE.del_all();
    }
    let base = *pool;
    if base == 0 {
        return None;
    }
    // SAFETY: the pool's lock is held, and slot 0 of a block in the pool holds the next block's
    // address.
    *pool = unsafe { *(base as *const u64) };
    Some(base as usize)
}

/// A list of sheaves, linked in both directions through their blocks. `put` adds a sheaf at the
/// top. `take` removes one from the top, and `take_oldest` from the bottom.
#[derive(Debug, Default)]
pub(crate) struct SheafList {
    top: u64,
    bottom: u64,
    pub(crate) length: usize,
}

impl SheafList {
    pub(crate) const fn new() -> Self {
        SheafList {
            top: 0,
            bottom: 0,
            length: 0,
        }
    }

    /// Returns how many objects are in all sheaves of the list. Reads a link of each sheaf.
    pub(crate) fn objects(&self) -> usize {
        let (mut word, mut objects) = (self.top, 0);
        while let Some(length) = objects_in_word(word) {
            objects += length;
            let sheaf = Sheaf {
                top: word as *mut *mut u8,
            };
            // SAFETY: the list owns its sheaves. Slot 0 of a sheaf's block is the link to the sheaf
            // below.
            word = unsafe { *sheaf.below() };
        }
        objects
    }

    pub(crate) fn put(&mut self, sheaf: Sheaf) {
        debug_assert_ne!(sheaf.word(), self.top);
        debug_assert_eq!(self.length == 0, self.top == 0);
        // SAFETY: the list owns its sheaves, and the caller passes ownership of `sheaf`. Slots 0
        // and 1 of a block are for links.
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
    pub(crate) fn take(&mut self) -> Option<Sheaf> {
        // SAFETY: the list owns the sheaf at its top, and this function removes that sheaf's word
        // from the list.
        let sheaf = unsafe { Sheaf::from_word(self.top) }?;
        // SAFETY: the list owns its sheaves. Slots 0 and 1 of a block are for links.
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
    pub(crate) fn take_oldest(&mut self) -> Option<Sheaf> {
        // SAFETY: the list owns the sheaf at its bottom, and this function removes that sheaf's
        // word from the list.
        let sheaf = unsafe { Sheaf::from_word(self.bottom) }?;
        // SAFETY: the list owns its sheaves. Slots 0 and 1 of a block are for links.
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

/// Returns the word of the pool's lock, for a fork.
pub(crate) fn lock_word() -> &'static Word {
    POOL.word()
}
