//! Where the parts of a debugged object's slot are, and what bytes they hold.

use super::{DebugFlags, Track};
use core::alloc::Layout;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// The byte of a red zone while its object is free, and the byte while the object is in use.
const RED_INACTIVE: u8 = 0xbb;
const RED_ACTIVE: u8 = 0xcc;
/// The byte of padding, the byte of a free object, and a free object's last byte.
const PADDING: u8 = 0x5a;
const FREE: u8 = 0x6b;
const FREE_END: u8 = 0xa5;
/// Bytes of a word. A red zone behind an object ends at a multiple of this, and has at least one
/// byte.
const WORD: usize = 8;

/// Where the parts of a debugged cache's slots are. Offsets are in bytes from a slot's start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotLayout {
    pub(crate) flags: DebugFlags,
    /// Bytes of the object.
    pub(crate) object: usize,
    /// Bytes before the object.
    pub(crate) left: usize,
    /// The end of the red zone behind the object.
    zone_end: usize,
    /// The offset of the word that holds how many bytes of the object were asked for. 0 if there is
    /// no such word.
    requested: usize,
    /// The offset of the two tracks. 0 if there are none.
    tracks: usize,
    /// The offset of the padding.
    used: usize,
    /// Bytes from one slot to the next.
    pub(crate) stride: usize,
}

/// The part of a slot that a byte belongs to.
///
/// ```
/// use pinfold::slab::debug::{Found, Kind, Part};
///
/// fn is_use_after_free(kind: Kind) -> bool {
///     matches!(kind, Kind::WrittenAfterFree | Kind::Overwritten(Found { part: Part::Poison, .. }))
/// }
/// assert!(!is_use_after_free(Kind::DoubleFree));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The red zone before the object.
    LeftRedZone,
    /// The red zone behind the object, or behind the object's bytes that were asked for.
    RightRedZone,
    /// The poison: the bytes of a free object.
    Poison,
    /// The unused end of the slot.
    Padding,
}

/// The first wrong byte of a part.
///
/// ```
/// # use pinfold::slab::{DebugFlags, KmemCache, debug::Kind};
/// # use std::alloc::Layout;
/// let cache = KmemCache::builder("line", Layout::new::<[u8; 64]>())
///     .debug(DebugFlags::RED_ZONE)
///     .build()?;
/// let line = cache.alloc().expect("memory");
/// // SAFETY: behind the object is its red zone, which is the cache's memory.
/// unsafe { line.as_ptr().add(64).write(0) };
/// let what = cache.validate().unwrap_err().what;
/// assert!(matches!(what, Kind::Overwritten(byte) if byte.offset == 64 && byte.found == 0));
/// # // SAFETY: the object came from this cache and is not used afterwards.
/// # unsafe { cache.free(line) };
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The part that the byte belongs to.
    pub part: Part,
    /// Where the byte is, in bytes from the object's start.
    pub offset: isize,
    /// The byte that is there.
    pub found: u8,
    /// The byte that should be there.
    pub expected: u8,
    /// How many bytes of the part are wrong.
    pub wrong: usize,
}

impl SlotLayout {
    /// Returns the layout of slots for objects of `layout`. With `has_constructor`, free objects
    /// are not poisoned.
    pub(crate) fn new(flags: DebugFlags, layout: Layout, has_constructor: bool) -> SlotLayout {
        let flags = if has_constructor {
            flags.without(DebugFlags::POISON)
        } else {
            flags
        };
        let align = layout.align().max(WORD);
        let object = layout.size().max(1);
        let zoned = flags.contains(DebugFlags::RED_ZONE);
        let left = if zoned { align } else { 0 };
        let zone_end = if zoned {
            (left + object + 1).next_multiple_of(WORD)
        } else {
            left + object
        };
        let mut used = zone_end.next_multiple_of(WORD);
        let mut lay = |wanted: bool, size: usize| {
            let at = if wanted { used } else { 0 };
            used += if wanted { size } else { 0 };
            at
        };
        let user = flags.contains(DebugFlags::USER);
        let requested = lay(zoned || user, WORD);
        let tracks = lay(user, 2 * size_of::<Track>());
        SlotLayout {
            flags,
            object,
            left,
            zone_end,
            requested,
            tracks,
            used,
            stride: used.next_multiple_of(align),
        }
    }

    /// Returns the address of the object in a slot.
    pub(crate) fn object_at(&self, slot: *mut u8) -> *mut u8 {
        slot.wrapping_add(self.left)
    }

    /// Returns the address of the slot of an object.
    pub(crate) fn slot_of(&self, object: *mut u8) -> *mut u8 {
        object.wrapping_sub(self.left)
    }

    /// Returns how many bytes of the object were asked for.
    ///
    /// # Safety
    ///
    /// `slot` begins a slot of this layout, and no other thread writes to it.
    pub(crate) unsafe fn requested(&self, slot: *mut u8) -> usize {
        if self.requested == 0 {
            return self.object;
        }
        // SAFETY: `new` laid the word out within the slot.
        let word = unsafe { &*slot.add(self.requested).cast::<AtomicUsize>() };
        // Atomic, because a thread that sets the object aside stores a link here, without the lock.
        // Relaxed, because any such link reads as "all bytes were asked for".
        word.load(Relaxed).min(self.object)
    }

