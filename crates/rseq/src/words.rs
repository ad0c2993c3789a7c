//! Operations on a word, on two words, on a list and on a ring of the current unit.
#![allow(
    unsafe_code,
    reason = "hands addresses of units to the critical sections"
)]

use crate::atomic;
use crate::units::{Units, either};

/// The bytes from the start of a ring to the word that its reader advances. The word is not in the
/// cache line of the ring's head, which the operations write.
pub const RING_TAIL: usize = 64;
/// The bytes from the start of a ring to its first slot.
pub const RING_SLOTS: usize = 128;

/// What `append` leaves in its register if there is no unit. A full ring leaves at least 8 there.
pub(crate) const MISSING: u64 = 1;

/// What became of an [`append`](Units::append).
///
/// ```
/// use pinfold_rseq::{Append, UNIT_HEADER, Units};
///
/// let units = Box::new(Units::new());
/// // SAFETY: there is no unit that could be too small.
/// let done = unsafe { units.append(UNIT_HEADER, 64, &[1], 8) };
/// assert_eq!(done, Append::NoUnit);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Append {
    /// The record is in the ring.
    Done,
    /// The ring is full.
    Full,
    /// There is no unit, or (on the atomic backend) the unit is locked.
    NoUnit,
}

/// Operations on one word. On the atomic backend each is one atomic instruction and takes no lock,
/// so it fails only if there is no unit.
///
/// Each store is a release: a thread that reads the new word by an acquire load sees everything
/// that this thread did before. The atomic instructions that read and write also acquire.
impl Units {
    /// Stores `value` in the word at `offset` of the current unit. Returns false if there is no
    /// unit. Costs one critical section.
    ///
    /// # Safety
    ///
    /// The same as for [`add`](Self::add). Also, on the atomic backend no operation that takes a
    /// lock works on the word.
    #[inline]
    pub unsafe fn store(&self, offset: usize, value: u64) -> bool {
        either!(self, store(offset, value))
    }

    /// Stores the bits that are set in both the word and `mask`. Returns false if there is no unit.
    /// Costs one critical section.
    ///
    /// # Safety
    ///
    /// The same as for [`store`](Self::store).
    #[inline]
    pub unsafe fn and(&self, offset: usize, mask: u64) -> bool {
        either!(self, and(offset, mask))
    }

    /// Stores the bits that are set in the word or in `mask`. Returns false if there is no unit.
    /// Costs one critical section.
    ///
    /// # Safety
    ///
    /// The same as for [`store`](Self::store).
    #[inline]
    pub unsafe fn or(&self, offset: usize, mask: u64) -> bool {
        either!(self, or(offset, mask))
    }

    /// Adds `n` to the word, wrapping, and returns the word as it was. Returns `None` if there is
    /// no unit. Costs one critical section.
    ///
    /// # Safety
    ///
    /// The same as for [`store`](Self::store).
    #[inline]
    pub unsafe fn fetch_add(&self, offset: usize, n: u64) -> Option<u64> {
        either!(self, fetch_add(offset, n))
    }

    /// Stores `value` in the word, and returns the word as it was. Returns `None` if there is no
    /// unit. Costs one critical section.
    ///
    /// # Safety
    ///
    /// The same as for [`store`](Self::store).
    #[inline]
    pub unsafe fn swap(&self, offset: usize, value: u64) -> Option<u64> {
        either!(self, swap(offset, value))
    }

    /// Stores `new` in the word if the word is `expected`. Returns the word as it was: it equals
    /// `expected` if `new` was stored. Returns `None` if there is no unit. Costs one critical
    /// section.
    ///
    /// # Safety
    ///
    /// The same as for [`store`](Self::store).
    #[inline]
    pub unsafe fn compare_exchange(&self, offset: usize, expected: u64, new: u64) -> Option<u64> {
        either!(self, compare_exchange(offset, expected, new))
    }

