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

use crate::stack::STACK_ALIGN;
use crate::state::Registration;
use crate::stuck::{ABORTS, PATIENCE};
use crate::units::{FIRST, MAX_INDEX};
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
/// * The body ends with its committing store, or branches to `$fail` if there is nothing to do. The
///   abort handler also branches to `$fail` if the section cannot end (`stuck`).
/// * `$after` stands behind the section. It may start the section again by a branch to label 5, the
///   abort handler.
/// * `$cold` stands before the abort handler, away from the common path.
/// * The operands of `asm!` come last.
///
/// The abort handler and the cold code lie inside the function, and the function jumps over them.
/// In another text section, the cold code would be out of the range of a conditional branch.
macro_rules! template {
    (fail: $fail:literal, body: [$($body:literal),* $(,)?], $(after: [$($after:literal),*],)? cold: [$($cold:literal),* $(,)?], $($operands:tt)*) => {
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
            $($($after,)*)?
            max = const MAX_INDEX,
            first = const FIRST,
            aborts = sym ABORTS,
            patience = const PATIENCE,
            out("x9") _,
            out("x10") _,
            out("x11") _,
            options(nostack),
            $($operands)*
        )
    };
}

mod counted;
mod words;
pub(crate) use counted::*;
pub(crate) use words::*;

/// Runs [`Units::add`](crate::Units::add) as a critical section.
///
/// # Safety
///
/// `cs` and `index` are offsets from the thread pointer: of `rseq_cs` and of an id field in a
/// registered area. [`MAX_INDEX`] entries stand behind the first [`FIRST`] bytes of `table`.
/// `offset` is one that [`Units::add`](crate::Units::add) allows.
#[inline(always)]
pub(crate) unsafe fn add(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    n: u64,
) -> bool {
    // SAFETY: the caller promises that the rseq area is registered, and that every unit has a word
    // at `offset`. The section writes only that word.
    unsafe {
        template!(
            fail: "{fail}",
            body: [
                "ldr x11, [x9, {offset}]",
                "add x11, x11, {n}",
                "str x11, [x9, {offset}]", // commit
            ],
            cold: [],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            n = in(reg) n,
            fail = label { return false },
        );
    }
    true
}

/// Runs [`Units::add_within`](crate::Units::add_within) as a critical section.
///
/// # Safety
///
/// The same as for [`add`], for the 16 bytes at `offset`.
#[inline(always)]
pub(crate) unsafe fn add_within(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    n: i64,
) -> bool {
    // SAFETY: the caller promises that the rseq area is registered, and that every unit has two
    // words at `offset`. The section writes only the first word. The body may overwrite the thread
    // pointer in `x10`, which it no longer needs.
    unsafe {
        template!(
            fail: "{fail}",
            body: [
                "add x9, x9, {offset}",
                "ldp x11, x10, [x9]",
                "sub x10, x10, x11",
                "cmp x10, {n}",
                "b.lt {fail}",
                "add x11, x11, {n}",
                "stlr x11, [x9]", // commit
            ],
            cold: [],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            n = in(reg) n,
            fail = label { return false },
        );
    }
    true
}

/// Runs [`Units::store_if_equal`](crate::Units::store_if_equal) as a critical section.
///
/// # Safety
///
/// The same as for [`add`].
#[inline(always)]
pub(crate) unsafe fn store_if_equal(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    expected: u64,
    new: u64,
) -> bool {
    // SAFETY: the caller promises that the rseq area is registered, and that every unit has a word
    // at `offset`. The section writes only the word that it compares.
    unsafe {
        template!(
            fail: "{fail}",
            body: [
                "ldr x11, [x9, {offset}]",
                "cmp x11, {expected}",
                "b.ne {fail}",
                "str {new}, [x9, {offset}]", // commit
            ],
            cold: [],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            expected = in(reg) expected,
            new = in(reg) new,
            fail = label { return false },
        );
    }
    true
}

/// Runs [`Units::pop`](crate::Units::pop) as a critical section.
///
/// # Safety
///
/// The same as for [`add`]. Also, the word at `offset` is 0, or describes a stack that only these
/// functions use.
#[inline(always)]
pub(crate) unsafe fn pop(cs: isize, index: isize, table: *const *mut u8, offset: usize) -> *mut u8 {
    let item: *mut u8;
    // SAFETY: the caller promises that the word at `offset` is 0 or describes a stack of pointers.
    // The section reads the slot below the top only if the word is not 0, and writes only the word.
    unsafe {
        template!(
            fail: "6b",
            body: [
                "ldr x11, [x9, {offset}]",
                "cbz x11, 6b",
                "ldr {item}, [x11, #-8]!",
                "cbz {item}, 4f",
                "str x11, [x9, {offset}]", // commit
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

/// Runs [`Units::push`](crate::Units::push) as a critical section.
///
/// # Safety
///
/// The same as for [`pop`]. Also, `item` is not null.
#[inline(always)]
pub(crate) unsafe fn push(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    item: *mut u8,
) -> bool {
    // SAFETY: the caller promises that the word at `offset` is 0 or describes a stack of pointers.
    // A top that is not a multiple of `STACK_ALIGN` is the address of a free slot. The section may
    // write that slot and then abort. A free slot has no meaning, so this write is harmless.
    unsafe {
        template!(
            fail: "{fail}",
            body: [
                "ldr x11, [x9, {offset}]",
                "tst x11, #{full}",
                "b.eq {fail}",
                "str {item}, [x11], #8",
                "str x11, [x9, {offset}]", // commit
            ],
            cold: [],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            item = in(reg) item,
            full = const STACK_ALIGN - 1,
            fail = label { return false },
        );
    }
    true
}

/// Runs [`Units::pop_batch`](crate::Units::pop_batch) as a critical section that writes at most
/// `room` pointers to `items`.
///
/// # Safety
///
/// The same as for [`pop`]. Also, `items` is writable for `room` pointers, and `room` is not 0.
#[inline]
pub(crate) unsafe fn pop_batch(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    items: *mut *mut u8,
    room: usize,
) -> usize {
    let taken: usize;
    // SAFETY: the caller promises that the word at `offset` is 0 or describes a stack of pointers,
    // and that `items` is writable for `room` pointers. The loop ends at the guard or after `room`
    // pointers. After an abort, the section writes `items` again from the start.
    unsafe {
        template!(
            fail: "6b",
            body: [
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
            ],
            cold: ["6:", "mov {taken}, xzr", "b 4f"],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            items = in(reg) items,
            room = in(reg) room,
            taken = out(reg) taken,
            item = out(reg) _,
        );
    }
    taken
}

/// Runs [`Units::push_batch`](crate::Units::push_batch) as a critical section that reads at most
/// `count` pointers from `items`.
///
/// # Safety
///
/// The same as for [`pop`]. Also, `items` is readable for `count` pointers, of which none is null,
/// and `count` is not 0.
#[inline]
pub(crate) unsafe fn push_batch(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    items: *const *mut u8,
    count: usize,
) -> usize {
    let put: usize;
    // SAFETY: the caller promises that the word at `offset` is 0 or describes a stack of pointers,
    // and that `items` is readable for `count` pointers. The loop ends at the stack's end or after
    // `count` pointers. Before the commit the section writes only free slots.
    unsafe {
        template!(
            fail: "6b",
            body: [
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
            ],
            cold: ["6:", "mov {put}, xzr", "b 4f"],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            items = in(reg) items,
            count = in(reg) count,
            put = out(reg) put,
            item = out(reg) _,
            full = const STACK_ALIGN - 1,
        );
    }
    put
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
