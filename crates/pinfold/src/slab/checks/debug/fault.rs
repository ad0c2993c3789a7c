//! Faults of debugged objects, as a check under a node's lock records them.

use super::{Kind, SlotLayout, Track};

/// A fault, as recorded under a node's lock.
#[derive(Clone, Copy)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    /// The object's slot, or the freed address if it is in no slot.
    pub(crate) slot: *mut u8,
    /// The slab's start, the object's number in the slab, and whether the object is in use.
    pub(crate) position: (*const u8, usize, bool),
    /// The bytes around the fault, as the check found them, and their address.
    pub(crate) bytes: Option<(*const u8, [u8; 16])>,
    /// The tracks of the object's last allocation and last free.
    pub(crate) tracks: [Track; 2],
}

/// The faults that one check of a cache found. Counts all faults, and keeps the first 16.
pub(crate) struct Faults {
    kept: [Option<Fault>; 16],
    pub(crate) count: usize,
}

impl Faults {
    pub(crate) const fn new() -> Faults {
        Faults {
            kept: [None; 16],
            count: 0,
        }
    }

    pub(crate) fn add(&mut self, fault: Fault) {
        if let Some(room) = self.kept.get_mut(self.count) {
            *room = Some(fault);
        }
        self.count += 1;
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.kept.iter().flatten()
    }
}

impl SlotLayout {
    /// Checks the bytes of a slot, and returns the first fault. With `mend`, repairs the wrong
    /// bytes.
    ///
    /// # Safety
    ///
    /// The slot is of this layout. No other thread writes to the bytes of the slot that this
    /// function checks.
    pub(crate) unsafe fn fault(
        &self,
        slot: *mut u8,
        position: (*const u8, usize, bool),
        mend: bool,
    ) -> Option<Fault> {
        // SAFETY: the caller promises that the slot is of this layout, and that no other thread
        // writes to the bytes that this function checks.
        let found = unsafe { self.check(slot, position.2, false) }?;
        let wrong = self.object_at(slot).wrapping_offset(found.offset);
        // The report shows 16 bytes of the slot, from the word that holds the wrong byte. It shows
        // fewer if the slot is smaller.
        let last = slot.wrapping_add(self.stride.saturating_sub(16));
        let from = ((wrong as usize & !7).min(last as usize)).max(slot as usize) as *const u8;
        let mut bytes = [0; 16];
        let room = (slot as usize + self.stride - from as usize).min(16);
        // SAFETY: `room` ends at the slot's end at the latest, so the bytes lie in the slot.
        bytes[..room].copy_from_slice(unsafe { core::slice::from_raw_parts(from, room) });
        if mend {
            // SAFETY: the caller promises that the slot is of this layout, and that no other thread
            // writes to the bytes that this function checks.
            unsafe { self.check(slot, position.2, true) };
        }
        Some(Fault {
            kind: Kind::Overwritten(found),
            slot,
            position,
            bytes: Some((from, bytes)),
            // SAFETY: the caller promises that the slot is of this layout, and that no other thread
            // writes to the bytes that this function checks.
            tracks: unsafe { self.tracks(slot) },
        })
    }
}
