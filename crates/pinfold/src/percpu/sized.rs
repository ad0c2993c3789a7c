//! Arrays and rings whose sizes are values, for the C API.
//!
//! Both get their memory when they are made. So an array needs no copy of its own for CPUs without
//! memory: such CPUs share the copy in the shared unit of the array's block.

use super::array::Element;
use super::list::register_fork;
use super::place::InBlock;
use super::ring::Shape;
use super::{PushError, WORD};
use crate::counter_units::{self, LazyBlock};

/// An array of words with a copy for each CPU.
// The C header declares this layout.
#[repr(C)]
pub struct Array {
    block: LazyBlock,
    count: usize,
}

impl Array {
    /// Returns an array of `count` words, all zero bits, or `None` if there is no memory.
    pub fn new(count: usize) -> Option<Self> {
        let block = LazyBlock::new();
        let size = count.checked_mul(WORD)?;
        block.get_or_alloc(size, counter_units::register_fork, |offset| offset)?;
        Some(Array { block, count })
    }

    /// Returns the element number `at`, or `None` if the array has no such element.
    #[inline(always)]
    pub fn at(&self, at: usize) -> Option<Element<InBlock<'_>, u64>> {
        let place = InBlock::of(&self.block, at)?;
        (at < self.count).then(|| Element::at(place))
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the block with this size. `drop` has the only reference, so no
        // thread works on the block any more.
        unsafe { self.block.free(self.count * WORD) };
    }
}

/// The most words of a record. A reader keeps one record on its stack.
pub const MAX_RECORD: usize = 64;

/// A ring of records for each CPU.
// The C header declares this layout.
#[repr(C)]
pub struct Ring {
    block: LazyBlock,
    shape: Shape,
}

impl Ring {
    /// Returns empty rings of `slots` records of `words` words, or `None` if there is no memory.
    /// Both are powers of two, and `words` is at most [`MAX_RECORD`].
    pub fn new(words: usize, slots: usize) -> Option<Self> {
        debug_assert!(words.is_power_of_two() && words <= MAX_RECORD && slots.is_power_of_two());
        let slot = words.checked_mul(WORD)?;
        let size = slot.checked_mul(slots)?;
        // No unit has room for more.
        (size < counter_units::MAX_STRIDE).then_some(())?;
        let (block, shape) = (LazyBlock::new(), Shape { slot, size });
        block.get_or_alloc(shape.block(), register_fork, |offset| offset)?;
        Some(Ring { block, shape })
    }

    /// Returns the words of a record. Returns 0 for a ring that [`new`](Self::new) did not make,
    /// whose bits are all zero.
    #[inline(always)]
    pub fn words(&self) -> usize {
        self.shape.slot / WORD
    }

    /// Appends `record`, as [`PerCpuRing::push`](super::PerCpuRing::push) does.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`PerCpuRing::push`](super::PerCpuRing::push). Returns
    /// [`PushError::Unavailable`] if the record does not have [`words`](Self::words) words.
    #[inline]
    pub fn push(&self, record: &[u64]) -> Result<(), PushError> {
        if record.is_empty() || record.len() != self.words() {
            return Err(PushError::Unavailable);
        }
        // SAFETY: `new` allocated the block with this shape. The record fills a slot.
        unsafe { self.shape.push(&self.block, record) }
    }

    /// Reads the records of all CPUs, and calls `f` with the CPU and the record. Returns the number
    /// of records. Reads each ring up to the head that it had when this function reached the ring.
    /// Takes a lock once for each record.
    pub fn drain(&self, mut f: impl FnMut(usize, &[u64])) -> usize {
        let mut record = [0; MAX_RECORD];
        let record = &mut record[..self.words().min(MAX_RECORD)];
        let shape = self.shape;
        shape.drain(&self.block, &mut [record], |cpu, record| f(cpu, record))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the block with this shape. `drop` has the only reference, so no
        // thread works on the block any more.
        unsafe { self.block.free(self.shape.block()) };
    }
}
