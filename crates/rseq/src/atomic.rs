//! The atomic backend: the same operations without restartable sequences.
//!
//! Without care, a thread that is preempted in an operation could make every other thread wait, and
//! a signal handler could wait for the operation that it interrupted. So an operation never waits
//! for long:
//!
//! * An operation on one word (`add`, `store`, `and`, `or`, `fetch_add`, `swap`,
//!   `compare_exchange`) is one atomic instruction and takes no lock. `add_pair` is two of them.
//! * Each other operation that writes takes the lock in the unit's header. The lock is a word: 0
//!   while free, otherwise the holder's [`token`]. After [`TRIES`] attempts the operation fails as
//!   if the unit were missing, and the caller takes its slow path.
#![allow(unsafe_code, reason = "works on the units' raw memory")]

use crate::shard::{self, Claim, DISTANCE_BITS};
use crate::stack::STACK_ALIGN;
use crate::state::STATE;
use crate::units::Units;
use crate::words::{MISSING, RING_SLOTS, RING_TAIL};
use crate::{kernel, syscall};
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU64, AtomicUsize};

/// The maximum number of attempts of an operation to take a unit's lock. These attempts take about
/// as long as a running holder keeps the lock.
const TRIES: u32 = 64;

/// Returns the word at `offset` of `unit`.
///
/// # Safety
///
/// `unit` is an installed unit, and `offset` is one that [`Units::add`] allows.
unsafe fn word<'u>(unit: *mut u8, offset: usize) -> &'u AtomicU64 {
    // SAFETY: installed units stay valid until the process ends, and `offset` is aligned and lies
    // inside.
    unsafe { &*unit.add(offset).cast() }
}

/// Returns the lock of `unit`.
///
/// # Safety
///
/// `unit` is an installed unit.
unsafe fn lock_word<'u>(unit: *mut u8) -> &'u AtomicU64 {
    // SAFETY: a unit begins with [`UNIT_HEADER`](crate::UNIT_HEADER) bytes that belong to this
    // crate.
    unsafe { &*unit.cast() }
}

/// Returns the current unit. Returns `None` if there is no unit, or if operations on it are
/// critical sections.
///
/// Atomics and critical sections must never work on the same unit. A thread that found no backend
/// may arrive here after another thread has chosen restartable sequences and installed a unit. The
/// order of the loads detects this case. A unit is installed only after the backend is chosen, and
/// this function loads the unit before it asks for the backend. So if it finds the unit, it also
/// finds the backend, and returns `None`.
fn unit_here(units: &Units) -> Option<*mut u8> {
    // Acquire, in `active`, pairs with the release in `install`: a thread that sees the unit also
    // sees the backend.
    let unit = units.active(crate::current());
    (!unit.is_null() && STATE.is_atomic()).then_some(unit)
}

/// The current unit, locked for one operation.
struct Held {
    unit: *mut u8,
}

