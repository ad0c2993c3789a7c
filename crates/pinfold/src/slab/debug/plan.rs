//! Where in its slot a debugged object is, and the bytes around it.

use super::{DebugFlags, Track};
use core::alloc::Layout;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// Bytes of a red zone while its object is free, and while it is in use.
const RED_INACTIVE: u8 = 0xbb;
const RED_ACTIVE: u8 = 0xcc;
/// Bytes of padding, of a free object, and its last one.
const PADDING: u8 = 0x5a;
const FREE: u8 = 0x6b;
const FREE_END: u8 = 0xa5;
/// Bytes of the smallest red zone.
const WORD: usize = 8;

/// What a debugged cache's slots look like.
#[derive(Clone, Copy, Debug)]
pub(in crate::slab) struct Plan {
    pub(in crate::slab) flags: DebugFlags,
    /// Bytes of the object.
    pub(in crate::slab) object: usize,
    /// Bytes before it.
    pub(in crate::slab) left: usize,
    /// Where the red zone behind the object ends.
    zone_end: usize,
    /// Where the word is that says how many bytes were asked for; 0: there is none.
    requested: usize,
    /// Where the two tracks are; 0: there are none.
    tracks: usize,
    /// Where the padding begins.
    used: usize,
    /// Bytes from one slot to the next.
    pub(in crate::slab) stride: usize,
}

/// What a byte belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The red zone before the object.
    LeftRedZone,
    /// The red zone behind it, or behind what was asked for of it.
    RightRedZone,
    /// A free object.
    Poison,
    /// What is left of its slot.
    Padding,
}

/// The first wrong byte of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The part.
    pub part: Part,
    /// Where, in bytes from the object's start.
    pub offset: isize,
    /// What is there.
    pub found: u8,
    /// What should be.
    pub expected: u8,
    /// How many bytes of the part are wrong.
    pub wrong: usize,
}

