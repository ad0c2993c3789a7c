//! The table of units, and the operations on the current unit.
#![allow(
    unsafe_code,
    reason = "hands addresses of units to the critical sections"
)]

use crate::arch::Area;
use crate::atomic;
use crate::state::STATE;
use core::mem::offset_of;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicIsize, AtomicPtr, AtomicUsize};

/// One more than the largest index: the largest `CONFIG_NR_CPUS` of any Linux architecture.
pub const MAX_INDEX: usize = 8192;

/// Bytes at the start of each unit that belong to this crate. The words follow them.
pub const UNIT_HEADER: usize = 64;

/// The number of words in a [`Units`] that belong to the table's owner.
pub const BESIDE: usize = 4;
/// Bytes from the start of a [`Units`] to the entry of index 0.
pub(crate) const FIRST: usize = offset_of!(Units, active);

/// The address of each index's unit, or null where there is none.
///
/// The table takes 128 KiB of address space, and memory only for indexes in use. An operation reads
/// two of the table's cache lines: the first, and the one with the index's entry.
///
/// The table begins at a page, so that the entries of the first 500 indexes share one page of
/// `active` and one of `home`. The process's first unit replaces both pages. If a later unit
/// replaced a page that a thread had only read, the kernel would interrupt all CPUs of the process.
///
/// # Invariants
///
/// * An installed unit stays valid until the process ends, because a thread that is about to use
///   the unit may sleep at any instruction.
/// * An entry of `active` is null or equal to the same entry of `home`. It is null while the index
///   is stopped.
///
/// # Examples
///
/// ```
/// static UNITS: pinfold_rseq::Units = pinfold_rseq::Units::new();
/// pinfold_rseq::init(pinfold_rseq::Index::Cid);
///
/// let unit = Box::leak(Box::new([0u64; 16])).as_mut_ptr().cast::<u8>();
/// assert_eq!(UNITS.install(0, unit), Ok(()));
/// assert_eq!(UNITS.install(0, unit), Err(unit));
/// ```
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct Units {
    /// A copy of the offset of `rseq_cs` from the thread pointer. It is 0 on the atomic backend,
    /// and until [`learn`](Self::learn) has copied the offset, which [`install`](Self::install)
    /// does before there is a unit.
    cs: AtomicIsize,
    /// A copy of the offset of the index from the thread pointer. Valid if `cs` is not 0.
    index: AtomicIsize,
    beside: [AtomicUsize; BESIDE],
    active: [AtomicPtr<u8>; MAX_INDEX],
    home: [AtomicPtr<u8>; MAX_INDEX],
}

/// Runs an operation of a table: as a critical section, or on the atomic backend.
macro_rules! either {
    ($units:expr, $operation:ident($($argument:expr),*)) => {
        // SAFETY: `area` returns a registered area and this table. The caller keeps the contract of
        // the operation, which both functions share.
        unsafe {
            match $units.area() {
                Some(area) => area.$operation($($argument),*),
                None => atomic::$operation($units, $($argument),*),
            }
        }
    };
}
pub(crate) use either;

impl Default for Units {
    fn default() -> Self {
        Self::new()
    }
}

impl Units {
    /// Returns a table without units. Every operation fails until [`install`](Self::install).
    pub const fn new() -> Self {
        Units {
            cs: AtomicIsize::new(0),
            index: AtomicIsize::new(0),
            beside: [const { AtomicUsize::new(0) }; BESIDE],
            active: [const { AtomicPtr::new(null_mut()) }; MAX_INDEX],
            home: [const { AtomicPtr::new(null_mut()) }; MAX_INDEX],
        }
    }

    /// Sets the unit of `index`, once. The unit must be zeroed, aligned to 8 bytes, and valid until
    /// the process ends. Costs one compare-exchange and a few loads and stores.
    ///
    /// # Errors
    ///
    /// Returns the present unit if `index` already has one. Returns null until the backend is
    /// [`decided`](crate::decided), because atomics and critical sections must never work on the
    /// same unit. Call [`init`](crate::init) and try again: another thread may be choosing.
    ///
    /// # Panics
    ///
    /// Panics if `index` is [`MAX_INDEX`] or more.
    pub fn install(&self, index: usize, unit: *mut u8) -> Result<(), *mut u8> {
        if !crate::decided() {
            return Err(null_mut());
        }
        self.learn();
        // Release pairs with the acquire in `unit` and the operations' loads: a thread that sees
        // the unit's address also sees its zeroes.
        self.home[index]
            .compare_exchange(null_mut(), unit, AcqRel, Acquire)
            .map(|_| self.active[index].store(unit, Release))
    }

