//! Architectures without critical sections. The atomic backend does all the work.
//!
//! `registration` returns `None`, so no code calls the functions below it.

use crate::state::Registration;

pub(crate) const SUPPORTED: bool = false;

pub(crate) fn registration() -> Option<Registration> {
    None
}

/// Returns the address of the calling thread's `errno`. Each thread has its own, so the address
/// identifies the thread.
pub(crate) fn thread_pointer() -> usize {
    // SAFETY: `__errno_location` has no preconditions.
    unsafe { libc::__errno_location() as usize }
}

/// Returns false: the program cannot know here whether a debugger steps through it.
#[inline(always)]
pub(crate) fn is_stepped() -> bool {
    false
}

macro_rules! never {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {$(
        pub(crate) unsafe fn $name($(_: $type),*) -> $result {
            unreachable!("no registration on this architecture")
        }
    )*};
}

never! {
    read_index(offset: isize) -> u32;
    add(cs: isize, index: isize, table: *const *mut u8, offset: usize, n: u64) -> bool;
    add_within(cs: isize, index: isize, table: *const *mut u8, offset: usize, n: i64) -> bool;
    store_if_equal(cs: isize, index: isize, table: *const *mut u8, offset: usize, expected: u64, new: u64) -> bool;
    pop(cs: isize, index: isize, table: *const *mut u8, offset: usize) -> *mut u8;
    push(cs: isize, index: isize, table: *const *mut u8, offset: usize, item: *mut u8) -> bool;
    pop_batch(cs: isize, index: isize, table: *const *mut u8, offset: usize, items: *mut *mut u8, room: usize) -> usize;
    push_batch(cs: isize, index: isize, table: *const *mut u8, offset: usize, items: *const *mut u8, count: usize) -> usize;
    store(cs: isize, index: isize, table: *const *mut u8, offset: usize, operand: u64) -> bool;
    and(cs: isize, index: isize, table: *const *mut u8, offset: usize, operand: u64) -> bool;
    or(cs: isize, index: isize, table: *const *mut u8, offset: usize, operand: u64) -> bool;
    fetch_add(cs: isize, index: isize, table: *const *mut u8, offset: usize, operand: u64) -> Option<u64>;
    swap(cs: isize, index: isize, table: *const *mut u8, offset: usize, operand: u64) -> Option<u64>;
    compare_exchange(cs: isize, index: isize, table: *const *mut u8, offset: usize, expected: u64, new: u64) -> Option<u64>;
    compare_exchange_pair(cs: isize, index: isize, table: *const *mut u8, offset: usize, expected: [u64; 2], new: [u64; 2]) -> bool;
    store_two_if_equal(cs: isize, index: isize, table: *const *mut u8, offset: usize, stored: [u64; 2], other: (usize, u64)) -> bool;
    store_if_both_equal(cs: isize, index: isize, table: *const *mut u8, offset: usize, stored: [u64; 2], other: (usize, u64)) -> bool;
    list_push(cs: isize, index: isize, table: *const *mut u8, offset: usize, item: *mut u8) -> bool;
    list_pop(cs: isize, index: isize, table: *const *mut u8, offset: usize) -> *mut u8;
    append(cs: isize, index: isize, table: *const *mut u8, ring: usize, mask: usize, from: *const u64, words: usize, step: usize) -> crate::words::Append;
    spin_until_aborted(cs: isize, spins: u64) -> bool;
}

pub(crate) unsafe fn pop_counted<const COUNT: usize>(
    _: isize,
    _: isize,
    _: *const *mut u8,
    _: usize,
    _: i64,
) -> *mut u8 {
    unreachable!("no registration on this architecture")
}
