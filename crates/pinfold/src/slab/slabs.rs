//! Slabs: runs of granules cut into objects, and a node's lists of them.
//!
//! # States of a slab
//!
//! | state | free objects | list |
//! |---|---|---|
//! | full | 0 | none: only its objects know it |
//! | partial | 1 … n−1 | partial list |
//! | empty | n | partial list, at its end; beyond [`EMPTY_MOST`] the run goes back to the arena |
//!
//! "Free" means not in anybody's hands and in no sheaf. Each slab has a bit per object, set while the object is free,
//! in its frame: the objects themselves are neither read nor written. All under the node's lock.
//!
//! Invariant: `free` = the number of set bits.

use super::cache::Cache;
use crate::page::{self, GRANULE};
use crate::sys::die;
use core::ptr::NonNull;

/// Objects in a slab at most: what the frame has bits for.
pub(super) const OBJECTS_MOST: usize = 4096;
/// Empty slabs that a node keeps for a cache.
const EMPTY_MOST: usize = 2;
/// No slab.
const NIL: u32 = u32::MAX;

/// A slab, in the private part of its run's first frame.
#[repr(C)]
pub(super) struct Slab {
    start: *mut u8,
    pub(super) cache: *const Cache,
    prev: u32,
    next: u32,
    free: u32,
    /// All words below this one have no bit set.
    hint: u32,
    bits: [u64; OBJECTS_MOST / 64],
}

const _: () = assert!(size_of::<Slab>() <= page::PRIVATE);

/// A node's slabs that have free objects.
pub(super) struct Slabs {
    first: u32,
    last: u32,
    /// Empty slabs in the list.
    empty: usize,
    /// Slabs in all: full, partial and empty.
    pub(super) count: usize,
}

/// The slab whose frame is `index`.
///
/// # Safety
///
/// The frame is of a slab of a cache whose node's lock the caller holds, for as long as the reference lives.
unsafe fn slab<'s>(index: u32) -> &'s mut Slab {
    // SAFETY: the caller's promise; the private part is large and aligned enough.
    unsafe { &mut *page::private_at(index).cast() }
}

/// The slab that `object` lies in.
///
/// # Safety
///
/// `object` lies in a slab.
pub(super) unsafe fn slab_of(object: *mut u8) -> *mut Slab {
    page::private_at(page::head_of(object as usize)).cast()
}

impl Slabs {
    pub(super) const fn new() -> Self {
        Slabs {
            first: NIL,
            last: NIL,
            empty: 0,
            count: 0,
        }
    }

    /// Fills `slots` from its end with objects, lowest address last, so that a sheaf hands them out in the order of
    /// their addresses. Returns how many; fewer than asked for only when the system has no more memory.
    ///
    /// Costs a few instructions an object; a new slab costs an arena call.
    pub(super) fn take(&mut self, cache: &Cache, node: usize, slots: &mut [*mut u8]) -> usize {
        let mut left = slots.len();
        while left > 0 {
            if self.first == NIL && !self.add_slab(cache, node) {
                break;
            }
            let index = self.first;
            // SAFETY: a slab of the list; the caller holds the lock.
            let slab = unsafe { slab(index) };
            if slab.free as usize == cache.per_slab {
                self.empty -= 1;
            }
            let taken = slab.take(cache.size, &mut slots[..left]);
            left -= taken;
            if slab.free == 0 {
                self.unlink(index);
            }
        }
        slots.len() - left
    }

    /// Gives objects back to their slabs, all of them of this node.
    ///
    /// # Safety
    ///
    /// The objects are free and the caller's; they may be anything that calls itself an object of `cache`: an address
    /// that cannot be one, or is free already, ends the process.
    pub(super) unsafe fn give(&mut self, cache: &Cache, objects: &[*mut u8]) {
        let mut left = objects;
        while let Some(&object) = left.first() {
            let index = cache.run_of(object);
            // SAFETY: the run is a slab of this cache and node; the caller holds the lock.
            let slab = unsafe { slab(index) };
            let before = slab.free;
            left = &left[slab.put(cache, left)..];
            if before == 0 {
                self.link_first(index);
            }
            if slab.free as usize == cache.per_slab {
                self.unlink(index);
                self.retire(cache, index);
            }
        }
    }