    /// Returns words for the table's owner, in the table's first cache line.
    ///
    /// This crate does not use these words. They are 0 in a new table. Costs no load.
    #[inline(always)]
    pub fn beside(&self) -> &[AtomicUsize; BESIDE] {
        &self.beside
    }

    /// Returns the unit of `index`, or null. The index may be stopped. One load.
    pub fn unit(&self, index: usize) -> *mut u8 {
        self.home
            .get(index)
            .map_or(null_mut(), |unit| unit.load(Acquire))
    }

    /// Returns whether `index` has a unit and is stopped. Two loads.
    pub fn is_stopped(&self, index: usize) -> bool {
        !self.unit(index).is_null() && self.active(index).is_null()
    }

    /// Stops `index`: operations that begin later fail there.
    ///
    /// The unit belongs to the caller once the operations that have begun are over. That is after
    /// the next [`fence`](crate::fence()) with restartable sequences, and after
    /// [`await_stopped`](Self::await_stopped) on the atomic backend. There, an operation that takes
    /// no lock, such as [`add`](Self::add), may still change the unit later.
    ///
    /// The caller serialises `stop`, [`resume`](Self::resume) and [`install`](Self::install). Costs
    /// one store.
    pub fn stop(&self, index: usize) {
        self.active[index].store(null_mut(), Release);
    }

    /// On the atomic backend, waits for the lock of a stopped `index`'s unit, and takes the lock.
    /// Returns true at once with restartable sequences, where the fence has ended the operations.
    ///
    /// After true, follow with [`resume`](Self::resume), which unlocks the unit.
    ///
    /// Returns false if the holder of the lock does not finish within about a second. Returns false
    /// at once if the caller is a signal handler that interrupted the holder. After false, follow
    /// with [`resume_untouched`](Self::resume_untouched).
    pub fn await_stopped(&self, index: usize) -> bool {
        let unit = self.unit(index);
        // SAFETY: `unit` comes from `home`, so it stays valid until the process ends.
        unit.is_null() || !STATE.is_atomic() || unsafe { atomic::try_lock_unit(unit) }
    }

    /// Puts a stopped `index` to use again, without unlocking its unit. Two memory accesses.
    pub fn resume_untouched(&self, index: usize) {
        // Release: an operation that loads this entry sees what this thread wrote to the unit.
        self.active[index].store(self.unit(index), Release);
    }

    /// Puts a stopped `index` to use again, and unlocks its unit on the atomic backend. A few
    /// memory accesses.
    pub fn resume(&self, index: usize) {
        let unit = self.unit(index);
        if !unit.is_null() && STATE.is_atomic() {
            // SAFETY: `unit` comes from `home`, so it is valid. `await_stopped` took its lock.
            unsafe { atomic::unlock_unit(unit) };
        }
        // Release: an operation that loads this entry sees what this thread wrote to the unit.
        self.active[index].store(unit, Release);
    }

    /// Returns when every operation that began before the call has committed or was aborted.
    ///
    /// An aborted operation starts again, and sees everything that was written before the call.
    /// Costs one [`fence`](crate::fence()) with restartable sequences. On the atomic backend, takes
    /// the lock of each unit below `indexes` once. There, an operation that takes no lock, such as
    /// [`add`](Self::add), may commit after this returns.
    ///
    /// # Errors
    ///
    /// Returns [`FenceError`](crate::FenceError) if the kernel cannot fence. On the atomic backend,
    /// returns it with `EBUSY` if a unit's holder does not finish within a second, or if the caller
    /// is a signal handler that interrupted the holder.
    pub fn quiesce(&self, indexes: usize) -> Result<(), crate::FenceError> {
        if !STATE.is_atomic() {
            return crate::fence();
        }
        let units = (0..indexes.min(MAX_INDEX)).map(|index| self.unit(index));
        for unit in units.filter(|unit| !unit.is_null()) {
            // SAFETY: installed units stay valid. This thread unlocks a unit only after locking it.
            unsafe {
                if !atomic::try_lock_unit(unit) {
                    return Err(crate::FenceError { errno: libc::EBUSY });
                }
                atomic::unlock_unit(unit);
            }
        }
        Ok(())
    }