impl Plan {
    /// The slots of objects of `layout`; `has_constructor` keeps their bytes from being poisoned.
    pub(in crate::slab) fn new(flags: DebugFlags, layout: Layout, has_constructor: bool) -> Plan {
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
        let mut place = |wanted: bool, size: usize| {
            let at = if wanted { used } else { 0 };
            used += if wanted { size } else { 0 };
            at
        };
        let user = flags.contains(DebugFlags::USER);
        let requested = place(zoned || user, WORD);
        let tracks = place(user, 2 * size_of::<Track>());
        Plan {
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

    /// The object of a slot.
    pub(in crate::slab) fn object_at(&self, slot: *mut u8) -> *mut u8 {
        slot.wrapping_add(self.left)
    }

    /// The slot of an object.
    pub(in crate::slab) fn slot_of(&self, object: *mut u8) -> *mut u8 {
        object.wrapping_sub(self.left)
    }

    /// How many bytes of the object were asked for.
    ///
    /// # Safety
    ///
    /// Here and below: `slot` is one of this plan's, which nobody else writes to.
    pub(in crate::slab) unsafe fn requested(&self, slot: *mut u8) -> usize {
        if self.requested == 0 {
            return self.object;
        }
        // SAFETY: the word lies in the slot.
        let word = unsafe { &*slot.add(self.requested).cast::<AtomicUsize>() };
        // Relaxed: a handler may be about to set the object aside, and say so here.
        word.load(Relaxed).min(self.object)
    }

    /// Where a slot keeps a link while its object is set aside: where nobody looks who checks slots
    /// of objects in use. The word for the bytes asked for says more than there are then, if the
    /// link is [as it is kept](super::super::cache::Cache::encode_link).
    pub(in crate::slab) fn link_at(&self) -> usize {
        self.requested
    }

    /// Notes how many bytes were asked for, and has the red zone begin behind them.
    pub(in crate::slab) unsafe fn set_requested(&self, slot: *mut u8, requested: usize) {
        if self.requested == 0 {
            return;
        }
        let requested = requested.min(self.object);
        // SAFETY: the word and the zone lie in the slot.
        unsafe {
            slot.add(self.requested).cast::<usize>().write(requested);
            if self.flags.contains(DebugFlags::RED_ZONE) {
                let from = self.left + requested;
                slot.add(from).write_bytes(RED_ACTIVE, self.zone_end - from);
            }
        }
    }

    /// Fills a slot as of an object that was never used.
    pub(in crate::slab) unsafe fn prepare(&self, slot: *mut u8) {
        // SAFETY: the padding lies in the slot.
        unsafe {
            slot.add(self.used)
                .write_bytes(PADDING, self.stride - self.used);
            self.set_free(slot);
        }
        for nth in 0..2 {
            // SAFETY: as above.
            unsafe { self.set_track(slot, nth, || Track::NOBODY) };
        }
    }

    /// Marks a slot's object as free.
    pub(in crate::slab) unsafe fn set_free(&self, slot: *mut u8) {
        // SAFETY: all lies in the slot.
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

    /// Marks a slot's object as in use, with the first `requested` bytes of it.
    pub(in crate::slab) unsafe fn set_used(&self, slot: *mut u8, requested: usize) {
        // SAFETY: all lies in the slot.
        unsafe {
            if self.flags.contains(DebugFlags::RED_ZONE) {
                self.fill_zones(slot, RED_ACTIVE);
            }
            self.set_requested(slot, requested);
        }
    }

    unsafe fn fill_zones(&self, slot: *mut u8, byte: u8) {
        let behind = self.left + self.object;
        // SAFETY: both zones lie in the slot.
        unsafe {
            slot.write_bytes(byte, self.left);
            slot.add(behind).write_bytes(byte, self.zone_end - behind);
        }
    }

    /// Keeps who did what last: 0 the allocation, 1 the free.
    pub(in crate::slab) unsafe fn set_track(
        &self,
        slot: *mut u8,
        nth: usize,
        track: impl FnOnce() -> Track,
    ) {
        if self.tracks != 0 {
            // SAFETY: the tracks lie in the slot.
            unsafe {
                slot.add(self.tracks)
                    .cast::<Track>()
                    .add(nth)
                    .write(track());
            };
        }
    }

    /// Who did it last; nobody where that is not kept.
    pub(in crate::slab) unsafe fn track(&self, slot: *mut u8, nth: usize) -> Track {
        if self.tracks == 0 {
            return Track::NOBODY;
        }
        // SAFETY: the tracks lie in the slot.
        unsafe { slot.add(self.tracks).cast::<Track>().add(nth).read() }
    }

    /// Who allocated and who freed a slot's object last.
    pub(in crate::slab) unsafe fn tracks(&self, slot: *mut u8) -> [Track; 2] {
        // SAFETY: the caller's promise.
        [0, 1].map(|nth| unsafe { self.track(slot, nth) })
    }

    /// The first wrong bytes of a slot whose object is in use or free. With `mend` they are put right, so that one fault is found
    /// once.
    pub(in crate::slab) unsafe fn check(
        &self,
        slot: *mut u8,
        in_use: bool,
        mend: bool,
    ) -> Option<Found> {
        let red = if in_use { RED_ACTIVE } else { RED_INACTIVE };
        let asked = if in_use {
            // SAFETY: the caller's promise.
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
            // SAFETY: the range lies in the slot.
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

    fn plan(flags: DebugFlags, size: usize, align: usize) -> Plan {
        Plan::new(flags, Layout::from_size_align(size, align).unwrap(), false)
    }

    #[test]
    fn every_byte_of_a_slot_is_somebodys() {
        for flags in [
            DebugFlags::DEFAULT,
            DebugFlags::RED_ZONE,
            DebugFlags::POISON,
        ] {
            for (size, align) in [(1, 1), (8, 8), (18, 4), (64, 64), (100, 32)] {
                let plan = plan(flags, size, align);
                assert!(plan.stride.is_multiple_of(align) && plan.left.is_multiple_of(align));
                let mut memory = vec![0u64; plan.stride / 8];
                let slot = memory.as_mut_ptr().cast::<u8>();
                // SAFETY: the slot is ours, and as large.
                unsafe {
                    plan.prepare(slot);
                    assert_eq!(plan.check(slot, false, false), None);
                    plan.set_used(slot, size);
                    assert_eq!(plan.check(slot, true, false), None);
                    plan.set_free(slot);
                    assert_eq!(plan.check(slot, false, false), None);
                }
            }
        }
    }

    #[test]
    fn a_wrong_byte_is_found_and_mended() {
        let plan = plan(DebugFlags::DEFAULT, 32, 8);
        let mut memory = vec![0u64; plan.stride / 8];
        let slot = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: as above; offsets are within the slot.
        unsafe {
            plan.prepare(slot);
            plan.set_used(slot, 18);
            let object = plan.object_at(slot);
            object.add(18).write(0xab);
            object.add(19).write(0xab);
            let found = plan.check(slot, true, true).unwrap();
            assert_eq!((found.part, found.offset), (Part::RightRedZone, 18));
            assert_eq!((found.found, found.expected, found.wrong), (0xab, 0xcc, 2));
            assert_eq!(plan.check(slot, true, false), None);
            object.sub(1).write(1);
            let found = plan.check(slot, true, true).unwrap();
            assert_eq!((found.part, found.offset), (Part::LeftRedZone, -1));
        }
    }
}
