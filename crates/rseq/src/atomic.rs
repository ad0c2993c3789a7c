//! The atomic backend: the same operations without restartable sequences.
//!
//! Words are atomics. `add` is one `fetch_add`; the other operations hold the lock in the unit's header, a word that
//! is 0 while free and names the holder's thread else. Nobody waits long for it: a holder can be preempted, or be the
//! very frame that a signal handler interrupted, so after [`TRIES`] the operation fails as it would on an empty or full
//! stack, and the caller's slow path takes over.
#![allow(unsafe_code, reason = "works on the units' raw memory")]

use crate::arch;
use crate::stack::STACK_ALIGN;
use crate::state::STATE;
use crate::units::Units;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64};

/// How often an operation tries the lock: about as long as a holder that runs needs to be done.
const TRIES: u32 = 64;

/// The word at `offset` of `unit`.
///
/// # Safety
///
/// As for [`Units::add`]; `unit` is an installed unit.
unsafe fn word<'u>(unit: *mut u8, offset: usize) -> &'u AtomicU64 {
    // SAFETY: installed units are valid for ever, and the caller keeps `offset` inside and aligned.
    unsafe { &*unit.add(offset).cast() }
}

/// # Safety
///
/// `unit` is an installed unit.
unsafe fn lock_word<'u>(unit: *mut u8) -> &'u AtomicU32 {
    // SAFETY: the header is this crate's and large enough.
    unsafe { &*unit.cast() }
}

/// Returns the current unit, if the operations on it use atomics.
///
/// A thread that saw no backend may come here after another thread has chosen restartable sequences
/// and installed a unit. The order of the two loads keeps it from that unit: the thread that
/// installs a unit has chosen before.
fn unit_here(units: &Units) -> Option<*mut u8> {
    // Acquire, in `active`, pairs with the release in `install`.
    let unit = units.active(crate::current());
    (!unit.is_null() && STATE.is_atomic()).then_some(unit)
}

/// The current unit, locked, for one operation.
struct Held {
    unit: *mut u8,
}

impl Held {
    fn current(units: &Units) -> Option<Held> {
        let unit = unit_here(units)?;
        // SAFETY: installed units are valid for ever.
        let lock = unsafe { lock_word(unit) };
        for _ in 0..TRIES {
            if lock.load(Relaxed) == 0 && take(lock).is_ok() {
                return Some(Held { unit });
            }
            core::hint::spin_loop();
        }
        None
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: `current` locked it.
        unsafe { unlock_unit(self.unit) };
    }
}

/// Takes a unit's lock, however long it takes; for whoever stops the unit.
///
/// # Safety
///
/// `unit` is an installed unit.
pub(crate) unsafe fn lock_unit(unit: *mut u8) {
    // SAFETY: the caller's promise.
    let lock = unsafe { lock_word(unit) };
    while take(lock).is_err() {
        // SAFETY: no preconditions. The holder may be a preempted thread.
        unsafe { libc::sched_yield() };
    }
}

/// As [`lock_unit`], but gives up after about a second, and at once when the holder is the very frame that a signal handler, the
/// caller, has interrupted.
///
/// # Safety
///
/// As there.
pub(crate) unsafe fn try_lock_unit(unit: *mut u8) -> bool {
    const YIELDS: u32 = 100;
    const NAPS: u32 = 10_000;
    let nap = libc::timespec {
        tv_sec: 0,
        tv_nsec: 50_000,
    };
    // SAFETY: the caller's promise.
    let lock = unsafe { lock_word(unit) };
    for turn in 0..YIELDS + NAPS {
        match take(lock) {
            Ok(()) => return true,
            Err(holder) if holder == token() => return false,
            // The holder may be a preempted thread, here or on another CPU.
            // SAFETY: no preconditions; the time is readable.
            Err(_) if turn < YIELDS => unsafe { libc::sched_yield() },
            // SAFETY: as above.
            Err(_) => unsafe { libc::nanosleep(&raw const nap, null_mut()) },
        };
    }
    false
}

/// What a holder writes into a unit's lock: half of its thread pointer, which tells it from most others, and never 0.
fn token() -> u32 {
    crate::thread_pointer() as u32 | 1
}

/// Takes a unit's lock if it is free; else the holder's token.
fn take(lock: &AtomicU32) -> Result<(), u32> {
    // Acquire pairs with the release of the holder before: its words are seen.
    lock.compare_exchange(0, token(), Acquire, Relaxed)
        .map(|_| ())
}