impl Held {
    fn current(units: &Units) -> Option<Held> {
        let unit = unit_here(units)?;
        // SAFETY: `unit_here` returned an installed unit.
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

impl Held {
    /// Returns the words at `offsets` of the unit.
    ///
    /// # Safety
    ///
    /// Each offset is one that [`Units::add`] allows.
    unsafe fn words<const N: usize>(&self, offsets: [usize; N]) -> [&AtomicU64; N] {
        // SAFETY: `current` found an installed unit. The caller promises the offsets.
        offsets.map(|offset| unsafe { word(self.unit, offset) })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: `current` returned this `Held` only after it locked the unit.
        unsafe { unlock_unit(self.unit) };
    }
}

/// Takes a unit's lock, but gives up after about a second.
///
/// Gives up at once if the caller is a signal handler that interrupted the holder.
///
/// # Safety
///
/// `unit` is an installed unit.
pub(crate) unsafe fn try_lock_unit(unit: *mut u8) -> bool {
    const YIELDS: u32 = 100;
    const NAPS: u32 = 10_000;
    let nap = libc::timespec {
        tv_sec: 0,
        tv_nsec: 50_000,
    };
    // SAFETY: the caller promises an installed unit.
    let lock = unsafe { lock_word(unit) };
    for turn in 0..YIELDS + NAPS {
        match take(lock) {
            Ok(()) => return true,
            Err(holder) if holder == token() => return false,
            // The holder may be preempted, on this CPU or on another, so this thread yields and
            // later sleeps.
            Err(_) if turn < YIELDS => kernel::yield_now(),
            // SAFETY: `nap` is a valid time on this thread's stack.
            Err(_) => unsafe {
                let _ = syscall(libc::SYS_nanosleep, [(&raw const nap) as usize, 0]);
            },
        }
    }
    false
}

/// Returns the number that this thread writes into a lock as its holder: its thread pointer.
fn token() -> u64 {
    crate::thread_pointer() as u64
}

/// Takes a unit's lock if it is free. Otherwise returns the holder's [`token`].
fn take(lock: &AtomicU64) -> Result<(), u64> {
    // Acquire pairs with the release in `unlock_unit`: this thread sees what the last holder wrote
    // to the unit.
    lock.compare_exchange(0, token(), Acquire, Relaxed)
        .map(|_| ())
}

/// Gives the lock of a unit back in the child after a fork, unless an interrupted frame of the only
/// thread holds it.
///
/// # Safety
///
/// `unit` is an installed unit, and the process has one thread.
pub(crate) unsafe fn unlock_in_child(unit: *mut u8) {
    // SAFETY: the caller promises an installed unit. The holder's thread does not exist.
    unsafe {
        if lock_word(unit).load(Relaxed) != token() {
            unlock_unit(unit);
        }
    }
}

/// Gives a unit's lock back.
///
/// # Safety
///
/// `unit` is an installed unit. The caller holds its lock, or no other thread works on the unit.
pub(crate) unsafe fn unlock_unit(unit: *mut u8) {
    // SAFETY: the caller promises an installed unit. Release pairs with the acquire in `take`: the
    // next holder sees what this thread wrote to the unit.
    unsafe { lock_word(unit) }.store(0, Release);
}

// The operations of a table that has no `Area`. The safety requirements are those of the methods of
// `Units` with the same names. Until a backend is chosen there is no unit, so they fail.

/// Adds by one atomic instruction.
#[cold]
#[inline(never)]
pub(crate) unsafe fn add(units: &Units, offset: usize, n: u64) -> bool {
    let Some(unit) = unit_here(units) else {
        return false;
    };
    // SAFETY: `unit_here` returned an installed unit. The caller promises that every unit has a
    // word at `offset`.
    unsafe { word(unit, offset) }.fetch_add(n, Relaxed);
    true
}

/// Defines an operation on one word, which takes no lock.
macro_rules! on_word {
    ($name:ident($($arg:ident),*) -> $of:ty: |$word:ident| $change:expr $(, $finish:ident)?) => {
        #[cold]
        #[inline(never)]
        pub(crate) unsafe fn $name(units: &Units, offset: usize, $($arg: u64),*) -> $of {
            let done = unit_here(units).map(|unit| {
                // SAFETY: `unit_here` returned an installed unit. The caller promises that every
                // unit has a word at `offset`.
                let $word = unsafe { word(unit, offset) };
                $change
            });
            done$(.$finish())?
        }
    };
}

on_word!(store(value) -> bool: |word| word.store(value, Release), is_some);
on_word!(and(mask) -> bool: |word| word.fetch_and(mask, AcqRel), is_some);
on_word!(or(mask) -> bool: |word| word.fetch_or(mask, AcqRel), is_some);
on_word!(fetch_add(n) -> Option<u64>: |word| word.fetch_add(n, AcqRel));
on_word!(swap(value) -> Option<u64>: |word| word.swap(value, AcqRel));
on_word!(compare_exchange(expected, new) -> Option<u64>: |word| {
    let done = word.compare_exchange(expected, new, AcqRel, Acquire);
    done.unwrap_or_else(|old| old)
});

#[cold]
#[inline(never)]
pub(crate) unsafe fn count_up(units: &Units, offset: usize, n: i64) -> i64 {
    // SAFETY: the caller keeps the contract of `count`.
    unsafe { count(units, offset, n, 1) }
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn count_down(units: &Units, offset: usize, n: i64) -> i64 {
    // SAFETY: the caller keeps the contract of `count`.
    unsafe { count(units, offset, n, -1) }
}

/// Moves a shard's `up` by `n` if `sign` is 1, and `down` if it is -1.
unsafe fn count(units: &Units, offset: usize, n: i64, sign: i64) -> i64 {
    let Some(held) = Held::current(units) else {
        return i64::MIN;
    };
    // SAFETY: the caller promises that every unit has a shard at `offset`.
    let shard = unsafe { held.words(shard::words_at(offset)) };
    let [batch, folded, down, up] = [3, 2, 1, 0].map(|at| shard[at].load(Acquire) as i64);
    let distance = up.wrapping_sub(down).wrapping_sub(folded);
    let left = batch
        .wrapping_sub(distance.wrapping_mul(sign))
        .wrapping_sub(n);
    if left.wrapping_add(batch) as u64 >> DISTANCE_BITS != 0 {
        return i64::MIN;
    }
    let (word, now) = if sign > 0 {
        (shard[0], up)
    } else {
        (shard[1], down)
    };
    word.store(now.wrapping_add(n) as u64, Release);
    left
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn claim(units: &Units, offset: usize, token: u64) -> Option<Claim> {
    let held = Held::current(units)?;
    // SAFETY: the caller promises that every unit has a shard at `offset`.
    let shard = unsafe { held.words(shard::words_at(offset)) };
    let [batch, folded, down, up] = [3, 2, 1, 0].map(|at| shard[at].load(Acquire));
    let net = up.wrapping_sub(down);
    if batch as i64 <= 0 || shard::is_claimed(net, folded) {
        return None;
    }
    shard[2].store(net.wrapping_add(token), Release);
    Claim::new(shard[0].as_ptr().cast(), [net, folded, batch])
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn add_gated(units: &Units, offset: usize, n: u64, gate: *const usize) -> bool {
    let Some(held) = Held::current(units) else {
        return false;
    };
    // SAFETY: the caller promises a readable gate, which all threads access atomically.
    let gate = unsafe { AtomicUsize::from_ptr(gate.cast_mut()) };
    // Relaxed: `held` orders this load. A thread that has closed the gate takes this lock before it
    // relies on the gate.
    let is_open = gate.load(Relaxed) == offset;
    if is_open {
        // SAFETY: the caller promises that every unit has a word at `offset`.
        let [word] = unsafe { held.words([offset]) };
        // Release pairs with the acquire of a thread that reads the word without the lock.
        word.store(word.load(Relaxed).wrapping_add(n), Release);
    }
    is_open
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn store_if_equal(units: &Units, offset: usize, expected: u64, new: u64) -> bool {
    let Some(held) = Held::current(units) else {
        return false;
    };
    // SAFETY: the caller promises that every unit has a word at `offset`.
    let [word] = unsafe { held.words([offset]) };
    let equal = word.load(Relaxed) == expected;
    if equal {
        word.store(new, Relaxed);
    }
    equal
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn compare_exchange_pair(
    units: &Units,
    offset: usize,
    first_expected: u64,
    second_expected: u64,
    first_new: u64,
    second_new: u64,
) -> bool {
    let Some(held) = Held::current(units) else {
        return false;
    };
    // SAFETY: the caller promises that every unit has two words at `offset`.
    let words = unsafe { held.words([offset, offset + 8]) };
    let equal = words.map(|word| word.load(Relaxed)) == [first_expected, second_expected];
    if equal {
        // Release pairs with the acquire of a thread that reads a word without the lock.
        words[0].store(first_new, Release);
        words[1].store(second_new, Release);
    }
    equal
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn add_pair(units: &Units, offset: usize, n0: u64, n1: u64) -> bool {
    let Some(unit) = unit_here(units) else {
        return false;
    };
    for (at, n) in [(offset, n0), (offset + 8, n1)] {
        // SAFETY: `unit_here` returned an installed unit. The caller promises that every unit has
        // two words at `offset`. Release pairs with the acquire of a thread that reads a word.
        unsafe { word(unit, at) }.fetch_add(n, Release);
    }
    true
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn store_two_if_equal(
    units: &Units,
    offset: usize,
    expected: u64,
    new: u64,
    other: usize,
    value: u64,
) -> bool {
    let Some(held) = Held::current(units) else {
        return false;
    };
    // SAFETY: the caller promises that every unit has both words.
    let [word, other] = unsafe { held.words([offset, other]) };
    let equal = word.load(Relaxed) == expected;
    if equal {
        other.store(value, Relaxed);
        // Release pairs with the acquire of a thread that reads the word.
        word.store(new, Release);
    }
    equal
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn store_if_both_equal(
    units: &Units,
    offset: usize,
    expected: u64,
    new: u64,
    other: usize,
    other_expected: u64,
) -> bool {
    let Some(held) = Held::current(units) else {
        return false;
    };
    // SAFETY: the caller promises that every unit has both words.
    let words = unsafe { held.words([offset, other]) };
    let equal = words.map(|word| word.load(Relaxed)) == [expected, other_expected];
    if equal {
        // Release pairs with the acquire of a thread that reads the word.
        words[0].store(new, Release);
    }
    equal
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn pop(units: &Units, offset: usize) -> *mut u8 {
    let mut item = null_mut();
    // SAFETY: the caller promises that the word at `offset` is 0 or describes a stack. `item` has
    // room for one pointer.
    unsafe { pop_batch(units, offset, &raw mut item, 1) };
    item
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn push(units: &Units, offset: usize, item: *mut u8) -> bool {
    // SAFETY: the caller promises that the word at `offset` is 0 or describes a stack, and that
    // `item` is not null.
    unsafe { push_batch(units, offset, &raw const item, 1) == 1 }
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn pop_batch(
    units: &Units,
    offset: usize,
    items: *mut *mut u8,
    room: usize,
) -> usize {
    let Some(held) = Held::current(units) else {
        return 0;
    };
    // SAFETY: the caller promises that every unit has a word at `offset`.
    let [word] = unsafe { held.words([offset]) };
    let mut top = word.load(Relaxed) as *mut *mut u8;
    if top.is_null() {
        return 0;
    }
    let mut taken = 0;
    while taken < room {
        // SAFETY: `top` is not null, so it is the top of a stack. The slot below it is an item or
        // the guard.
        let item = unsafe { *top.sub(1) };
        if item.is_null() {
            break;
        }
        // SAFETY: the caller promises that `items` has room for `room` pointers. The slot below
        // `top` held an item, so the guard is further down in the block.
        unsafe {
            *items.add(taken) = item;
            top = top.sub(1);
        }
        taken += 1;
    }
    word.store(top as u64, Relaxed);
    taken
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn push_batch(
    units: &Units,
    offset: usize,
    items: *const *mut u8,
    count: usize,
) -> usize {
    let Some(held) = Held::current(units) else {
        return 0;
    };
    // SAFETY: the caller promises that every unit has a word at `offset`.
    let [word] = unsafe { held.words([offset]) };
    let mut top = word.load(Relaxed) as *mut *mut u8;
    let mut put = 0;
    while put < count && !(top as usize).is_multiple_of(STACK_ALIGN) {
        // SAFETY: a top that is not a multiple of `STACK_ALIGN` is the address of a free slot, so
        // the next address is at most one past the block's end. `held` keeps other threads out. The
        // caller promises `count` pointers.
        unsafe {
            *top = *items.add(put);
            top = top.add(1);
        }
        put += 1;
    }
    word.store(top as u64, Relaxed);
    put
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn list_push(units: &Units, offset: usize, item: *mut u8) -> bool {
    let Some(held) = Held::current(units) else {
        return false;
    };
    // SAFETY: the caller promises the list, and that the item's first word belongs to the caller.
    unsafe {
        let [head] = held.words([offset]);
        item.cast::<u64>().write(head.load(Relaxed));
        // Release pairs with the acquire of a thread that reads the head.
        head.store(item as u64, Release);
    }
    true
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn list_pop(units: &Units, offset: usize) -> *mut u8 {
    let Some(held) = Held::current(units) else {
        return null_mut();
    };
    // SAFETY: the caller promises the list, so the first item is mapped while this thread holds the
    // lock.
    unsafe {
        let [head] = held.words([offset]);
        let item = head.load(Relaxed) as *mut u8;
        if !item.is_null() {
            head.store(item.cast::<u64>().read(), Relaxed);
        }
        item
    }
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn list_take(units: &Units, offset: usize) -> *mut u8 {
    let Some(held) = Held::current(units) else {
        return null_mut();
    };
    // SAFETY: the caller promises the list.
    let [head] = unsafe { held.words([offset]) };
    head.swap(0, AcqRel) as *mut u8
}

#[cold]
#[inline(never)]
pub(crate) unsafe fn append(
    units: &Units,
    offset: usize,
    mask: usize,
    from: *const u64,
    words: usize,
    slot: usize,
) -> u64 {
    let Some(held) = Held::current(units) else {
        return MISSING;
    };
    // SAFETY: the caller promises the ring.
    let [head, tail] = unsafe { held.words([offset, offset + RING_TAIL]) };
    let at = head.load(Relaxed);
    // Acquire pairs with the reader's release: the reader has read the slots below the tail.
    let used = at.wrapping_sub(tail.load(Acquire));
    if used > mask as u64 {
        return used;
    }
    let first = offset + RING_SLOTS + (at as usize & mask);
    for n in 0..words {
        // SAFETY: the caller promises `words` words at `from`, and that they fit in the slot at
        // `first`, which lies in the ring.
        unsafe { held.words([first + n * 8])[0].store(*from.add(n), Relaxed) };
    }
    // Release pairs with the acquire of the reader, which sees the record.
    head.store(at.wrapping_add(slot as u64), Release);
    0
}
