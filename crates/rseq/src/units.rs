//! The table of units and the operations on the current one.
#![allow(
    unsafe_code,
    reason = "hands addresses of units to the critical sections"
)]

use crate::state::STATE;
use crate::{arch, atomic};
use core::mem::offset_of;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicIsize, AtomicPtr, AtomicUsize};

/// One more than the largest CPU number or concurrency id: the largest `CONFIG_NR_CPUS` of any Linux architecture.
pub const MAX_INDEX: usize = 8192;

/// Bytes at the start of each unit that belong to this crate; words start behind them.
pub const UNIT_HEADER: usize = 64;

/// How many words of a [`Units`] belong to its owner.
pub const BESIDE: usize = 4;
/// Bytes from the beginning of a [`Units`] to the entry of index 0.
pub(crate) const FIRST: usize = offset_of!(Units, active);

/// The address of each index's unit, or null where there is none.
///
/// 128 KiB of address space; memory only where indexes are in use. What an operation reads of the
/// table lies in its first cache line, and in the line of the index's entry.
///
/// # Invariants
///
/// An installed unit stays valid memory for ever: a thread that was about to use it may sleep at any point. `active`
/// is null or equal to `home`; it is null while the index is stopped.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Units {
    /// A copy of the offset of `rseq_cs` from the thread pointer. 0 on the atomic backend, and until
    /// [`learn`](Self::learn) has copied the offset.
    cs: AtomicIsize,
    /// A copy of the offset of the index from the thread pointer; valid if `cs` is not 0.
    index: AtomicIsize,
    beside: [AtomicUsize; BESIDE],
    active: [AtomicPtr<u8>; MAX_INDEX],
    home: [AtomicPtr<u8>; MAX_INDEX],
}

impl Default for Units {
    fn default() -> Self {
        Self::new()
    }
}

impl Units {
    /// A table without units: every operation fails until [`install`](Self::install).
    pub const fn new() -> Self {
        Units {
            cs: AtomicIsize::new(0),
            index: AtomicIsize::new(0),
            beside: [const { AtomicUsize::new(0) }; BESIDE],
            active: [const { AtomicPtr::new(null_mut()) }; MAX_INDEX],
            home: [const { AtomicPtr::new(null_mut()) }; MAX_INDEX],
        }
    }

    /// Gives `index` its unit, once. The unit must be zeroed, 8-byte aligned and valid for ever.
    ///
    /// # Errors
    ///
    /// The unit that is already there, when somebody was faster.
    ///
    /// # Panics
    ///
    /// When `index` is [`MAX_INDEX`] or more.
    pub fn install(&self, index: usize, unit: *mut u8) -> Result<(), *mut u8> {
        self.learn();
        // Release pairs with the acquire in `unit` and in the operations: they see the zeroed memory.
        self.home[index]
            .compare_exchange(null_mut(), unit, AcqRel, Acquire)
            .map(|_| self.active[index].store(unit, Release))
    }

    /// Words that this crate does not use, in the first cache line of the table, for the fast paths of the table's
    /// owner. They are 0 in a new table.
    #[inline(always)]
    pub fn beside(&self) -> &[AtomicUsize; BESIDE] {
        &self.beside
    }

    /// The unit of `index`, or null. It may be stopped.
    pub fn unit(&self, index: usize) -> *mut u8 {
        self.home
            .get(index)
            .map_or(null_mut(), |unit| unit.load(Acquire))
    }

    /// Takes `index` out of use: operations that begin later fail there. Those that have begun are over, and the unit
    /// belongs to the caller, after the next [`fence`](crate::fence()) (or, on atomics, after
    /// [`await_stopped`](Self::await_stopped)).
    ///
    /// The caller serialises `stop`, [`resume`](Self::resume) and [`install`](Self::install).
    pub fn stop(&self, index: usize) {
        self.active[index].store(null_mut(), Release);
    }

    /// On atomics, waits until no operation holds the unit of a stopped `index`, and keeps others off; with
    /// restartable sequences it does nothing, the fence has done it.
    pub fn await_stopped(&self, index: usize) {
        let unit = self.unit(index);
        if !unit.is_null() && STATE.is_atomic() {
            // SAFETY: installed units are valid for ever.
            unsafe { atomic::lock_unit(unit) };
        }
    }

