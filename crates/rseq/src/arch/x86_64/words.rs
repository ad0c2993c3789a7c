//! The critical sections on a word, two words, a list and a ring, for x86-64.
//!
//! Each function returns `None` or false if the current index has no unit. The macro `template!` is
//! that of the parent module.

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
                    body: [$instruction /* commit */],
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
    "mov qword ptr [rax + {offset}], {operand}"
);
change!(
    /// Runs [`Units::and`](crate::Units::and) as a critical section.
    and,
    "and qword ptr [rax + {offset}], {operand}"
);
change!(
    /// Runs [`Units::or`](crate::Units::or) as a critical section.
    or,
    "or qword ptr [rax + {offset}], {operand}"
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
                    fail: "6f",
                    body: [
                        "mov {done:e}, 1",
                        "mov {old}, qword ptr [rax + {offset}]",
                        $instruction, // commit
                    ],
                    cold: ["6:", "xor {done:e}, {done:e}", "jmp 4b"],
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
    "add qword ptr [rax + {offset}], {operand}"
);
exchange!(
    /// Runs [`Units::swap`](crate::Units::swap) as a critical section.
    swap,
    "mov qword ptr [rax + {offset}], {operand}"
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
            fail: "6f",
            body: [
                "mov {done:e}, 1",
                "mov {old}, qword ptr [rax + {offset}]",
                "cmp {old}, {expected}",
                "jne 4f",
                "mov qword ptr [rax + {offset}], {new}", // commit
            ],
            cold: ["6:", "xor {done:e}, {done:e}", "jmp 4b"],
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
    // words at `offset`. The section writes only these words, by one instruction, which an
    // interrupt never divides.
    unsafe {
        template!(
            fail: "{fail}",
            body: [
                "cmp qword ptr [rax + {offset}], {first_expected}",
                "jne {fail}",
                "cmp qword ptr [rax + {offset} + 8], {second_expected}",
                "jne {fail}",
                "movq {pair}, {first_new}",
                "movq {second}, {second_new}",
                "punpcklqdq {pair}, {second}",
                "movaps xmmword ptr [rax + {offset}], {pair}", // commit
            ],
            cold: [],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            first_expected = in(reg) expected[0],
            second_expected = in(reg) expected[1],
            first_new = in(reg) new[0],
            second_new = in(reg) new[1],
            pair = out(xmm_reg) _,
            second = out(xmm_reg) _,
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
                "cmp qword ptr [rax + {offset}], {expected}",
                "jne {fail}",
                "mov qword ptr [rax + {other}], {value}",
                "mov qword ptr [rax + {offset}], {new}", // commit
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
                "cmp qword ptr [rax + {offset}], {expected}",
                "jne {fail}",
                "cmp qword ptr [rax + {other}], {other_expected}",
                "jne {fail}",
                "mov qword ptr [rax + {offset}], {new}", // commit
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
                "mov rcx, qword ptr [rax + {offset}]",
                "mov qword ptr [{item}], rcx",
                "mov qword ptr [rax + {offset}], {item}", // commit
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
            fail: "6f",
            body: [
                "mov {item}, qword ptr [rax + {offset}]",
                "test {item}, {item}",
                "jz 4f",
                "mov rcx, qword ptr [{item}]",
                "mov qword ptr [rax + {offset}], rcx", // commit
            ],
            cold: ["6:", "xor {item:e}, {item:e}", "jmp 4b"],
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
            fail: "6f",
            body: [
                "mov rcx, qword ptr [rax + {ring}]",
                "mov {left}, rcx",
                "sub {left}, qword ptr [rax + {ring} + {tail}]",
                "cmp {left}, {mask}",
                "ja 4f",
                "and rcx, {mask}",
                "add rcx, rax",
                "add rcx, {ring}",
                "mov {left}, {words}",
                "7:",
                "mov {word}, qword ptr [{from} + {left} * 8 - 8]",
                "mov qword ptr [rcx + {left} * 8 + {slots} - 8], {word}",
                "dec {left}",
                "jnz 7b",
                "add qword ptr [rax + {ring}], {step}", // commit
            ],
            cold: ["6:", "mov {left:e}, {missing}", "jmp 4b"],
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
