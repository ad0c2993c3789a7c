//! A bundle: any number of objects that one owner holds. Their pointers lie in sheaves.
//!
//! ```text
//!  full: sheaves of MAX_CAPACITY objects      open: one of fewer      room: empty blocks
//! ```
//!
//! Invariants:
//!
//! 1. `len` is [`MAX_CAPACITY`] × the sheaves in `full`, plus the objects in `open`.
//! 2. The open sheaf has at least one object and room for at least one.
//!
//! Once there is [room](Bundle::make_room) for n objects, pushing and popping up to n objects
//! allocates nothing and takes no lock. It only moves blocks between `full`, `open` and `room`. A
//! bundle owns its blocks. Their capacity is always [`MAX_CAPACITY`], whatever the cache's capacity
//! is.

use super::tune::MAX_CAPACITY;
use crate::fork;
use crate::slab::KmemCache;
use crate::slab::cpu::sheaf::{Sheaf, SheafList};
use core::ptr::NonNull;

pub(crate) struct Bundle {
    full: SheafList,
    open: Option<Sheaf>,
    room: SheafList,
    len: usize,
}

// SAFETY: a bundle owns its blocks and the objects in them, whichever thread it is in.
unsafe impl Send for Bundle {}

impl Bundle {
    pub(crate) const fn new() -> Bundle {
        Bundle {
            full: SheafList::new(),
            open: None,
            room: SheafList::new(),
            len: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Makes room for `n` objects in total. Returns false if there is no memory for the blocks.
    pub(crate) fn make_room(&mut self, n: usize) -> bool {
        let wanted = n.div_ceil(MAX_CAPACITY);
        let open = usize::from(self.open.is_some());
        while self.full.length + open + self.room.length < wanted {
            let Some(block) = fork::retry(|| Sheaf::new(MAX_CAPACITY)) else {
                return false;
            };
            self.room.put(block);
        }
        true
    }

    /// Adds an object. Returns the object if there is no room.
    pub(crate) fn push(&mut self, object: NonNull<u8>) -> Result<(), NonNull<u8>> {
        let Some(mut sheaf) = self.open.take().or_else(|| self.room.take()) else {
            return Err(object);
        };
        // SAFETY: `open` has room, and the sheaves of `room` are empty.
        unsafe { sheaf.push(object.as_ptr()) };
        self.keep(sheaf);
        self.len += 1;
        Ok(())
    }

    /// Removes and returns the object that was added last. Costs a few instructions, mostly on the
    /// open sheaf's last cache line.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<NonNull<u8>> {
        let mut sheaf = self.open.take().or_else(|| self.full.take())?;
        let object = NonNull::new(sheaf.pop())?;
        self.keep(sheaf);
        self.len -= 1;
        Some(object)
    }

    /// Puts a sheaf into `room`, `full` or `open`, by its number of objects.
    fn keep(&mut self, sheaf: Sheaf) {
        if sheaf.is_empty() {
            self.room.put(sheaf);
        } else if sheaf.is_full() {
            self.full.put(sheaf);
        } else {
            self.open = Some(sheaf);
        }
    }

    /// Allocates objects from `cache` until the bundle has `n`. Returns false if the system has no
    /// memory for all of them. The objects that it could allocate stay in the bundle.
    pub(crate) fn fill(&mut self, cache: &KmemCache, n: usize) -> bool {
        if !self.make_room(n) {
            return false;
        }
        while self.len < n {
            let Some(mut sheaf) = self.open.take().or_else(|| self.room.take()) else {
                return false;
            };
            let held = sheaf.len();
            let most = MAX_CAPACITY.min(held + n - self.len);
            let slots = &mut sheaf.slots()[held..most];
            let wanted = slots.len();
            let got = cache.alloc_bulk(slots);
            sheaf.set_len(held + got);
            self.keep(sheaf);
            self.len += got;
            if got < wanted {
                return false;
            }
        }
        true
    }

    /// Frees the objects to `cache`, and gives the blocks to the pool of blocks (`sheaf`).
    ///
    /// # Safety
    ///
    /// The objects came from `cache`, and no thread uses them.
    pub(crate) unsafe fn give_back(&mut self, cache: &KmemCache) {
        while let Some(mut sheaf) = self.open.take().or_else(|| self.full.take()) {
            // SAFETY: the caller promises that the objects are the cache's and unused.
            unsafe { cache.free_bulk(sheaf.objects()) };
            sheaf.set_len(0);
            sheaf.discard();
        }
        self.len = 0;
        while let Some(sheaf) = self.room.take() {
            sheaf.discard();
        }
    }
}