    /// As [`await_stopped`](Self::await_stopped), but false when on atomics the unit's holder is the very frame that the caller, a signal
    /// handler, has interrupted, or does nothing for a second; then follow with [`resume_untouched`](Self::resume_untouched).
    pub fn try_await_stopped(&self, index: usize) -> bool {
        let unit = self.unit(index);
        // SAFETY: installed units are valid for ever.
        unit.is_null() || !STATE.is_atomic() || unsafe { atomic::try_lock_unit(unit) }
    }

    /// Puts a stopped `index` to use again that was not waited for.
    pub fn resume_untouched(&self, index: usize) {
        // Release pairs with the address dependency from this load to the unit's words.
        self.active[index].store(self.unit(index), Release);
    }

    /// Puts a stopped `index` to use again.
    pub fn resume(&self, index: usize) {
        let unit = self.unit(index);
        if !unit.is_null() && STATE.is_atomic() {
            // SAFETY: installed units are valid for ever, and `await_stopped` took the lock.
            unsafe { atomic::unlock_unit(unit) };
        }
        // Release pairs with the address dependency from this load to the unit's words.
        self.active[index].store(unit, Release);
    }

    /// Returns when every operation that began before the call has committed or was aborted, on either backend: the
    /// [`fence`](crate::fence()), or on atomics each unit's lock once.
    ///
    /// # Errors
    ///
    /// [`FenceError`](crate::FenceError) where the kernel cannot fence, or on atomics, with `EBUSY`, when the
    /// holder of a unit is the very frame that the caller, a signal handler, has interrupted, or does nothing for a second.
    pub fn quiesce(&self, indexes: usize) -> Result<(), crate::FenceError> {
        if !STATE.is_atomic() {
            return crate::fence();
        }
        let units = (0..indexes.min(MAX_INDEX)).map(|index| self.unit(index));
        for unit in units.filter(|unit| !unit.is_null()) {
            // SAFETY: installed units are valid for ever; unlocked by who locked.
            unsafe {
                if !atomic::try_lock_unit(unit) {
                    return Err(crate::FenceError { errno: libc::EBUSY });
                }
                atomic::unlock_unit(unit);
            }
        }
        Ok(())
    }

    /// After `fork`, in the child: unlocks every unit that the parent's [`await_stopped`](Self::await_stopped) had
    /// locked or that another thread held at the moment of the fork. Only for the atomic backend.
    pub fn unlock_all_in_child(&self, indexes: usize) {
        for index in 0..indexes.min(MAX_INDEX) {
            let unit = self.unit(index);
            if !unit.is_null() && STATE.is_atomic() {
                // SAFETY: installed units are valid for ever; the child has one thread, which holds none.
                unsafe { atomic::unlock_unit(unit) };
            }
        }
    }

    /// Adds `n` to the word at `offset` of the current unit, wrapping. False when there is no unit.
    ///
    /// # Safety
    ///
    /// `offset` is a multiple of 8, at least [`UNIT_HEADER`], and 8 bytes there lie within every installed unit.
    #[inline(always)]
    pub unsafe fn add(&self, offset: usize, n: u64) -> bool {
        let (cs, index) = self.offsets();
        if cs == 0 {
            // SAFETY: the caller's promise.
            return unsafe { atomic::add(self, offset, n) };
        }
        // SAFETY: the offsets come from a successful registration; the caller's promise covers the rest.
        unsafe { arch::add(cs, index, self.table(), offset, n) }
    }

    /// Adds `n` to the word at `offset` of the current unit if the sum is then at most the limit in the word behind it; both
    /// count modulo 2^64, and `limit - word` as a signed number says how much room there is. False, and nothing
    /// added, when there is less room than `n`, when there is no unit, or (on atomics) when the unit is busy.
    ///
    /// The add is a release: who acquires the new word sees everything this thread did before.
    ///
    /// # Safety
    ///
    /// As for [`add`](Self::add), for 16 bytes at `offset`.
    #[inline(always)]
    pub unsafe fn add_within(&self, offset: usize, n: i64) -> bool {
        let (cs, index) = self.offsets();
        if cs == 0 {
            // SAFETY: the caller's promise.
            return unsafe { atomic::add_within(self, offset, n) };
        }
        // SAFETY: as in `add`.
        unsafe { arch::add_within(cs, index, self.table(), offset, n) }
    }