    /// Stores `new` in the word if the word is `expected`, and returns whether it did. Returns
    /// false if there is no unit. Costs one critical section.
    ///
    /// This is [`compare_exchange`](Self::compare_exchange) for callers that do not need the old
    /// word.
    ///
    /// # Safety
    ///
    /// The same as for [`store`](Self::store).
    #[inline]
    pub unsafe fn try_compare_exchange(&self, offset: usize, expected: u64, new: u64) -> bool {
        match self.area() {
            // SAFETY: `area` returns a registered area. The caller promises the word.
            Some(area) => unsafe { area.store_if_equal(offset, expected, new) },
            // SAFETY: the caller promises the word.
            None => unsafe { self.compare_exchange(offset, expected, new) == Some(expected) },
        }
    }
}

/// Operations on several words. On the atomic backend each except [`add_pair`](Units::add_pair)
/// takes the unit's lock, and fails if the lock is taken.
impl Units {
    /// Adds `n` to the two words at `offset`.
    ///
    /// Returns false and adds nothing if there is no unit. Costs one critical section. On the
    /// atomic backend, costs two atomic adds, and a thread that reads the words meanwhile may see
    /// one of them old and one new.
    ///
    /// # Safety
    ///
    /// The same as for [`compare_exchange_pair`](Self::compare_exchange_pair), and no other
    /// operation of this block changes the words.
    #[inline(always)]
    pub unsafe fn add_pair(&self, offset: usize, n: [u64; 2]) -> bool {
        let [n0, n1] = n;
        either!(self, add_pair(offset, n0, n1))
    }

    /// Stores the pair `new` in the two words at `offset` if they equal `expected`.
    ///
    /// Returns false and stores nothing if a word differs, if there is no unit, or (on the atomic
    /// backend) if the unit is locked. Another thread that reads the words may see one of them old
    /// and one new. Costs one critical section, or a lock on the atomic backend.
    ///
    /// # Safety
    ///
    /// `offset` is a multiple of 16, is at least [`UNIT_HEADER`](crate::UNIT_HEADER), and leaves 16
    /// bytes in every installed unit. Every unit is aligned to 16 bytes. Code that changes the
    /// words without the operations of this block accepts that such a change may be lost.
    #[inline]
    pub unsafe fn compare_exchange_pair(
        &self,
        offset: usize,
        expected: [u64; 2],
        new: [u64; 2],
    ) -> bool {
        let ([e0, e1], [n0, n1]) = (expected, new);
        either!(self, compare_exchange_pair(offset, e0, e1, n0, n1))
    }

    /// Stores `value` in the word at `other` and then `new` in the word at `offset`, if the word at
    /// `offset` is `expected`.
    ///
    /// Returns false if the word at `offset` differs, if there is no unit, or (on the atomic
    /// backend) if the unit is locked. In these cases the word at `offset` is unchanged, but the
    /// word at `other` may have changed, so it must have no meaning until the word at `offset` says
    /// so. A thread that reads `new` by an acquire load also sees `value`. Costs one critical
    /// section, or a lock on the atomic backend.
    ///
    /// # Safety
    ///
    /// Both offsets are as for [`add`](Self::add). Only the operations of this block change the
    /// words.
    #[inline]
    pub unsafe fn store_two_if_equal(
        &self,
        offset: usize,
        (expected, new): (u64, u64),
        other: usize,
        value: u64,
    ) -> bool {
        either!(
            self,
            store_two_if_equal(offset, expected, new, other, value)
        )
    }

    /// Stores `new` in the word at `offset`, if that word is `expected` and the word at `other` is
    /// `other_expected`.
    ///
    /// Returns false and stores nothing if a word differs, if there is no unit, or (on the atomic
    /// backend) if the unit is locked. Costs one critical section, or a lock on the atomic backend.
    ///
    /// # Safety
    ///
    /// The same as for [`store_two_if_equal`](Self::store_two_if_equal).
    #[inline]
    pub unsafe fn store_if_both_equal(
        &self,
        offset: usize,
        (expected, new): (u64, u64),
        other: usize,
        other_expected: u64,
    ) -> bool {
        either!(
            self,
            store_if_both_equal(offset, expected, new, other, other_expected)
        )
    }

