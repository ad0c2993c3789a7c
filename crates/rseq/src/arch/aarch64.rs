//! Critical sections for aarch64.
//!
//! Each thread shares an area with the kernel (`abi::Rseq`). The sections reach the area from the
//! thread pointer in `tpidr_el0`. The macro `template!` uses these numeric labels:
//!
//! | label | place |
//! |---|---|
//! | 2 | the store that enters the section |
//! | 3 | the section's first instruction |
//! | 4 | behind the commit |
//! | 5 | the abort handler |
//! | 6 | the exit of a body that finds nothing to do |
//! | 7, 8 | a loop in the body, and its end |
//! | 9 | the descriptor |

use crate::registration::Registration;
use core::arch::asm;

pub(crate) const SUPPORTED: bool = true;

/// Returns glibc's registration, or `None` if the C library has none.
///
/// The references to glibc's variables are weak, so they are null where the C library has no such
/// variables.
pub(crate) fn registration() -> Option<Registration> {
    let (offset, size): (*const isize, *const u32);
    // SAFETY: the instructions load two entries of the global offset table, which is readable.
    unsafe {
        asm!(
            ".weak __rseq_offset",
            ".weak __rseq_size",
            "adrp {offset}, :got:__rseq_offset",
            "ldr {offset}, [{offset}, :got_lo12:__rseq_offset]",
            "adrp {size}, :got:__rseq_size",
            "ldr {size}, [{size}, :got_lo12:__rseq_size]",
            offset = out(reg) offset,
            size = out(reg) size,
            options(nostack, preserves_flags, readonly),
        );
    }
    Registration::from_glibc(offset, size)
}

/// Returns the bytes from the thread pointer to the thread's own area.
pub(crate) fn own_area() -> isize {
    let offset;
    // SAFETY: the instructions load an entry of the global offset table, which is readable.
    unsafe {
        asm!(
            "adrp {offset}, :gottprel:pinfold_rseq_own",
            "ldr {offset}, [{offset}, :gottprel_lo12:pinfold_rseq_own]",
            offset = out(reg) offset,
            options(nostack, preserves_flags, pure, readonly),
        );
    }
    offset
}

/// Returns the thread pointer, which identifies the calling thread.
#[inline(always)]
pub(crate) fn thread_pointer() -> usize {
    let pointer;
    // SAFETY: the instruction only reads a register.
    unsafe {
        asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, pure, nomem));
    }
    pointer
}

/// Returns false: the program cannot know here whether a debugger steps through it.
#[inline(always)]
pub(crate) fn is_stepped() -> bool {
    false
}

/// Returns the 32-bit word at `offset` from the thread pointer.
///
/// # Safety
///
/// `offset` is the distance from the thread pointer to an id field of a registered area.
#[inline(always)]
pub(crate) unsafe fn read_index(offset: isize) -> u32 {
    let field = thread_pointer().wrapping_add_signed(offset) as *const u32;
    // SAFETY: the caller promises that the word lies in the thread's registered area. The read is
    // volatile because the kernel changes the word.
    unsafe { field.read_volatile() }
}