/// # Safety
///
/// `unit` is an installed unit that the caller has locked.
pub(crate) unsafe fn unlock_unit(unit: *mut u8) {
    // SAFETY: the caller's promise. Release pairs with the acquire of the next holder.
    unsafe { lock_word(unit) }.store(0, Release);
}

/// # Safety
///
/// Here and below: as for the method of [`Units`].
#[cold]
#[inline(never)]
pub(crate) unsafe fn add(units: &Units, offset: usize, n: u64) -> bool {
    if let Some((cs, index)) = units.learn() {
        // SAFETY: the offsets come from a successful registration; the caller's promise covers the rest.
        return unsafe { arch::add(cs, index, units.table(), offset, n) };
    }
    let Some(unit) = unit_here(units) else {
        return false;
    };
    // SAFETY: the caller's promise.
    unsafe { word(unit, offset) }.fetch_add(n, Relaxed);
    true
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn add_within(units: &Units, offset: usize, n: i64) -> bool {
    if let Some((cs, index)) = units.learn() {
        // SAFETY: the offsets come from a successful registration; the caller's promise covers the rest.
        return unsafe { arch::add_within(cs, index, units.table(), offset, n) };
    }
    let Some(held) = Held::current(units) else {
        return false;
    };
    // SAFETY: the caller's promise.
    let (word, limit) = unsafe { (word(held.unit, offset), word(held.unit, offset + 8)) };
    let now = word.load(Relaxed);
    let fits = limit.load(Acquire).wrapping_sub(now) as i64 >= n;
    if fits {
        word.store(now.wrapping_add_signed(n), Release);
    }
    fits
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn store_if_equal(units: &Units, offset: usize, expected: u64, new: u64) -> bool {
    if let Some((cs, index)) = units.learn() {
        // SAFETY: the offsets come from a successful registration; the caller's promise covers the rest.
        return unsafe { arch::store_if_equal(cs, index, units.table(), offset, expected, new) };
    }
    let Some(held) = Held::current(units) else {
        return false;
    };
    // SAFETY: the caller's promise.
    let word = unsafe { word(held.unit, offset) };
    let equal = word.load(Relaxed) == expected;
    if equal {
        word.store(new, Relaxed);
    }
    equal
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn pop(units: &Units, offset: usize) -> *mut u8 {
    let mut item = [null_mut()];
    // SAFETY: the caller's promise.
    unsafe { pop_batch(units, offset, &mut item) };
    item[0]
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn push(units: &Units, offset: usize, item: *mut u8) -> bool {
    // SAFETY: the caller's promise.
    unsafe { push_batch(units, offset, &[item]) == 1 }
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn pop_batch(units: &Units, offset: usize, items: &mut [*mut u8]) -> usize {
    if let Some((cs, index)) = units.learn() {
        // SAFETY: the offsets come from a successful registration; the caller's promise covers the rest.
        return unsafe {
            arch::pop_batch(
                cs,
                index,
                units.table(),
                offset,
                items.as_mut_ptr(),
                items.len(),
            )
        };
    }
    let Some(held) = Held::current(units) else {
        return 0;
    };
    // SAFETY: the caller's promise.
    let word = unsafe { word(held.unit, offset) };
    let mut top = word.load(Relaxed) as *mut *mut u8;
    if top.is_null() {
        return 0;
    }
    let mut taken = 0;
    for place in items {
        // SAFETY: a stack has a slot below its top: an item, or the guard.
        let item = unsafe { *top.sub(1) };
        if item.is_null() {
            break;
        }
        *place = item;
        // SAFETY: not below the guard, which was not reached.
        top = unsafe { top.sub(1) };
        taken += 1;
    }
    word.store(top as u64, Relaxed);
    taken
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn push_batch(units: &Units, offset: usize, items: &[*mut u8]) -> usize {
    if let Some((cs, index)) = units.learn() {
        // SAFETY: the offsets come from a successful registration; the caller's promise covers the rest.
        return unsafe {
            arch::push_batch(
                cs,
                index,
                units.table(),
                offset,
                items.as_ptr(),
                items.len(),
            )
        };
    }
    let Some(held) = Held::current(units) else {
        return 0;
    };
    // SAFETY: the caller's promise.
    let word = unsafe { word(held.unit, offset) };
    let mut top = word.load(Relaxed) as *mut *mut u8;
    let mut put = 0;
    for &item in items {
        if (top as usize).is_multiple_of(STACK_ALIGN) {
            break;
        }
        // SAFETY: a top that is not on the boundary has a free slot at it.
        unsafe { *top = item };
        // SAFETY: at most the boundary, one past the last slot.
        top = unsafe { top.add(1) };
        put += 1;
    }
    word.store(top as u64, Relaxed);
    put
}
