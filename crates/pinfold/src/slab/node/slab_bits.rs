//! The objects of one slab: a bit for each, set while the object is free.

use super::objects::Objects;
use super::slabs::{Slab, slab_of};
use core::sync::atomic::Ordering::Relaxed;

/// The bytes of a cache line.
const LINE: usize = 64;

/// Returns log2 of the distance, in objects of `size` bytes, at which a fresh slab hands out
/// objects one after the other. At that distance, two objects share no cache line.
///
/// Two threads that run on one CPU in turn may get two objects that were handed out one after the
/// other. If these objects shared a line, each thread's writes would slow the other thread down
/// when they later run on different CPUs.
fn lines_apart(size: usize) -> u32 {
    let is_far =
        |&shift: &u32| (size << shift).is_multiple_of(LINE) || ((1 << shift) - 1) * size >= LINE;
    (0..6).find(is_far).unwrap_or(0)
}

/// The reason that an address cannot be freed to a cache.
pub(crate) enum Wrong {
    /// No slab of the cache contains the address.
    Foreign(*mut u8),
    /// The address lies in a slab of the cache, but no object begins there.
    NotAnObject(*mut u8),
    /// The object is free already, or occurs twice among the objects that are given back.
    FreeTwice(*mut u8),
}

impl Slab {
    /// Returns where the first object's slot begins.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.load(Relaxed)
    }

    /// Returns whether the only object of a slab reads as zeroes, because no caller had the object
    /// before. Returns true to the first caller only.
    ///
    /// # Safety
    ///
    /// The caller holds `object`, which is the only one of its slab.
    pub(crate) unsafe fn take_fresh(object: *mut u8) -> bool {
        // SAFETY: the slab stays as long as its object is in use.
        let fresh = unsafe { &slab_of(object).fresh };
        // A load and a store suffice, because only the thread that holds the object accesses the
        // word.
        fresh.load(Relaxed) && {
            fresh.store(false, Relaxed);
            true
        }
    }

    /// Takes free objects into `slots`, from its end. Takes the objects of the lowest word of bits
    /// first. Returns how many objects it took.
    pub(crate) fn take(&self, size: usize, slots: &mut [*mut u8]) -> usize {
        let wanted = slots.len().min(self.free.get() as usize);
        debug_assert!(wanted > 0);
        let mut at = slots.len();
        let mut word = self.hint.get() as usize;
        let last = slots.len() - wanted;
        let shift = lines_apart(size);
        while at > last {
            let mut bits = self.bits[word].load(Relaxed);
            let base = self.start().wrapping_add(word * 64 * size);
            if bits == u64::MAX && at - last >= 64 {
                // All 64 objects are free and wanted, so no search for bits is needed. The object
                // numbers that are multiples of 2^shift come first, then the numbers one higher,
                // and so on.
                for (nth, slot) in slots[at - 64..at].iter_mut().rev().enumerate() {
                    let apart = nth << shift & 63 | nth >> (6 - shift);
                    *slot = base.wrapping_add(apart * size);
                }
                at -= 64;
                bits = 0;
            }
            while bits != 0 && at > last {
                at -= 1;
                slots[at] = base.wrapping_add(bits.trailing_zeros() as usize * size);
                bits &= bits - 1;
            }
            self.bits[word].store(bits, Relaxed);
            word += usize::from(bits == 0);
        }
        self.hint.set(word as u32);
        self.free.set(self.free.get() - wanted as u32);
        wanted
    }

    /// Frees the first of `objects`, and the objects directly after it whose bits are in the same
    /// word. Returns how many objects it freed.
    ///
    /// Objects that were allocated together are often freed together, so one write to the word
    /// often frees many.
    ///
    /// # Errors
    ///
    /// A wrong address, not always the first one. The slab is unchanged then.
    pub(crate) fn put(&self, cache: &Objects, objects: &[*mut u8]) -> Result<usize, Wrong> {
        let start = self.start() as usize;
        // A wrong address may lie before the first object.
        let first = (objects[0] as usize).wrapping_sub(start);
        if first >= cache.geometry.slab_bytes {
            return Err(Wrong::NotAnObject(objects[0]));
        }
        let word = cache.geometry.nth(first) / 64;
        let (mut mask, mut count) = (0u64, 0);
        for &object in objects {
            let offset = (object as usize).wrapping_sub(start);
            if offset >= cache.geometry.slab_bytes {
                break;
            }
            let nth = cache.geometry.nth(offset);
            if nth / 64 != word {
                break;
            }
            if nth * cache.geometry.size != offset {
                return Err(Wrong::NotAnObject(object));
            }
            mask |= 1 << (nth % 64);
            count += 1;
        }
        let bits = self.bits[word].load(Relaxed);
        if bits & mask != 0 || mask.count_ones() as usize != count {
            return Err(self.free_twice(cache, &objects[..count]));
        }
        // The holder of the lock is the only writer, so a load and a store lose no bit.
        self.bits[word].store(bits | mask, Relaxed);
        self.hint.set(self.hint.get().min(word as u32));
        self.free.set(self.free.get() + count as u32);
        Ok(count)
    }

    /// Finds the one of `objects` that is free already, or occurs twice in the slice.
    #[cold]
    fn free_twice(&self, cache: &Objects, objects: &[*mut u8]) -> Wrong {
        let free = objects.iter().find(|&&object| self.is_free(cache, object));
        let twice = || {
            let mut earlier = objects.iter().enumerate();
            earlier.find_map(|(at, object)| objects[..at].contains(object).then_some(object))
        };
        Wrong::FreeTwice(free.or_else(twice).copied().unwrap_or_default())
    }

    /// Returns the slab's start, the number of the object at `slot`, and whether the object is
    /// free. The caller holds the node's lock.
    pub(crate) fn state(&self, cache: &Objects, slot: *mut u8) -> (*const u8, usize, bool) {
        let nth = cache.geometry.nth(slot as usize - self.start() as usize);
        (self.start().cast_const(), nth, self.is_free(cache, slot))
    }

    /// Reads an object's free bit without the lock. If the caller holds the object, the answer is
    /// "not free", and cannot change while the caller holds it.
    ///
    /// # Safety
    ///
    /// The object is one of `cache`'s, and its slab has not gone back to the arena.
    pub(crate) unsafe fn is_free_now(cache: &Objects, object: *mut u8) -> bool {
        // SAFETY: the caller promises that the slab has not gone back to the arena. `is_free`
        // accesses only atomics.
        unsafe { slab_of(object) }.is_free(cache, object)
    }

    /// Returns how many of the slab's `count` objects are not free. Takes no lock, so the number is
    /// approximate while other threads take and give objects.
    pub(crate) fn used_now(&self, count: usize) -> usize {
        let words = self.bits[..count.div_ceil(64)].iter();
        let free: u32 = words.map(|word| word.load(Relaxed).count_ones()).sum();
        count.saturating_sub(free as usize)
    }

    /// Returns whether an object is free, by its bit. The caller holds the node's lock or the
    /// object.
    pub(crate) fn is_free(&self, cache: &Objects, object: *mut u8) -> bool {
        let nth = cache.geometry.nth(object as usize - self.start() as usize);
        self.bits
            .get(nth / 64)
            .is_some_and(|word| word.load(Relaxed) >> (nth % 64) & 1 == 1)
    }
}