/// Wraps a body into a critical section.
///
/// * On entry to the body, `x9` holds the address of the current unit. The body may change `x9` to
///   `x11`.
/// * The body ends with its committing store, or branches to `{fail}`, where the function returns
///   false, if there is nothing to do. The abort handler also branches there if the section cannot
///   end (`stuck`).
/// * A body with `else` branches to the label 6 instead. There, the instruction behind `else` sets
///   the result. The code at label 6 stands before the abort handler, away from the common path.
/// * Registers that only this architecture's body needs stand in braces.
/// * The instruction behind `then` follows the section. It may start the section again by a branch
///   to label 5, the abort handler.
///
/// The abort handler and the code at label 6 lie inside the function, and the function jumps over
/// them. In another text section, label 6 would be out of the range of a conditional branch.
macro_rules! template {
    ($operands:tt $body:tt else $none:literal) => {
        template!(@ "6b" $operands $body ["6:", $none, "b 4f"] {} [])
    };
    ($operands:tt $body:tt $({$($scratch:tt)*})? $(then $after:literal)?) => {
        template!(@ "{fail}" $operands $body [] {$($($scratch)*)?} [$($after)?])
    };
    (
        @ $fail:literal {$($operands:tt)*} [$($body:literal),* $(,)?] [$($cold:literal),*]
        {$($scratch:tt)*} [$($after:literal)?]
    ) => {
        asm!(
            // The descriptor: version, flags, start, length, abort address.
            ".pushsection __rseq_cs, \"aw\", @progbits",
            ".balign 32",
            "9:",
            ".long 0, 0",
            ".quad 3f, 4f - 3f, 5f",
            // The linker keeps the list below wherever it keeps the descriptor.
            ".reloc ., R_AARCH64_NONE, 20f",
            ".popsection",
            // Lists the descriptor, for debuggers.
            ".pushsection __rseq_cs_ptr_array, \"aw\", @progbits",
            "20:",
            ".quad 9b",
            ".popsection",
            "b 2f",
            $($cold,)*
            ".inst 0xd428bc00",
            "5:",
            // Every `PATIENCE`th abort gives up. Lost counts do no harm.
            "adrp x9, {aborts}",
            "ldr w10, [x9, :lo12:{aborts}]",
            "add w10, w10, #1",
            "str w10, [x9, :lo12:{aborts}]",
            "tst w10, #{patience} - 1",
            "b.ne 2f",
            concat!("b ", $fail),
            "2:",
            "mrs x10, tpidr_el0",
            "adrp x9, 9b",
            "add x9, x9, :lo12:9b",
            "str x9, [x10, {cs}]",
            "3:",
            "ldr w9, [x10, {index}]",
            "cmp x9, #{max}",
            concat!("b.hs ", $fail),
            "add x11, {table}, #{first}",
            "ldr x9, [x11, x9, lsl #3]",
            concat!("cbz x9, ", $fail),
            $($body,)*
            "4:",
            $($after,)?
            max = const MAX_INDEX,
            first = const FIRST,
            aborts = sym ABORTS,
            patience = const PATIENCE,
            out("x9") _,
            out("x10") _,
            out("x11") _,
            options(nostack),
            $($operands)*
            $($scratch)*
        )
    };
}