    /// Returns the offset in a slot at which a link lies while the slot's object is set aside
    /// (`handler_frees`).
    ///
    /// The link lies in the word for the bytes asked for. The encoded link is larger than any
    /// object, so a check of the slot reads the word as "all bytes were asked for". A layout
    /// without that word has no red zones, and the link lies in the object. No check reads the
    /// bytes of an object that counts as in use.
    pub(crate) fn link_at(&self) -> usize {
        self.requested
    }

    /// Records how many bytes of the object were asked for, and makes the red zone begin behind
    /// these bytes.
    ///
    /// # Safety
    ///
    /// `slot` begins a slot of this layout, and no other thread writes to it.
    pub(crate) unsafe fn set_requested(&self, slot: *mut u8, requested: usize) {
        if self.requested == 0 {
            return;
        }
        let requested = requested.min(self.object);
        // SAFETY: `new` laid the word and the red zone out within the slot. `requested` is at most
        // the object's size, so the bytes from there to the zone's end lie in the slot.
        unsafe {
            slot.add(self.requested).cast::<usize>().write(requested);
            if self.flags.contains(DebugFlags::RED_ZONE) {
                let from = self.left + requested;
                slot.add(from).write_bytes(RED_ACTIVE, self.zone_end - from);
            }
        }
    }

    /// Fills a slot before the first use of its object.
    ///
    /// # Safety
    ///
    /// `slot` begins a slot of this layout, and no other thread writes to it.
    pub(crate) unsafe fn prepare(&self, slot: *mut u8) {
        // SAFETY: the padding reaches from `used` to the slot's end. The caller promises that the
        // slot is of this layout, and that no other thread writes to it.
        unsafe {
            slot.add(self.used)
                .write_bytes(PADDING, self.stride - self.used);
            self.set_free(slot);
        }
        for nth in 0..2 {
            // SAFETY: the caller promises that the slot is of this layout, and that no other thread
            // writes to it.
            unsafe { self.set_track(slot, nth, || Track::NOBODY) };
        }
    }

    /// Marks a slot's object as free, and fills its red zones and the object with the bytes of a
    /// free slot.
    ///
    /// # Safety
    ///
    /// `slot` begins a slot of this layout, and no other thread writes to it.
    pub(crate) unsafe fn set_free(&self, slot: *mut u8) {
        // SAFETY: `new` laid the word, the zones and the object out within the slot.
        unsafe {
            if self.requested != 0 {
                slot.add(self.requested).cast::<usize>().write(self.object);
            }
            if self.flags.contains(DebugFlags::RED_ZONE) {
                self.fill_zones(slot, RED_INACTIVE);
            }
            if self.flags.contains(DebugFlags::POISON) {
                let object = slot.add(self.left);
                object.write_bytes(FREE, self.object - 1);
                object.add(self.object - 1).write(FREE_END);
            }
        }
    }

    /// Marks a slot's object as in use. `requested` bytes of it were asked for.
    ///
    /// # Safety
    ///
    /// `slot` begins a slot of this layout, and no other thread writes to it.
    pub(crate) unsafe fn set_used(&self, slot: *mut u8, requested: usize) {
        // SAFETY: the caller promises that the slot is of this layout, and that no other thread
        // writes to it.
        unsafe {
            if self.flags.contains(DebugFlags::RED_ZONE) {
                self.fill_zones(slot, RED_ACTIVE);
            }
            self.set_requested(slot, requested);
        }
    }

    unsafe fn fill_zones(&self, slot: *mut u8, byte: u8) {
        let behind = self.left + self.object;
        // SAFETY: `new` laid both zones out within the slot.
        unsafe {
            slot.write_bytes(byte, self.left);
            slot.add(behind).write_bytes(byte, self.zone_end - behind);
        }
    }

    /// Stores the track of the last allocation (`nth` is 0) or of the last free (`nth` is 1).
    ///
    /// # Safety
    ///
    /// `slot` begins a slot of this layout, and no other thread writes to it.
    pub(crate) unsafe fn set_track(
        &self,
        slot: *mut u8,
        nth: usize,
        track: impl FnOnce() -> Track,
    ) {
        if self.tracks != 0 {
            // SAFETY: `new` laid two tracks out within the slot.
            unsafe {
                slot.add(self.tracks)
                    .cast::<Track>()
                    .add(nth)
                    .write(track());
            };
        }
    }

    /// Returns the track of the last allocation (`nth` is 0) or of the last free (`nth` is 1).
    /// Returns an empty track if the layout keeps no tracks.
    ///
    /// # Safety
    ///
    /// `slot` begins a slot of this layout, and no other thread writes to it.
    pub(crate) unsafe fn track(&self, slot: *mut u8, nth: usize) -> Track {
        if self.tracks == 0 {
            return Track::NOBODY;
        }
        // SAFETY: `new` laid two tracks out within the slot, and `prepare` wrote them.
        unsafe { slot.add(self.tracks).cast::<Track>().add(nth).read() }
    }