    /// The word at `offset` of the current unit, or `None` where there is no unit. By the time it returns the thread
    /// may be elsewhere: follow up with [`store_if_equal`](Self::store_if_equal).
    ///
    /// # Safety
    ///
    /// As for [`add`](Self::add).
    #[inline]
    pub unsafe fn load(&self, offset: usize) -> Option<u64> {
        let unit = self.active[crate::current() % MAX_INDEX].load(Acquire);
        if unit.is_null() {
            return None;
        }
        // SAFETY: the caller's promise; the word may be written at the same time, hence the atomic.
        let word = unsafe { &*unit.add(offset).cast::<core::sync::atomic::AtomicU64>() };
        Some(word.load(Acquire))
    }

    /// Stores `new` at `offset` of the current unit when `expected` is there. False when another value is, when
    /// there is no unit, or (on atomics) when the unit is busy.
    ///
    /// # Safety
    ///
    /// As for [`add`](Self::add).
    #[inline]
    pub unsafe fn store_if_equal(&self, offset: usize, expected: u64, new: u64) -> bool {
        let (cs, index) = self.offsets();
        if cs == 0 {
            // SAFETY: the caller's promise.
            return unsafe { atomic::store_if_equal(self, offset, expected, new) };
        }
        // SAFETY: as in `add`.
        unsafe { arch::store_if_equal(cs, index, self.table(), offset, expected, new) }
    }

    /// Takes the top pointer off the [`stack`](crate::stack) at `offset`; null when the stack is empty, when there
    /// is none, or when there is no unit.
    ///
    /// # Safety
    ///
    /// As for [`add`](Self::add), and the word is 0 or describes a stack that only this table's operations use.
    #[inline]
    pub unsafe fn pop(&self, offset: usize) -> *mut u8 {
        let (cs, index) = self.offsets();
        if cs == 0 {
            // SAFETY: the caller's promise.
            return unsafe { atomic::pop(self, offset) };
        }
        // SAFETY: as in `add`.
        unsafe { arch::pop(cs, index, self.table(), offset) }
    }

    /// As [`pop`](Self::pop), but null on the atomic backend too: for a caller whose slow path calls `pop`, and whose fast
    /// path shall contain no call.
    ///
    /// # Safety
    ///
    /// As for [`pop`](Self::pop).
    #[inline(always)]
    pub unsafe fn pop_fast(&self, offset: usize) -> *mut u8 {
        let (cs, index) = self.offsets();
        if cs == 0 {
            return null_mut();
        }
        // SAFETY: as in `add`.
        unsafe { arch::pop(cs, index, self.table(), offset) }
    }

    /// As [`pop`](Self::pop), for a caller that knows that the backend has restartable sequences.
    ///
    /// # Safety
    ///
    /// As for [`pop`](Self::pop), and [`backend`](crate::backend) is not [`Backend::Atomic`](crate::Backend::Atomic).
    #[inline(always)]
    pub unsafe fn pop_rseq(&self, offset: usize) -> *mut u8 {
        let (cs, index) = self.offsets();
        // SAFETY: as in `add`.
        unsafe { arch::pop(cs, index, self.table(), offset) }
    }

    /// As [`push`](Self::push), for a caller that knows that the backend has restartable sequences.
    ///
    /// # Safety
    ///
    /// As for [`pop_rseq`](Self::pop_rseq).
    #[inline(always)]
    pub unsafe fn push_rseq(&self, offset: usize, item: *mut u8) -> bool {
        let (cs, index) = self.offsets();
        // SAFETY: as in `add`.
        unsafe { arch::push(cs, index, self.table(), offset, item) }
    }