/// The body of each section of [`Area`](super::Area), for `template!`. Each commit to a word is a
/// release, except those of `add`, `store_if_equal` and the stacks.
macro_rules! body {
    (add $operands:tt) => {
        template!($operands [
            "ldr x11, [x9, {offset}]",
            "add x11, x11, {n}",
            "str x11, [x9, {offset}]", // commit
        ])
    };
    (count_up $operands:tt) => {
        template!($operands [
            "add x9, x9, {offset}",
            // The batch before what was folded: a thread may change both, with the batch last.
            "add x10, x9, #24",
            "ldar {most}, [x10]",
            "ldp x11, x10, [x9]",
            "ldr {left}, [x9, #16]",
            "add x11, x11, {n}",
            "add {left}, {left}, x10",
            "sub {left}, {left}, x11",
            "add {left}, {left}, {most}",
            "add {most}, {most}, {left}",
            "lsr {most}, {most}, #{bits}",
            "cbnz {most}, 6b",
            "stlr x11, [x9]", // commit
        ] else "mov {left}, #0x8000000000000000")
    };
    (count_down $operands:tt) => {
        template!($operands [
            "add x9, x9, {offset}",
            // As in `count_up`.
            "add x10, x9, #24",
            "ldar {most}, [x10]",
            "ldp x10, x11, [x9]",
            "ldr {left}, [x9, #16]",
            "add x11, x11, {n}",
            "sub {left}, x10, {left}",
            "sub {left}, {left}, x11",
            "add {left}, {left}, {most}",
            "add {most}, {most}, {left}",
            "lsr {most}, {most}, #{bits}",
            "cbnz {most}, 6b",
            "add x9, x9, #8",
            "stlr x11, [x9]", // commit
        ] else "mov {left}, #0x8000000000000000")
    };
    (claim $operands:tt) => {
        template!($operands [
            "add {shard}, x9, {offset}",
            // As in `count_up`.
            "add x11, {shard}, #24",
            "ldar {batch}, [x11]",
            "ldp {net}, x11, [{shard}]",
            "ldr {folded}, [{shard}, #16]",
            "sub {net}, {net}, x11",
            "cmp {batch}, #0",
            "b.le 6b",
            // Twice the distance overflows if the shard is claimed.
            "sub x11, {net}, {folded}",
            "adds x11, x11, x11",
            "b.vs 6b",
            "add x11, {net}, {token}",
            "add x9, {shard}, #16",
            "stlr x11, [x9]", // commit
        ] else "mov {shard}, xzr")
    };
    (add_gated $operands:tt) => {
        template!($operands [
            "ldr x11, [{gate}]",
            "cmp x11, {offset}",
            "b.ne {fail}",
            "add x9, x9, {offset}",
            "ldr x11, [x9]",
            "add x11, x11, {n}",
            "stlr x11, [x9]", // commit
        ])
    };
    (store_if_equal $operands:tt) => {
        template!($operands [
            "ldr x11, [x9, {offset}]",
            "cmp x11, {expected}",
            "b.ne {fail}",
            "str {new}, [x9, {offset}]", // commit
        ])
    };
    (pop $operands:tt) => {
        template!($operands [
            "ldr x11, [x9, {offset}]",
            "cbz x11, 6b",
            "ldr {item}, [x11, #-8]!",
            "cbz {item}, 4f",
            "str x11, [x9, {offset}]", // commit
        ] else "mov {item}, xzr")
    };
    (pop_counted $operands:tt) => {
        template!($operands [
            "ldr x11, [x9, {offset}]",
            "cbz x11, 6b",
            // The thread pointer in `x10` is not needed any more.
            "ldr x10, [x9, #{count}]",
            "subs x10, x10, {n}",
            "b.le 6b",
            "ldr {item}, [x11, #-8]!",
            "cbz {item}, 4f",
            "str x10, [x9, #{count}]",
            "str x11, [x9, {offset}]", // commit
        ] else "mov {item}, xzr")
    };
    (push $operands:tt) => {
        template!($operands [
            "ldr x11, [x9, {offset}]",
            "tst x11, #{full}",
            "b.eq {fail}",
            "str {item}, [x11], #8",
            "str x11, [x9, {offset}]", // commit
        ])
    };
    (pop_batch $operands:tt) => {
        template!($operands [
            "ldr x11, [x9, {offset}]",
            "cbz x11, 6b",
            "mov {taken}, xzr",
            "7:",
            "ldr {item}, [x11, #-8]",
            "cbz {item}, 8f",
            "str {item}, [{items}, {taken}, lsl #3]",
            "sub x11, x11, #8",
            "add {taken}, {taken}, #1",
            "cmp {taken}, {room}",
            "b.lo 7b",
            "8:",
            "str x11, [x9, {offset}]", // commit
        ] else "mov {taken}, xzr")
    };
    (push_batch $operands:tt) => {
        template!($operands [
            "ldr x11, [x9, {offset}]",
            "mov {put}, xzr",
            "7:",
            "tst x11, #{full}",
            "b.eq 8f",
            "ldr {item}, [{items}, {put}, lsl #3]",
            "str {item}, [x11], #8",
            "add {put}, {put}, #1",
            "cmp {put}, {count}",
            "b.lo 7b",
            "8:",
            "str x11, [x9, {offset}]", // commit
        ] else "mov {put}, xzr")
    };
    (store $operands:tt) => {
        template!($operands [
            "add x9, x9, {offset}",
            "stlr {operand}, [x9]", // commit
        ])
    };
    (and $operands:tt) => {
        template!($operands [
            "add x9, x9, {offset}",
            "ldr x11, [x9]",
            "and x11, x11, {operand}",
            "stlr x11, [x9]", // commit
        ])
    };
    (or $operands:tt) => {
        template!($operands [
            "add x9, x9, {offset}",
            "ldr x11, [x9]",
            "orr x11, x11, {operand}",
            "stlr x11, [x9]", // commit
        ])
    };
    (fetch_add $operands:tt) => {
        template!($operands [
            "mov {done}, #1",
            "add x9, x9, {offset}",
            "ldr {old}, [x9]",
            "add x11, {old}, {operand}",
            "stlr x11, [x9]", // commit
        ] else "mov {done}, xzr")
    };
    (swap $operands:tt) => {
        template!($operands [
            "mov {done}, #1",
            "add x9, x9, {offset}",
            "ldr {old}, [x9]",
            "mov x11, {operand}",
            "stlr x11, [x9]", // commit
        ] else "mov {done}, xzr")
    };
    (compare_exchange $operands:tt) => {
        template!($operands [
            "mov {done}, #1",
            "add x9, x9, {offset}",
            "ldr {old}, [x9]",
            "cmp {old}, {expected}",
            "b.ne 4f",
            "stlr {new}, [x9]", // commit
        ] else "mov {done}, xzr")
    };
    // An interrupt may divide the two stores of an `stp`, and the abort would leave one of them. So
    // the section commits with an exclusive store of both words, which happens as a whole or not at
    // all. If another thread writes to the same cache line, the exclusive store fails, and the
    // section starts again.
    (compare_exchange_pair $operands:tt) => {
        template!($operands [
            "add x11, x9, {offset}",
            "ldxp x9, {second}, [x11]",
            "cmp x9, {first_expected}",
            "ccmp {second}, {second_expected}, #0, eq",
            "b.ne {fail}",
            "stlxp {second:w}, {first_new}, {second_new}, [x11]", // commit
        ] {second = out(reg) _} then "cbnz {second:w}, 5b")
    };
    (add_pair $operands:tt) => {
        template!($operands [
            "add x11, x9, {offset}",
            "ldxp x9, {sum}, [x11]",
            "add x9, x9, {n0}",
            "add {sum}, {sum}, {n1}",
            "stlxp {status:w}, x9, {sum}, [x11]", // commit
        ] {sum = out(reg) _, status = out(reg) _} then "cbnz {status:w}, 5b")
    };
    (store_two_if_equal $operands:tt) => {
        template!($operands [
            "ldr x11, [x9, {offset}]",
            "cmp x11, {expected}",
            "b.ne {fail}",
            "str {value}, [x9, {other}]",
            "add x11, x9, {offset}",
            "stlr {new}, [x11]", // commit
        ])
    };
    (store_if_both_equal $operands:tt) => {
        template!($operands [
            "ldr x11, [x9, {offset}]",
            "cmp x11, {expected}",
            "b.ne {fail}",
            "ldr x11, [x9, {other}]",
            "cmp x11, {other_expected}",
            "b.ne {fail}",
            "add x11, x9, {offset}",
            "stlr {new}, [x11]", // commit
        ])
    };
    (list_push $operands:tt) => {
        template!($operands [
            "ldr x11, [x9, {offset}]",
            "str x11, [{item}]",
            "add x11, x9, {offset}",
            "stlr {item}, [x11]", // commit
        ])
    };
    (list_pop $operands:tt) => {
        template!($operands [
            "ldr {item}, [x9, {offset}]",
            "cbz {item}, 4f",
            "ldr x11, [{item}]",
            "add x9, x9, {offset}",
            "stlr x11, [x9]", // commit
        ] else "mov {item}, xzr")
    };
    (append $operands:tt) => {
        template!($operands [
            "add x9, x9, {offset}",
            "add x11, x9, #{tail}",
            // Acquire: the reader has read the slots below the tail before this section writes to
            // one of them.
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
        ] else "mov {left}, #{missing}")
    };
    (hold $operands:tt) => {
        template!($operands [
            "mov {left}, {rounds}",
            "str {token}, [x9, {offset}]",
            "7:",
            "ldr x11, [x9, {offset}]",
            "cmp x11, {token}",
            "b.ne 4f",
            "subs {left}, {left}, #1",
            "b.ne 7b",
            "str {token}, [x9, {offset}]", // commit
        ] else "mov {left}, xzr")
    };
}