    /// Unlocks every unit below `indexes`, in the child after a `fork`.
    ///
    /// Another thread of the parent may have held a unit's lock at the moment of the fork, in an
    /// operation or in [`await_stopped`](Self::await_stopped). An operation that a handler of the
    /// calling thread interrupted keeps its lock. Does nothing with restartable sequences.
    pub fn unlock_all_in_child(&self, indexes: usize) {
        for index in 0..indexes.min(MAX_INDEX) {
            let unit = self.unit(index);
            if !unit.is_null() && STATE.is_atomic() {
                // SAFETY: `unit` comes from `home`, so it is valid. The child has one thread, so no
                // other thread works on the unit.
                unsafe { atomic::unlock_in_child(unit) };
            }
        }
    }

    /// Adds `n` to the word at `offset` of the current unit, wrapping.
    ///
    /// Returns false if there is no unit. Costs a critical section, or on the atomic backend a
    /// `fetch_add`.
    ///
    /// # Safety
    ///
    /// `offset` is a multiple of 8, is at least [`UNIT_HEADER`], and leaves 8 bytes in every
    /// installed unit.
    #[inline(always)]
    pub unsafe fn add(&self, offset: usize, n: u64) -> bool {
        either!(self, add(offset, n))
    }

    /// Adds `n` to the word at `offset` of the current unit, wrapping, while `gate` is open. An
    /// open gate has the value `offset`, and a closed gate any other value.
    ///
    /// Returns false and adds nothing if the gate is closed, if there is no unit, or (on the atomic
    /// backend) if the unit is locked. Costs one critical section, or a lock on the atomic backend.
    ///
    /// A thread that closes the gate, and then waits by [`quiesce`](Self::quiesce), knows that no
    /// unit's word moves any more until the gate opens.
    ///
    /// The add is a release: a thread that reads the new word by an acquire load sees everything
    /// that this thread did before.
    ///
    /// # Safety
    ///
    /// `offset` is a multiple of 8, is at least [`UNIT_HEADER`], and leaves 8 bytes in every
    /// installed unit.
    #[inline(always)]
    pub unsafe fn add_gated(&self, offset: usize, n: u64, gate: &AtomicUsize) -> bool {
        let gate = gate.as_ptr().cast_const();
        either!(self, add_gated(offset, n, gate))
    }

    /// Returns the word at `offset` of the current unit, or `None` if there is no unit.
    ///
    /// By the time this returns, the thread may have moved to another index. Follow with
    /// [`store_if_equal`](Self::store_if_equal), which compares again. Costs five loads with
    /// restartable sequences.
    ///
    /// # Safety
    ///
    /// `offset` is a multiple of 8, is at least [`UNIT_HEADER`], and leaves 8 bytes in every
    /// installed unit.
    #[inline]
    pub unsafe fn load(&self, offset: usize) -> Option<u64> {
        let unit = self.active[crate::current() % MAX_INDEX].load(Acquire);
        if unit.is_null() {
            return None;
        }
        // SAFETY: the caller promises that `offset` lies in every unit. Other threads may write the
        // word at the same time, so it is accessed as an atomic.
        let word = unsafe { &*unit.add(offset).cast::<core::sync::atomic::AtomicU64>() };
        Some(word.load(Acquire))
    }

    /// Stores `new` at `offset` of the current unit if the word there equals `expected`.
    ///
    /// Returns false and stores nothing if the word differs, if there is no unit, or (on the atomic
    /// backend) if the unit is locked. Costs one critical section, or a lock on the atomic backend.
    ///
    /// # Safety
    ///
    /// `offset` is a multiple of 8, is at least [`UNIT_HEADER`], and leaves 8 bytes in every
    /// installed unit.
    #[inline]
    pub unsafe fn store_if_equal(&self, offset: usize, expected: u64, new: u64) -> bool {
        either!(self, store_if_equal(offset, expected, new))
    }

    /// Takes the top pointer off the [`stack`](crate::stack) at `offset`.
    ///
    /// Returns null if the stack is empty, if there is no stack, if there is no unit, or (on the
    /// atomic backend) if the unit is locked. Costs one critical section, or a lock on the atomic
    /// backend.
    ///
    /// # Safety
    ///
    /// * `offset` is a multiple of 8, is at least [`UNIT_HEADER`], and leaves 8 bytes in every
    ///   installed unit.
    /// * The word is 0, or describes a stack that only this table's operations use.
    #[inline]
    pub unsafe fn pop(&self, offset: usize) -> *mut u8 {
        either!(self, pop(offset))
    }