    /// Returns the tracks of the last allocation and the last free.
    ///
    /// # Safety
    ///
    /// `slot` begins a slot of this layout, and no other thread writes to it.
    pub(crate) unsafe fn tracks(&self, slot: *mut u8) -> [Track; 2] {
        // SAFETY: the caller promises that the slot is of this layout, and that no other thread
        // writes to it.
        [0, 1].map(|nth| unsafe { self.track(slot, nth) })
    }

    /// Checks a slot whose object is `in_use` or free. Returns the first wrong byte. With `mend`,
    /// repairs all wrong bytes, so that later checks do not find the same fault again.
    ///
    /// # Safety
    ///
    /// `slot` begins a slot of this layout. No other thread writes to it, except to the object of a
    /// slot in use.
    pub(crate) unsafe fn check(&self, slot: *mut u8, in_use: bool, mend: bool) -> Option<Found> {
        let red = if in_use { RED_ACTIVE } else { RED_INACTIVE };
        let asked = if in_use {
            // SAFETY: the caller promises that the slot is of this layout. Only a thread that sets
            // the object aside may write to the word for the bytes asked for, and that access is
            // atomic.
            unsafe { self.requested(slot) }
        } else {
            self.object
        };
        let zoned = self.flags.contains(DebugFlags::RED_ZONE);
        let poisoned = self.flags.contains(DebugFlags::POISON) && !in_use;
        let last = self.left + self.object - 1;
        let parts = [
            (zoned, Part::LeftRedZone, 0..self.left, red),
            (poisoned, Part::Poison, self.left..last, FREE),
            (poisoned, Part::Poison, last..last + 1, FREE_END),
            (
                zoned,
                Part::RightRedZone,
                self.left + asked..self.zone_end,
                red,
            ),
            (true, Part::Padding, self.used..self.stride, PADDING),
        ];
        let mut first = None;
        for (_, part, range, expected) in parts.into_iter().filter(|part| part.0) {
            // SAFETY: `new` laid all parts out within the slot. The caller promises that no other
            // thread writes to them: the user of an object in use may write to the object, which is
            // then no part that is checked.
            let bytes =
                unsafe { core::slice::from_raw_parts_mut(slot.add(range.start), range.len()) };
            let Some(at) = bytes.iter().position(|&byte| byte != expected) else {
                continue;
            };
            first = first.or(Some(Found {
                part,
                offset: (range.start + at) as isize - self.left as isize,
                found: bytes[at],
                expected,
                wrong: bytes.iter().filter(|&&byte| byte != expected).count(),
            }));
            if mend {
                bytes.fill(expected);
            }
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    fn plan(flags: DebugFlags, size: usize, align: usize) -> SlotLayout {
        SlotLayout::new(flags, Layout::from_size_align(size, align).unwrap(), false)
    }

    #[test]
    fn a_prepared_slot_has_no_faults() {
        for flags in [
            DebugFlags::DEFAULT,
            DebugFlags::RED_ZONE,
            DebugFlags::POISON,
        ] {
            for (size, align) in [(1, 1), (8, 8), (18, 4), (64, 64), (100, 32)] {
                let slot_layout = plan(flags, size, align);
                assert!(
                    slot_layout.stride.is_multiple_of(align)
                        && slot_layout.left.is_multiple_of(align)
                );
                let mut memory = vec![0u64; slot_layout.stride / 8];
                let slot = memory.as_mut_ptr().cast::<u8>();
                // SAFETY: `memory` holds one slot of this layout, at a multiple of 8, and this
                // thread owns it.
                unsafe {
                    slot_layout.prepare(slot);
                    assert_eq!(slot_layout.check(slot, false, false), None);
                    slot_layout.set_used(slot, size);
                    assert_eq!(slot_layout.check(slot, true, false), None);
                    slot_layout.set_free(slot);
                    assert_eq!(slot_layout.check(slot, false, false), None);
                }
            }
        }
    }

    #[test]
    fn a_wrong_byte_is_found_and_repaired() {
        let slot_layout = plan(DebugFlags::DEFAULT, 32, 8);
        let mut memory = vec![0u64; slot_layout.stride / 8];
        let slot = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: `memory` holds one slot of this layout, and all offsets lie within it.
        unsafe {
            slot_layout.prepare(slot);
            slot_layout.set_used(slot, 18);
            let object = slot_layout.object_at(slot);
            object.add(18).write(0xab);
            object.add(19).write(0xab);
            let found = slot_layout.check(slot, true, true).unwrap();
            assert_eq!((found.part, found.offset), (Part::RightRedZone, 18));
            assert_eq!((found.found, found.expected, found.wrong), (0xab, 0xcc, 2));
            assert_eq!(slot_layout.check(slot, true, false), None);
            object.sub(1).write(1);
            let found = slot_layout.check(slot, true, true).unwrap();
            assert_eq!((found.part, found.offset), (Part::LeftRedZone, -1));
        }
    }
}
