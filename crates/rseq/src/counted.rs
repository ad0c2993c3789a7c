//! Taking a pointer and counting it, in one critical section.
#![allow(
    unsafe_code,
    reason = "hands addresses of units to the critical sections"
)]

use crate::arch;
use crate::units::Units;

impl Units {
    /// Takes the top pointer off the stack at `offset` of the current unit, as
    /// [`pop_rseq`](Self::pop_rseq) does, and subtracts `n` from the word at `COUNT` of the unit.
    /// Returns null if `pop_rseq` would, or if the word, a signed number, is `n` or less.
    ///
    /// Costs one critical section. It ends with two stores: first to the word at `COUNT`, then to
    /// the stack. If the thread is interrupted between these stores, the section starts again, and
    /// subtracts `n` once more, or returns null. So the word may be less than the exact difference.
    ///
    /// # Safety
    ///
    /// * The same as for [`pop_rseq`](Self::pop_rseq).
    /// * `COUNT` is a multiple of 8, is at least [`UNIT_HEADER`](crate::UNIT_HEADER) and at most
    ///   32760, and leaves 8 bytes in every installed unit.
    #[inline(always)]
    pub unsafe fn pop_counted_rseq<const COUNT: usize>(&self, offset: usize, n: i64) -> *mut u8 {
        let (cs, index) = self.offsets();
        // SAFETY: the caller promises that `install` has copied the offsets of a registered area,
        // that the word at `offset` is 0 or a stack top, and that every unit has a word at `COUNT`.
        unsafe { arch::pop_counted::<COUNT>(cs, index, self.table(), offset, n) }
    }
}