    /// Puts `item` at the head of the list at `offset`, and writes the old head into the first word
    /// of `item`.
    ///
    /// Returns false if there is no unit, or (on the atomic backend) if the unit is locked. Costs
    /// one critical section, or a lock on the atomic backend.
    ///
    /// # Safety
    ///
    /// * `offset` is as for [`add`](Self::add). The word there is 0 or the head of a list. Only
    ///   this function, [`list_pop`](Self::list_pop) and [`list_take`](Self::list_take) change the
    ///   word, or a thread that has stopped the unit's index and waited for operations to end.
    /// * `item` is not null, is aligned to 8 bytes, and is writable for 8 bytes until it is taken
    ///   off the list. It belongs to the caller, and to the list if the result is true.
    #[inline]
    pub unsafe fn list_push(&self, offset: usize, item: *mut u8) -> bool {
        either!(self, list_push(offset, item))
    }

    /// Takes the first item off the list at `offset`.
    ///
    /// Returns null if the list is empty, if there is no unit, or (on the atomic backend) if the
    /// unit is locked. Costs one critical section, or a lock on the atomic backend.
    ///
    /// # Safety
    ///
    /// The same as for [`list_push`](Self::list_push).
    #[inline]
    pub unsafe fn list_pop(&self, offset: usize) -> *mut u8 {
        either!(self, list_pop(offset))
    }

    /// Takes all items off the list at `offset`, and returns the first. The first word of each item
    /// is the address of the next, or 0.
    ///
    /// Returns null where [`list_pop`](Self::list_pop) does. Costs one critical section, or a lock
    /// on the atomic backend.
    ///
    /// # Safety
    ///
    /// The same as for [`list_push`](Self::list_push).
    #[inline]
    pub unsafe fn list_take(&self, offset: usize) -> *mut u8 {
        match self.area() {
            // SAFETY: `area` returns a registered area. The caller promises the list.
            Some(area) => unsafe { area.swap(offset, 0) }.unwrap_or(0) as *mut u8,
            // SAFETY: the caller promises the list.
            None => unsafe { atomic::list_take(self, offset) },
        }
    }

    /// Appends a record to the ring at `offset` of the current unit.
    ///
    /// The ring's first word, the *head*, counts the bytes of all slots that were ever written. The
    /// word at [`RING_TAIL`], the *tail*, counts those that the ring's reader has given back. The
    /// slots begin at [`RING_SLOTS`]. The record takes one slot of `slot` bytes, and the ring has
    /// `size` bytes of slots. A reader loads the head with acquire, reads slots, and stores the
    /// tail with release. One thread at a time may read a ring, and it may run on any CPU.
    ///
    /// Costs one critical section with a loop over the record's words, or a lock on the atomic
    /// backend.
    ///
    /// # Safety
    ///
    /// * `offset` is a multiple of 8 and at least [`UNIT_HEADER`](crate::UNIT_HEADER). Every
    ///   installed unit has `RING_SLOTS + size` bytes there, which are zero at first.
    /// * `slot` is a power of two and at least as large as the record, which is not empty. `size`
    ///   is a power of two and a multiple of `slot`. Both stay the same for the ring.
    /// * Only this function writes the head and the slots. Only the reader writes the tail.
    #[inline]
    pub unsafe fn append(&self, offset: usize, size: usize, record: &[u64], slot: usize) -> Append {
        let (mask, from, words) = (size - 1, record.as_ptr(), record.len());
        let left = either!(self, append(offset, mask, from, words, slot));
        match left {
            0 => Append::Done,
            MISSING => Append::NoUnit,
            _ => Append::Full,
        }
    }
}
