//! The critical section that takes a pointer and counts it, for x86-64. The macro `template!` is
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
    // then abort, which the caller allows.
    unsafe {
        template!(
            fail: "6f",
            body: [
                "mov rcx, qword ptr [rax + {offset}]",
                "test rcx, rcx",
                "jz 6f",
                "cmp qword ptr [rax + {count}], {n}",
                "jle 6f",
                "mov {item}, qword ptr [rcx - 8]",
                "test {item}, {item}",
                "jz 4f",
                "sub qword ptr [rax + {count}], {n}",
                "sub qword ptr [rax + {offset}], 8", // commit
            ],
            cold: ["6:", "xor {item:e}, {item:e}", "jmp 4b"],
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