    /// A slab has become empty: keep it for later, at the end of the list, or give its run back.
    fn retire(&mut self, cache: &Cache, index: u32) {
        if self.empty < EMPTY_MOST {
            self.empty += 1;
            self.link_last(index);
        } else {
            self.release(cache, index);
        }
    }

    fn release(&mut self, cache: &Cache, index: u32) {
        // SAFETY: the slab is in no list and all its objects are free.
        let start = unsafe { slab(index) }.start;
        self.count -= 1;
        super::cache::count(&cache.row().slab_free, 1);
        if let Some(start) = NonNull::new(start) {
            // SAFETY: as above: nobody uses the run.
            unsafe { page::free_run(start) };
        }
    }

    /// Gives the runs of all empty slabs back; returns how many.
    pub(super) fn shrink(&mut self, cache: &Cache) -> usize {
        let (mut index, mut released) = (self.first, 0);
        while index != NIL {
            // SAFETY: a slab of the list; the caller holds the lock.
            let slab = unsafe { slab(index) };
            let (this, free) = (index, slab.free as usize);
            index = slab.next;
            if free == cache.per_slab {
                self.unlink(this);
                self.empty -= 1;
                self.release(cache, this);
                released += 1;
            }
        }
        released
    }

    /// Objects that are not free in slabs of the list. Full slabs count with all their objects.
    pub(super) fn in_use(&self, cache: &Cache) -> usize {
        let (mut index, mut listed, mut used) = (self.first, 0, 0);
        while index != NIL {
            // SAFETY: a slab of the list; the caller holds the lock.
            let slab = unsafe { slab(index) };
            listed += 1;
            used += cache.per_slab - slab.free as usize;
            index = slab.next;
        }
        used + (self.count - listed) * cache.per_slab
    }

    /// Checks the invariants of every slab in the list; says what is wrong, and at which slab.
    pub(super) fn validate(&self, cache: &Cache) -> Result<(), (&'static str, *const u8)> {
        let (mut index, mut before, mut empty) = (self.first, NIL, 0);
        while index != NIL {
            // SAFETY: a slab of the list; the caller holds the lock.
            let slab = unsafe { slab(index) };
            let start = slab.start.cast_const();
            let bits: u32 = slab.bits[..cache.per_slab.div_ceil(64)]
                .iter()
                .map(|word| word.count_ones())
                .sum();
            if !core::ptr::eq(slab.cache, cache) {
                return Err(("slab of another cache in the list", start));
            }
            if bits != slab.free || bits == 0 {
                return Err(("count of free objects is wrong", start));
            }
            if slab.prev != before {
                return Err(("partial list is broken", start));
            }
            if slab.bits[..slab.hint as usize]
                .iter()
                .any(|&word| word != 0)
            {
                return Err(("free object below the hint", start));
            }
            empty += usize::from(bits as usize == cache.per_slab);
            (before, index) = (index, slab.next);
        }
        if empty != self.empty || before != self.last {
            return Err(("partial list is broken", core::ptr::null()));
        }
        Ok(())
    }

    /// Makes a slab; it is the first of the list then.
    fn add_slab(&mut self, cache: &Cache, node: usize) -> bool {
        let Some(run) = page::alloc_run(cache.granules, node, cache.slot, true, cache.class())
        else {
            return false;
        };
        let index = page::index_of_run(run.start);
        let objects = cache.per_slab;
        // SAFETY: the run is ours and its frame's private part with it.
        let slab = unsafe { slab(index) };
        slab.start = run.start.as_ptr();
        slab.cache = cache;
        slab.free = objects as u32;
        slab.hint = 0;
        // Only the words that the objects need: the frame's other cache lines stay cold.
        slab.bits[..objects / 64].fill(u64::MAX);
        if !objects.is_multiple_of(64) {
            slab.bits[objects / 64] = (1 << (objects % 64)) - 1;
        }
        if let Some(constructor) = cache.constructor {
            for nth in 0..objects {
                // SAFETY: the object lies in the new slab and is nobody's.
                unsafe { constructor(slab.start.add(nth * cache.size)) };
            }
        }
        self.count += 1;
        self.empty += 1;
        super::cache::count(&cache.row().slab_alloc, 1);
        self.link_first(index);
        true
    }

    fn link_first(&mut self, index: u32) {
        let next = self.first;
        // SAFETY: here and below: slabs of this node; the caller holds the lock.
        unsafe {
            (slab(index).prev, slab(index).next) = (NIL, next);
            if next == NIL {
                self.last = index;
            } else {
                slab(next).prev = index;
            }
        }
        self.first = index;
    }