    /// Puts `item`, which is not null, on the stack at `offset`.
    ///
    /// Returns false if the stack is full, if there is no stack, if there is no unit, or (on the
    /// atomic backend) if the unit is locked. Costs one critical section, or a lock on the atomic
    /// backend.
    ///
    /// # Safety
    ///
    /// The same as for [`pop`](Self::pop).
    #[inline]
    pub unsafe fn push(&self, offset: usize, item: *mut u8) -> bool {
        either!(self, push(offset, item))
    }

    /// Takes up to `items.len()` pointers off the stack at `offset`, in one operation.
    ///
    /// Writes the top pointer to the front of `items`. Returns the number of pointers taken, which
    /// is 0 where [`pop`](Self::pop) would return null. Costs one critical section with a loop, or
    /// a lock on the atomic backend.
    ///
    /// # Safety
    ///
    /// The same as for [`pop`](Self::pop).
    #[inline]
    pub unsafe fn pop_batch(&self, offset: usize, items: &mut [*mut u8]) -> usize {
        if items.is_empty() {
            return 0;
        }
        either!(self, pop_batch(offset, items.as_mut_ptr(), items.len()))
    }

    /// Puts pointers from `items` on the stack at `offset`, as many as fit, in one operation.
    ///
    /// Starts with the front of `items`. Returns the number of pointers put, which is 0 where
    /// [`push`](Self::push) would return false. Costs one critical section with a loop, or a lock
    /// on the atomic backend.
    ///
    /// # Safety
    ///
    /// The same as for [`push`](Self::push). Also, no item is null.
    #[inline]
    pub unsafe fn push_batch(&self, offset: usize, items: &[*mut u8]) -> usize {
        if items.is_empty() {
            return 0;
        }
        either!(self, push_batch(offset, items.as_ptr(), items.len()))
    }

    /// Returns the unit of `index`, or null if there is none or the index is stopped.
    pub(crate) fn active(&self, index: usize) -> *mut u8 {
        self.active
            .get(index)
            .map_or(null_mut(), |unit| unit.load(Acquire))
    }

    /// Returns where the critical sections find the current unit, or `None` on the atomic backend
    /// and until a unit is installed. Two loads.
    ///
    /// For a fast path that must contain no call: its slow path calls the operations of this type,
    /// which also work on the atomic backend.
    #[inline(always)]
    pub fn area(&self) -> Option<Area> {
        let area = self.area_unchecked();
        let area = (area.cs != 0).then_some(area);
        #[cfg(debug_assertions)]
        if let Some(area) = &area {
            crate::owner::check(area);
        }
        area
    }

    /// Returns what [`area`](Self::area) does, without a test of the backend.
    ///
    /// # Safety
    ///
    /// [`learn`](Self::learn) has returned `Some`, or [`install`](Self::install) was called while
    /// [`backend`](crate::backend) was not [`Backend::Atomic`](crate::Backend::Atomic).
    #[inline(always)]
    pub unsafe fn known_area(&self) -> Area {
        self.area_unchecked()
    }

    #[inline(always)]
    fn area_unchecked(&self) -> Area {
        // Acquire pairs with the release in `learn`: a thread that reads the offset of `rseq_cs`
        // also reads the offset of the index. On x86-64 the acquire only keeps the compiler from
        // loading the index first.
        let cs = self.cs.load(Acquire);
        let index = self.index.load(Relaxed);
        let table = core::ptr::from_ref(self).cast();
        Area { cs, index, table }
    }

    /// Copies into this table where `rseq_cs` and the index are, as offsets from the thread
    /// pointer. Returns both offsets, or `None` on the atomic backend and until the backend is
    /// chosen.
    #[cold]
    pub fn learn(&self) -> Option<(isize, isize)> {
        let (cs, index) = STATE.offsets();
        if cs == 0 {
            return None;
        }
        self.index.store(index, Relaxed);
        // Release pairs with the acquire in `area_unchecked`: a thread that reads `cs` also reads
        // `index`.
        self.cs.store(cs, Release);
        Some((cs, index))
    }
}
