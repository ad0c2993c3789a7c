//! Critical sections for x86-64.
//!
//! The thread's area is reached through `fs`. Intel syntax; numeric labels only, none of them made of 0 and 1:
//! 2 the store that enters the section, 3 its start, 4 behind the commit, 5 the abort handler, 6 the way out when the
//! body finds nothing to do, 9 the descriptor.

use crate::stack::STACK_ALIGN;
use crate::state::Registration;
use crate::units::{FIRST, MAX_INDEX};
use core::arch::asm;

pub(crate) const SUPPORTED: bool = true;

/// glibc's registration, by weak references that are null where the C library has none.
pub(crate) fn registration() -> Option<Registration> {
    let (offset, size): (*const isize, *const u32);
    // SAFETY: loads two entries of the global offset table.
    unsafe {
        asm!(
            ".weak __rseq_offset",
            ".weak __rseq_size",
            "mov {offset}, qword ptr [rip + __rseq_offset@GOTPCREL]",
            "mov {size}, qword ptr [rip + __rseq_size@GOTPCREL]",
            offset = out(reg) offset,
            size = out(reg) size,
            options(nostack, preserves_flags, readonly),
        );
    }
    Registration::from_glibc(offset, size)
}

/// The thread pointer, which identifies the calling thread.
#[inline(always)]
pub(crate) fn thread_pointer() -> usize {
    let pointer;
    // SAFETY: the ABI keeps the thread pointer in the word it points to.
    unsafe {
        asm!("mov {}, fs:[0]", out(reg) pointer, options(nostack, preserves_flags, pure, readonly));
    }
    pointer
}

/// The 32-bit word at `offset` from the thread pointer.
///
/// # Safety
///
/// `offset` is that of an id field of a registered area.
#[inline(always)]
pub(crate) unsafe fn read_index(offset: isize) -> u32 {
    let index: u32;
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "mov {index:e}, dword ptr fs:[{offset}]",
            index = lateout(reg) index,
            offset = in(reg) offset,
            options(nostack, preserves_flags, readonly),
        );
    }
    index
}

/// Wraps a body into a critical section: on entry to the body `rax` holds the current unit's address; `rax` and
/// `rcx` are scratch. The body ends with its committing store, or leaves by a jump to `$fail` when there is nothing to
/// do. `$cold` stands behind the abort handler, out of the way; the operands follow.
macro_rules! template {
    (fail: $fail:literal, body: [$($body:literal),* $(,)?], cold: [$($cold:literal),* $(,)?], $($operands:tt)*) => {
        asm!(
            // The descriptor: version, flags, start, length, abort address.
            ".pushsection __rseq_cs, \"aw\", @progbits",
            ".balign 32",
            "9:",
            ".long 0, 0",
            ".quad 3f, 4f - 3f, 5f",
            ".popsection",
            // Debuggers step over what is listed here.
            ".pushsection __rseq_cs_ptr_array, \"aw\", @progbits",
            ".quad 9b",
            ".popsection",
            "2:",
            "lea rax, [rip + 9b]",
            "mov qword ptr fs:[{cs}], rax",
            "3:",
            "mov eax, dword ptr fs:[{index}]",
            "cmp eax, {max}",
            concat!("jae ", $fail),
            "mov rax, qword ptr [{table} + rax * 8 + {first}]",
            "test rax, rax",
            concat!("jz ", $fail),
            $($body,)*
            "4:",
            ".pushsection .text.unlikely.pinfold_rseq, \"ax\", @progbits",
            // ud1 with the signature as its operand, so that a disassembler stays in step.
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "5:",
            "jmp 2b",
            $($cold,)*
            ".popsection",
            max = const MAX_INDEX,
            first = const FIRST,
            out("rax") _,
            out("rcx") _,
            options(nostack),
            $($operands)*
        )
    };
}