    /// As [`push`](Self::push), but false on the atomic backend too; see [`pop_fast`](Self::pop_fast).
    ///
    /// # Safety
    ///
    /// As for [`pop`](Self::pop).
    #[inline(always)]
    pub unsafe fn push_fast(&self, offset: usize, item: *mut u8) -> bool {
        let (cs, index) = self.offsets();
        // SAFETY: as in `add`.
        cs != 0 && unsafe { arch::push(cs, index, self.table(), offset, item) }
    }

    /// Puts `item`, which is not null, on the stack at `offset`; false when the stack is full, when there is none, or
    /// when there is no unit.
    ///
    /// # Safety
    ///
    /// As for [`pop`](Self::pop).
    #[inline]
    pub unsafe fn push(&self, offset: usize, item: *mut u8) -> bool {
        let (cs, index) = self.offsets();
        if cs == 0 {
            // SAFETY: the caller's promise.
            return unsafe { atomic::push(self, offset, item) };
        }
        // SAFETY: as in `add`.
        unsafe { arch::push(cs, index, self.table(), offset, item) }
    }

    /// Takes up to `items.len()` pointers off the stack at `offset`, the top one first, in one operation. Returns how
    /// many; 0 for the reasons that make [`pop`](Self::pop) return null.
    ///
    /// # Safety
    ///
    /// As for [`pop`](Self::pop).
    #[inline]
    pub unsafe fn pop_batch(&self, offset: usize, items: &mut [*mut u8]) -> usize {
        if items.is_empty() {
            return 0;
        }
        let (cs, index) = self.offsets();
        if cs == 0 {
            // SAFETY: the caller's promise.
            return unsafe { atomic::pop_batch(self, offset, items) };
        }
        // SAFETY: as in `add`; `items` is writable for its length, which is not 0.
        unsafe {
            arch::pop_batch(
                cs,
                index,
                self.table(),
                offset,
                items.as_mut_ptr(),
                items.len(),
            )
        }
    }

    /// Puts pointers from the front of `items` on the stack at `offset`, as many as fit, in one operation. Returns
    /// how many; 0 for the reasons that make [`push`](Self::push) fail.
    ///
    /// # Safety
    ///
    /// As for [`pop`](Self::pop); no item is null.
    #[inline]
    pub unsafe fn push_batch(&self, offset: usize, items: &[*mut u8]) -> usize {
        if items.is_empty() {
            return 0;
        }
        let (cs, index) = self.offsets();
        if cs == 0 {
            // SAFETY: the caller's promise.
            return unsafe { atomic::push_batch(self, offset, items) };
        }
        // SAFETY: as in `add`; `items` is readable for its length, which is not 0.
        unsafe { arch::push_batch(cs, index, self.table(), offset, items.as_ptr(), items.len()) }
    }

    /// The unit that operations would use at `index`, or null.
    pub(crate) fn active(&self, index: usize) -> *mut u8 {
        self.active
            .get(index)
            .map_or(null_mut(), |unit| unit.load(Acquire))
    }

    /// What the critical sections take: the entries stand [`FIRST`] bytes behind.
    #[inline(always)]
    pub(crate) fn table(&self) -> *const *mut u8 {
        core::ptr::from_ref(self).cast()
    }

    /// Returns the offsets of `rseq_cs` and of the index from the thread pointer. The first is 0 on the atomic
    /// backend, and until the table has learnt of another.
    #[inline(always)]
    fn offsets(&self) -> (isize, isize) {
        // Acquire pairs with the release in `learn`: with an offset of `rseq_cs` comes the offset
        // of the index. On x86-64 this only keeps the compiler from loading the index first.
        let cs = self.cs.load(Acquire);
        (cs, self.index.load(Relaxed))
    }

    /// Copies the offsets that the process uses to the table, and returns them. Returns `None` on the atomic backend,
    /// and until the backend is chosen.
    #[cold]
    pub(crate) fn learn(&self) -> Option<(isize, isize)> {
        let (cs, index) = STATE.offsets();
        if cs == 0 {
            return None;
        }
        self.index.store(index, Relaxed);
        // Release pairs with the acquire in `offsets`.
        self.cs.store(cs, Release);
        Some((cs, index))
    }
}