    fn link_last(&mut self, index: u32) {
        let prev = self.last;
        // SAFETY: as in `link_first`.
        unsafe {
            (slab(index).prev, slab(index).next) = (prev, NIL);
            if prev == NIL {
                self.first = index;
            } else {
                slab(prev).next = index;
            }
        }
        self.last = index;
    }

    fn unlink(&mut self, index: u32) {
        // SAFETY: as in `link_first`.
        let (prev, next) = unsafe { (slab(index).prev, slab(index).next) };
        // SAFETY: as in `link_first`.
        unsafe {
            if prev == NIL {
                self.first = next;
            } else {
                slab(prev).next = next;
            }
            if next == NIL {
                self.last = prev;
            } else {
                slab(next).prev = prev;
            }
        }
    }
}

impl Slab {
    /// Takes free objects, lowest address first, into `slots` from its end; returns how many.
    fn take(&mut self, size: usize, slots: &mut [*mut u8]) -> usize {
        let wanted = slots.len().min(self.free as usize);
        let mut place = slots.len();
        let mut word = self.hint as usize;
        let last = slots.len() - wanted;
        while place > last {
            let mut bits = self.bits[word];
            let base = self.start.wrapping_add(word * 64 * size);
            if bits == u64::MAX && place - last >= 64 {
                // The whole word: no bits to look for.
                for (nth, slot) in slots[place - 64..place].iter_mut().rev().enumerate() {
                    *slot = base.wrapping_add(nth * size);
                }
                place -= 64;
                bits = 0;
            }
            while bits != 0 && place > last {
                place -= 1;
                slots[place] = base.wrapping_add(bits.trailing_zeros() as usize * size);
                bits &= bits - 1;
            }
            self.bits[word] = bits;
            word += usize::from(bits == 0);
        }
        self.hint = word as u32;
        self.free -= wanted as u32;
        wanted
    }

    /// Sets the bits of the first of `objects`, and of those after it that share its word of bits; returns how many.
    ///
    /// Objects that were allocated together are often freed together, so that a word is written once for many.
    fn put(&mut self, cache: &Cache, objects: &[*mut u8]) -> usize {
        let start = self.start as usize;
        let word = cache.nth(objects[0] as usize - start) / 64;
        let (mut mask, mut count) = (0u64, 0);
        for &object in objects {
            let offset = (object as usize).wrapping_sub(start);
            if offset >= cache.slab_bytes {
                break;
            }
            let nth = cache.nth(offset);
            if nth / 64 != word {
                break;
            }
            if nth * cache.size != offset {
                not_an_object(cache, object);
            }
            mask |= 1 << (nth % 64);
            count += 1;
        }
        if count == 0 {
            not_an_object(cache, objects[0]);
        }
        if self.bits[word] & mask != 0 || mask.count_ones() as usize != count {
            self.double_free(cache, &objects[..count]);
        }
        self.bits[word] |= mask;
        self.hint = self.hint.min(word as u32);
        self.free += count as u32;
        count
    }

    /// Some of `objects` is free already, or there twice: ends the process.
    #[cold]
    fn double_free(&self, cache: &Cache, objects: &[*mut u8]) -> ! {
        let free = objects.iter().find(|&&object| self.is_free(cache, object));
        let twice = || {
            let mut earlier = objects.iter().enumerate();
            earlier.find_map(|(at, object)| objects[..at].contains(object).then_some(object))
        };
        let object = free.or_else(twice).copied().unwrap_or_default();
        die(format_args!(
            "double free of {object:p}, object of cache {}",
            cache.name()
        ))
    }

    /// Whether the object at `offset` is free; for consistency checks.
    pub(super) fn is_free(&self, cache: &Cache, object: *mut u8) -> bool {
        let nth = cache.nth(object as usize - self.start as usize);
        self.bits
            .get(nth / 64)
            .is_some_and(|word| word >> (nth % 64) & 1 == 1)
    }
}

#[cold]
fn not_an_object(cache: &Cache, object: *mut u8) -> ! {
    die(format_args!(
        "free of {object:p}: not the start of an object of cache {}",
        cache.name()
    ))
}

const _: () = assert!(OBJECTS_MOST * 8 <= GRANULE);