/// As [`Units::add`](crate::Units::add).
///
/// # Safety
///
/// Here and below: `cs` and `index` are the offsets of `rseq_cs` and of an id in a registered area; [`FIRST`] bytes
/// behind `table` stand `MAX_INDEX` entries; the rest as for the method.
#[inline(always)]
pub(crate) unsafe fn add(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    n: u64,
) -> bool {
    // SAFETY: the caller's promise; the section writes only the word it adds to.
    unsafe {
        template!(
            fail: "{fail}",
            body: ["add qword ptr [rax + {offset}], {n}" /* commit */],
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

/// As [`Units::add_within`](crate::Units::add_within).
///
/// # Safety
///
/// As for [`add`].
#[inline(always)]
pub(crate) unsafe fn add_within(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    n: i64,
) -> bool {
    // SAFETY: the caller's promise; the section writes only the word it adds to. Stores are releases here.
    unsafe {
        template!(
            fail: "{fail}",
            body: [
                "mov rcx, qword ptr [rax + {offset}]",
                "mov {room}, qword ptr [rax + {offset} + 8]",
                "sub {room}, rcx",
                "cmp {room}, {n}",
                "jl {fail}",
                "add rcx, {n}",
                "mov qword ptr [rax + {offset}], rcx", // commit
            ],
            cold: [],
            cs = in(reg) cs,
            index = in(reg) index,
            table = in(reg) table,
            offset = in(reg) offset,
            n = in(reg) n,
            room = out(reg) _,
            fail = label { return false },
        );
    }
    true
}

/// As [`Units::store_if_equal`](crate::Units::store_if_equal).
///
/// # Safety
///
/// As for [`add`].
#[inline(always)]
pub(crate) unsafe fn store_if_equal(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    expected: u64,
    new: u64,
) -> bool {
    // SAFETY: the caller's promise; the section writes only the word it compares.
    unsafe {
        template!(
            fail: "{fail}",
            body: [
                "cmp qword ptr [rax + {offset}], {expected}",
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
            fail = label { return false },
        );
    }
    true
}

/// As [`Units::pop`](crate::Units::pop).
///
/// # Safety
///
/// As for [`add`].
#[inline(always)]
pub(crate) unsafe fn pop(cs: isize, index: isize, table: *const *mut u8, offset: usize) -> *mut u8 {
    let item: *mut u8;
    // SAFETY: the caller's promise; a word that is not 0 has a slot below it, and the section writes only the word.
    unsafe {
        template!(
            fail: "6f",
            body: [
                "mov rcx, qword ptr [rax + {offset}]",
                "test rcx, rcx",
                "jz 6f",
                "mov {item}, qword ptr [rcx - 8]",
                "test {item}, {item}",
                "jz 4f",
                // Measured: a pop-push pair takes 11 cycles with the word changed in memory, 12 or 18 (it varies from run to
                // run) with a register stored.
                "sub qword ptr [rax + {offset}], 8", // commit
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

/// As [`Units::push`](crate::Units::push).
///
/// # Safety
///
/// As for [`add`].
#[inline(always)]
pub(crate) unsafe fn push(
    cs: isize,
    index: isize,
    table: *const *mut u8,
    offset: usize,
    item: *mut u8,
) -> bool {
    // SAFETY: the caller's promise; a word that is not on the boundary has a free slot at it. The slot is written
    // before the commit, which is harmless: a free slot means nothing.
    unsafe {
        template!(
            fail: "{fail}",
            body: [
                "mov rcx, qword ptr [rax + {offset}]",
                "test ecx, {full}",
                "jz {fail}",
                "mov qword ptr [rcx], {item}",
                "add qword ptr [rax + {offset}], 8", // commit
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

/// As [`Units::pop_batch`](crate::Units::pop_batch), for `room` items at `items`.
///
/// # Safety
///
/// As for [`add`]; `items` is writable for `room` pointers and `room` is not 0.
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
    // SAFETY: the caller's promise; the loop ends at the guard or when the room is used up. What it wrote to `items`
    // before an abort it writes again.
    unsafe {
        template!(
            fail: "6f",
            body: [
                "mov rcx, qword ptr [rax + {offset}]",
                "test rcx, rcx",
                "jz 6f",
                "xor {taken:e}, {taken:e}",
                "7:",
                "mov {item}, qword ptr [rcx - 8]",
                "test {item}, {item}",
                "jz 8f",
                "mov qword ptr [{items} + {taken} * 8], {item}",
                "sub rcx, 8",
                "inc {taken}",
                "cmp {taken}, {room}",
                "jb 7b",
                "8:",
                "mov qword ptr [rax + {offset}], rcx", // commit
            ],
            cold: ["6:", "xor {taken:e}, {taken:e}", "jmp 4b"],
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

/// As [`Units::push_batch`](crate::Units::push_batch), for `count` items at `items`.
///
/// # Safety
///
/// As for [`add`]; `items` is readable for `count` pointers, none of them null, and `count` is not 0.
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
    // SAFETY: the caller's promise; the loop ends at the boundary or when all items are put. Slots written before the
    // commit are free slots.
    unsafe {
        template!(
            fail: "6f",
            body: [
                "mov rcx, qword ptr [rax + {offset}]",
                "xor {put:e}, {put:e}",
                "7:",
                "test ecx, {full}",
                "jz 8f",
                "mov {item}, qword ptr [{items} + {put} * 8]",
                "mov qword ptr [rcx], {item}",
                "add rcx, 8",
                "inc {put}",
                "cmp {put}, {count}",
                "jb 7b",
                "8:",
                "mov qword ptr [rax + {offset}], rcx", // commit
            ],
            cold: ["6:", "xor {put:e}, {put:e}", "jmp 4b"],
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

/// Enters a critical section that only spins and never commits, for at most `spins` rounds; true when the kernel
/// aborted it. What the self-test uses to see that preemption aborts.
///
/// # Safety
///
/// `cs` is the offset of `rseq_cs` in a registered area.
#[inline(never)]
pub(crate) unsafe fn spin_until_aborted(cs: isize, spins: u64) -> bool {
    let aborted: u64;
    // SAFETY: the section writes registers only.
    unsafe {
        asm!(
            ".pushsection __rseq_cs, \"aw\", @progbits",
            ".balign 32",
            "9:",
            ".long 0, 0",
            ".quad 3f, 4f - 3f, 5f",
            ".popsection",
            "xor {aborted:e}, {aborted:e}",
            "lea rax, [rip + 9b]",
            "mov qword ptr fs:[{cs}], rax",
            "3:",
            "dec {spins}",
            "jnz 3b",
            "4:",
            "7:",
            ".pushsection .text.unlikely.pinfold_rseq, \"ax\", @progbits",
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "5:",
            "mov {aborted:e}, 1",
            "jmp 7b",
            ".popsection",
            cs = in(reg) cs,
            spins = inout(reg) spins => _,
            aborted = out(reg) aborted,
            out("rax") _,
            options(nostack),
        );
    }
    aborted != 0
}
