//! The critical sections on a word, two words, a list and a ring, for aarch64.
//!
//! Each function returns `None` or false if the current index has no unit. The macro `template!` is
//! that of the parent module. Each commit is a release.

use super::{ABORTS, FIRST, MAX_INDEX, PATIENCE, asm};
use crate::words::{Append, MISSING, RING_SLOTS, RING_TAIL};

/// Defines a section that changes the word at `offset` by one instruction with `operand`.
macro_rules! change {
    ($(#[$documentation:meta])* $name:ident, $instruction:literal) => {
        $(#[$documentation])*
        ///
        /// # Safety
        ///
        /// The same as for [`add`](super::add).
        #[inline(always)]
        pub(crate) unsafe fn $name(
            cs: isize,
            index: isize,
            table: *const *mut u8,
            offset: usize,
            operand: u64,
        ) -> bool {
            // SAFETY: the caller promises that the rseq area is registered, and that every unit has
            // a word at `offset`. The section writes only that word.
            unsafe {
                template!(
                    fail: "{fail}",
                    body: [
                        "add x9, x9, {offset}",
                        "ldr x11, [x9]",
                        $instruction,
                        "stlr x11, [x9]", // commit
                    ],
                    cold: [],
                    cs = in(reg) cs,
                    index = in(reg) index,
                    table = in(reg) table,
                    offset = in(reg) offset,
                    operand = in(reg) operand,
                    fail = label { return false },
                );
            }
            true
        }
    };
}

change!(
    /// Runs [`Units::store`](crate::Units::store) as a critical section.
    store,
    "mov x11, {operand}"
);
change!(
    /// Runs [`Units::and`](crate::Units::and) as a critical section.
    and,
    "and x11, x11, {operand}"
);
change!(
    /// Runs [`Units::or`](crate::Units::or) as a critical section.
    or,
    "orr x11, x11, {operand}"
);

/// Defines a section that returns the word at `offset` and changes the word by one instruction with
/// `operand`.
macro_rules! exchange {
    ($(#[$documentation:meta])* $name:ident, $instruction:literal) => {
        $(#[$documentation])*
        ///
        /// # Safety
        ///
        /// The same as for [`add`](super::add).
        #[inline(always)]
        pub(crate) unsafe fn $name(
            cs: isize,
            index: isize,
            table: *const *mut u8,
            offset: usize,
            operand: u64,
        ) -> Option<u64> {
            let (old, done): (u64, u64);
            // SAFETY: the caller promises that the rseq area is registered, and that every unit has
            // a word at `offset`. The section writes only that word.
            unsafe {
                template!(
                    fail: "6b",
                    body: [
                        "mov {done}, #1",
                        "add x9, x9, {offset}",
                        "ldr {old}, [x9]",
                        $instruction,
                        "stlr x11, [x9]", // commit
                    ],
                    cold: ["6:", "mov {done}, xzr", "b 4f"],
                    cs = in(reg) cs,
                    index = in(reg) index,
                    table = in(reg) table,
                    offset = in(reg) offset,
                    operand = in(reg) operand,
                    old = out(reg) old,
                    done = out(reg) done,
                );
            }
            (done != 0).then_some(old)
        }
    };
}

exchange!(
    /// Runs [`Units::fetch_add`](crate::Units::fetch_add) as a critical section.
    fetch_add,
    "add x11, {old}, {operand}"
);
exchange!(
    /// Runs [`Units::swap`](crate::Units::swap) as a critical section.
    swap,
    "mov x11, {operand}"
);

/// Runs [`Units::compare_exchange`](crate::Units::compare_exchange) as a critical section. Returns
/// the word as it was, which equals `expected` if the section stored `new`.
///
/// # Safety
///
/// The same as for [`add`](super::add).
#[inline(always)]
pub(crate) unsafe fn compare_exchange(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    expected: u64,
    new: u64,
) -> Option<u64> {
    let (old, done): (u64, u64);
    // SAFETY: the caller promises that the rseq area is registered, and that every unit has a word
    // at `offset`. The section writes only that word.
    unsafe {
        template!(
            fail: "6b",
            body: [
                "mov {done}, #1",
                "add x9, x9, {offset}",
                "ldr {old}, [x9]",
                "cmp {old}, {expected}",
                "b.ne 4f",
                "stlr {new}, [x9]", // commit
            ],
            cold: ["6:", "mov {done}, xzr", "b 4f"],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            expected = in(reg) expected,
            new = in(reg) new,
            old = out(reg) old,
            done = out(reg) done,
        );
    }
    (done != 0).then_some(old)
}

/// Runs [`Units::compare_exchange_pair`](crate::Units::compare_exchange_pair) as a critical
/// section.
///
/// An interrupt may divide the two stores of an `stp`, and the abort would leave one of them. So
/// the section commits with an exclusive store of both words, which happens as a whole or not at
/// all.
///
/// # Safety
///
/// The same as for [`add`](super::add), for the 16 bytes at `offset`, which is a multiple of 16
/// from the start of a unit that is aligned to 16 bytes.
#[inline(always)]
pub(crate) unsafe fn compare_exchange_pair(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    expected: [u64; 2],
    new: [u64; 2],
) -> bool {
    // SAFETY: the caller promises that the rseq area is registered, and that every unit has two
    // words at `offset`. The section writes only these words. If another thread writes to the same
    // cache line, the exclusive store fails, and the section starts again.
    unsafe {
        template!(
            fail: "{fail}",
            body: [
                "add x11, x9, {offset}",
                "ldxp x9, {second}, [x11]",
                "cmp x9, {first_expected}",
                "ccmp {second}, {second_expected}, #0, eq",
                "b.ne {fail}",
                "stlxp {second:w}, {first_new}, {second_new}, [x11]", // commit
            ],
            after: ["cbnz {second:w}, 5b"],
            cold: [],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            first_expected = in(reg) expected[0],
            second_expected = in(reg) expected[1],
            first_new = in(reg) new[0],
            second_new = in(reg) new[1],
            second = out(reg) _,
            fail = label { return false },
        );
    }
    true
}

/// Runs [`Units::store_two_if_equal`](crate::Units::store_two_if_equal) as a critical section.
///
/// # Safety
///
/// The same as for [`add`](super::add), for the words at `offset` and at `other`.
#[inline(always)]
pub(crate) unsafe fn store_two_if_equal(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    [expected, new]: [u64; 2],
    (other, value): (usize, u64),
) -> bool {
    // SAFETY: the caller promises that the rseq area is registered, and that every unit has both
    // words. The section may write the word at `other` and then abort, which the caller allows.
    unsafe {
        template!(
            fail: "{fail}",
            body: [
                "ldr x11, [x9, {offset}]",
                "cmp x11, {expected}",
                "b.ne {fail}",
                "str {value}, [x9, {other}]",
                "add x11, x9, {offset}",
                "stlr {new}, [x11]", // commit
            ],
            cold: [],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            expected = in(reg) expected,
            new = in(reg) new,
            other = in(reg) other,
            value = in(reg) value,
            fail = label { return false },
        );
    }
    true
}

/// Runs [`Units::store_if_both_equal`](crate::Units::store_if_both_equal) as a critical section.
///
/// # Safety
///
/// The same as for [`add`](super::add), for the words at `offset` and at `other`.
#[inline(always)]
pub(crate) unsafe fn store_if_both_equal(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    [expected, new]: [u64; 2],
    (other, other_expected): (usize, u64),
) -> bool {
    // SAFETY: the caller promises that the rseq area is registered, and that every unit has both
    // words. The section writes only the word at `offset`.
    unsafe {
        template!(
            fail: "{fail}",
            body: [
                "ldr x11, [x9, {offset}]",
                "cmp x11, {expected}",
                "b.ne {fail}",
                "ldr x11, [x9, {other}]",
                "cmp x11, {other_expected}",
                "b.ne {fail}",
                "add x11, x9, {offset}",
                "stlr {new}, [x11]", // commit
            ],
            cold: [],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            expected = in(reg) expected,
            new = in(reg) new,
            other = in(reg) other,
            other_expected = in(reg) other_expected,
            fail = label { return false },
        );
    }
    true
}

/// Runs [`Units::list_push`](crate::Units::list_push) as a critical section.
///
/// # Safety
///
/// The same as for [`add`](super::add). Also, `item` is writable for 8 bytes, and belongs to the
/// caller.
#[inline(always)]
pub(crate) unsafe fn list_push(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    item: *mut u8,
) -> bool {
    // SAFETY: the caller promises that the rseq area is registered, that every unit has a word at
    // `offset`, and that `item` belongs to the caller. So a write to `item` before an abort is
    // harmless.
    unsafe {
        template!(
            fail: "{fail}",
            body: [
                "ldr x11, [x9, {offset}]",
                "str x11, [{item}]",
                "add x11, x9, {offset}",
                "stlr {item}, [x11]", // commit
            ],
            cold: [],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            item = in(reg) item,
            fail = label { return false },
        );
    }
    true
}

/// Runs [`Units::list_pop`](crate::Units::list_pop) as a critical section.
///
/// # Safety
///
/// The same as for [`add`](super::add). Also, the word at `offset` is 0 or the head of a list that
/// only [`list_push`] and this function change, and whose items are mapped while they are in it.
#[inline(always)]
pub(crate) unsafe fn list_pop(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
) -> *mut u8 {
    let item: *mut u8;
    // SAFETY: the caller promises that the rseq area is registered, and that every unit has the
    // head of a list at `offset`. The head cannot change between the section's loads, so the item
    // is still in the list and mapped when the section reads its first word.
    unsafe {
        template!(
            fail: "6b",
            body: [
                "ldr {item}, [x9, {offset}]",
                "cbz {item}, 4f",
                "ldr x11, [{item}]",
                "add x9, x9, {offset}",
                "stlr x11, [x9]", // commit
            ],
            cold: ["6:", "mov {item}, xzr", "b 4f"],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            item = out(reg) item,
        );
    }
    item
}

/// Runs [`Units::append`](crate::Units::append) as a critical section. `mask` is one less than the
/// bytes of all slots, and `step` the bytes of one slot.
///
/// # Safety
///
/// The same as for [`add`](super::add), for the whole ring. Also, `words` words at `from` are
/// readable, `words` is not 0, and `words` words fit in a slot.
#[inline]
#[expect(clippy::too_many_arguments, reason = "each is an operand")]
pub(crate) unsafe fn append(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    ring: usize,
    mask: usize,
    from: *const u64,
    words: usize,
    step: usize,
) -> Append {
    let left: u64;
    // SAFETY: the caller promises that the rseq area is registered, and that every unit has the
    // ring. The head selects a slot that lies in the ring. The section writes only that slot, which
    // is free, before the commit.
    unsafe {
        template!(
            fail: "6b",
            body: [
                "add x9, x9, {ring}",
                "add x11, x9, #{tail}",
                // Acquire: the consumer has read the slots below the tail before this section
                // writes to one of them.
                "ldar {left}, [x11]",
                "ldr x11, [x9]",
                "sub {left}, x11, {left}",
                "cmp {left}, {mask}",
                "b.hi 4f",
                "and x10, x11, {mask}",
                "add x10, x10, x9",
                "add x10, x10, #{slots} - 8",
                "add x11, x11, {step}",
                "mov {left}, {words}",
                "7:",
                "sub {word}, {left}, #1",
                "ldr {word}, [{from}, {word}, lsl #3]",
                "str {word}, [x10, {left}, lsl #3]",
                "subs {left}, {left}, #1",
                "b.ne 7b",
                "stlr x11, [x9]", // commit
            ],
            cold: ["6:", "mov {left}, #{missing}", "b 4f"],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            ring = in(reg) ring,
            mask = in(reg) mask,
            from = in(reg) from,
            words = in(reg) words,
            step = in(reg) step,
            tail = const RING_TAIL,
            slots = const RING_SLOTS,
            missing = const MISSING,
            left = out(reg) left,
            word = out(reg) _,
        );
    }
    Append::from_register(left)
}