/// Spins in a critical section that never commits, for at most `spins` rounds. Returns whether the
/// kernel aborted it.
///
/// The self-test calls this function to see whether preemption aborts a section.
///
/// # Safety
///
/// `cs` is the offset from the thread pointer of `rseq_cs` in a registered area.
#[inline(never)]
pub(crate) unsafe fn spin_until_aborted(cs: isize, spins: u64) -> bool {
    let aborted: u64;
    // SAFETY: the caller promises that the rseq area is registered. The section itself writes only
    // registers.
    unsafe {
        asm!(
            ".pushsection __rseq_cs, \"aw\", @progbits",
            ".balign 32",
            "9:",
            ".long 0, 0",
            ".quad 3f, 4f - 3f, 5f",
            ".popsection",
            "mov {aborted}, xzr",
            "mrs x10, tpidr_el0",
            "adrp x9, 9b",
            "add x9, x9, :lo12:9b",
            "str x9, [x10, {cs}]",
            "3:",
            "subs {spins}, {spins}, #1",
            "b.ne 3b",
            "4:",
            "b 7f",
            ".inst 0xd428bc00",
            "5:",
            "mov {aborted}, #1",
            "7:",
            cs = in(reg) cs,
            spins = inout(reg) spins => _,
            aborted = out(reg) aborted,
            out("x9") _,
            out("x10") _,
            options(nostack),
        );
    }
    aborted != 0
}
