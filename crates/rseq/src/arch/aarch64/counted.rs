//! The critical section that takes a pointer and counts it, for aarch64. The macro `template!` is
//! that of the parent module.

use super::{ABORTS, FIRST, MAX_INDEX, PATIENCE, asm};

/// Runs [`Units::pop_counted_rseq`](crate::Units::pop_counted_rseq) as a critical section.
///
/// # Safety
///
/// The same as for [`pop`](super::pop). Also, every unit has a word at `COUNT`.
#[inline(always)]
pub(crate) unsafe fn pop_counted<const COUNT: usize>(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    n: i64,
) -> *mut u8 {
    let item: *mut u8;
    // SAFETY: the caller promises that the word at `offset` is 0 or describes a stack of pointers,
    // and that every unit has a word at `COUNT`. The section reads the slot below the top only if
    // the word at `offset` is not 0. It writes the two words. It may write the word at `COUNT` and
    // then abort, which the caller allows. The body overwrites the thread pointer in `x10`, which
    // it no longer needs.
    unsafe {
        template!(
            fail: "6b",
            body: [
                "ldr x11, [x9, {offset}]",
                "cbz x11, 6b",
                "ldr x10, [x9, #{count}]",
                "subs x10, x10, {n}",
                "b.le 6b",
                "ldr {item}, [x11, #-8]!",
                "cbz {item}, 4f",
                "str x10, [x9, #{count}]",
                "str x11, [x9, {offset}]", // commit
            ],
            cold: ["6:", "mov {item}, xzr", "b 4f"],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            n = in(reg) n,
            count = const COUNT,
            item = out(reg) item,
        );
    }
    item
}
