//! Critical sections for x86-64.
//!
//! Each thread shares an area with the kernel (`abi::Rseq`). The sections reach the area through
//! `fs`. The macro `template!` uses these numeric labels:
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
//! | 20 | the descriptor's entry in the list for debuggers |
//! | 21 | the part of the abort handler that gives up |
//!
//! No label consists of the digits 0 and 1 only, because in Intel syntax the assembler could read
//! such a label as a binary number.

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
            "mov {offset}, qword ptr [rip + __rseq_offset@GOTPCREL]",
            "mov {size}, qword ptr [rip + __rseq_size@GOTPCREL]",
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
    // SAFETY: the ABI stores the thread pointer in the word that it points to.
    unsafe {
        asm!("mov {}, fs:[0]", out(reg) pointer, options(nostack, preserves_flags, pure, readonly));
    }
    pointer
}

/// Returns the 32-bit word at `offset` from the thread pointer.
///
/// # Safety
///
/// `offset` is the distance from the thread pointer to an id field of a registered area.
#[inline(always)]
pub(crate) unsafe fn read_index(offset: isize) -> u32 {
    let index: u32;
    // SAFETY: the caller promises that the word lies in the thread's registered area.
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

/// Wraps a body into a critical section.
///
/// * On entry to the body, `rax` holds the address of the current unit. The body may change `rax`
///   and `rcx`.
/// * The body ends with its committing store, or jumps to `$fail` if there is nothing to do. The
///   abort handler also jumps to `$fail` if the section cannot end (`stuck`).
/// * `$cold` stands behind the abort handler, away from the common path.
/// * The operands of `asm!` come last.
macro_rules! template {
    (fail: $fail:literal, body: [$($body:literal),* $(,)?], cold: [$($cold:literal),* $(,)?], $($operands:tt)*) => {
        asm!(
            // The descriptor: version, flags, start, length, abort address.
            ".pushsection __rseq_cs, \"aw\", @progbits",
            ".balign 32",
            "9:",
            ".long 0, 0",
            ".quad 3f, 4f - 3f, 5f",
            // The linker keeps the list below wherever it keeps the descriptor.
            ".reloc ., R_X86_64_NONE, 20f",
            ".popsection",
            // Lists the descriptor, for debuggers.
            ".pushsection __rseq_cs_ptr_array, \"aw\", @progbits",
            "20:",
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
            // The kernel requires the signature in the four bytes before the abort handler. Here it
            // is the operand of a `ud1` instruction, so that disassemblers decode the handler
            // correctly.
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "5:",
            // Gives up if a debugger steps through the code: the trap flag is set. The flags go
            // below the red zone.
            "lea rsp, [rsp - 128]",
            "pushfq",
            "pop rax",
            "lea rsp, [rsp + 128]",
            "test ah, 1",
            "jnz 21f",
            // Also at every `PATIENCE`th abort. Lost counts do no harm.
            "inc dword ptr [rip + {aborts}]",
            "test dword ptr [rip + {aborts}], {patience} - 1",
            "jnz 2b",
            "21:",
            concat!("jmp ", $fail),
            $($cold,)*
            ".popsection",
            max = const MAX_INDEX,
            first = const FIRST,
            aborts = sym ABORTS,
            patience = const PATIENCE,
            out("rax") _,
            out("rcx") _,
            options(nostack),
            $($operands)*
        )
    };
}

mod counted;
mod stepped;
mod words;
pub(crate) use counted::*;
pub(crate) use stepped::*;
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
    // words at `offset`. The section writes only the first word. On x86-64, every store is a
    // release.
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
            fail: "6f",
            body: [
                "mov rcx, qword ptr [rax + {offset}]",
                "test rcx, rcx",
                "jz 6f",
                "mov {item}, qword ptr [rcx - 8]",
                "test {item}, {item}",
                "jz 4f",
                // Measured: a pop-push pair takes 11 cycles if an instruction changes the word in
                // memory, and 12 to 18 cycles if it stores a register.
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
