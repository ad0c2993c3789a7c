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
            "mov {offset}, qword ptr [rip + __rseq_offset@GOTPCREL]",
            "mov {size}, qword ptr [rip + __rseq_size@GOTPCREL]",
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
    // SAFETY: the instruction loads an entry of the global offset table, which is readable.
    unsafe {
        asm!(
            "mov {}, qword ptr [rip + pinfold_rseq_own@GOTTPOFF]",
            out(reg) offset,
            options(nostack, preserves_flags, pure, readonly),
        );
    }
    offset
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
/// * On entry to the body, `rax` holds the address of the current unit's word at `offset`, or that
///   of the unit if the word `unit` stands before the body. The body may change `rax` and `rcx`.
/// * The body ends with its committing store, or jumps to `{fail}`, where the function returns
///   false, if there is nothing to do. The abort handler also jumps there if the section cannot end
///   (`stuck`).
/// * A body with `else` jumps to the label 6 instead. There, the instruction behind `else` sets the
///   result. The code at label 6 stands behind the abort handler, away from the common path.
/// * Registers that only this architecture's body needs stand in braces.
macro_rules! template {
    (@ $operands:tt $word:tt $body:tt else $none:literal) => {
        template!(@ "6f" $operands $word $body ["6:", $none, "jmp 4b"] {})
    };
    (@ $operands:tt $word:tt $body:tt $({$($scratch:tt)*})?) => {
        template!(@ "{fail}" $operands $word $body [] {$($($scratch)*)?})
    };
    (
        @ $fail:literal {$($operands:tt)*} [$($word:literal)?] [$($body:literal),* $(,)?]
        [$($cold:literal),*] {$($scratch:tt)*}
    ) => {
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
            $($word,)?
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
            $($scratch)*
        )
    };
    ($operands:tt unit $($rest:tt)*) => {
        template!(@ $operands [] $($rest)*)
    };
    ($operands:tt $($rest:tt)*) => {
        template!(@ $operands ["add rax, {offset}"] $($rest)*)
    };
}

mod stepped;
pub(crate) use stepped::*;

/// The body of each section of [`Area`](super::Area), for `template!`. Every store is a release.
///
/// A processor can hand a stored word to the next load without a wait, if it recognises the word by
/// its address operand. Measured on an Intel Xeon (family 6, model 167): with one register and a
/// constant in the operand, an add takes 2 cycles after an add to the same word, and with two
/// registers 5. It also takes 5 cycles if the body loads the word into a register and adds another
/// register to it. So the bodies add the word to a copy of the other operand, or use `lea`.
macro_rules! body {
    (add $operands:tt) => {
        template!($operands [
            "mov rcx, {n}",
            "add rcx, qword ptr [rax]",
            "mov qword ptr [rax], rcx", // commit
        ])
    };
    (count_up $operands:tt) => {
        template!($operands [
            "mov rcx, {n}",
            "add rcx, qword ptr [rax]",
            // The batch before what was folded: a thread may change both, with the batch last.
            "mov {left}, qword ptr [rax + 24]",
            "mov {most}, {left}",
            "add {left}, qword ptr [rax + 8]",
            "add {left}, qword ptr [rax + 16]",
            "sub {left}, rcx",
            "add {most}, {left}",
            "shr {most}, {bits}",
            "jnz 6f",
            "mov qword ptr [rax], rcx", // commit
        ] else "movabs {left}, 0x8000000000000000")
    };
    (count_down $operands:tt) => {
        template!($operands [
            "mov rcx, {n}",
            "add rcx, qword ptr [rax + 8]",
            "mov {left}, qword ptr [rax + 24]",
            "mov {most}, {left}",
            "add {left}, qword ptr [rax]",
            "sub {left}, qword ptr [rax + 16]",
            "sub {left}, rcx",
            "add {most}, {left}",
            "shr {most}, {bits}",
            "jnz 6f",
            "mov qword ptr [rax + 8], rcx", // commit
        ] else "movabs {left}, 0x8000000000000000")
    };
    (claim $operands:tt) => {
        template!($operands [
            "mov {shard}, rax",
            // The batch before what was folded: a thread may change both, with the batch last.
            "mov {batch}, qword ptr [{shard} + 24]",
            "mov {net}, qword ptr [{shard}]",
            "sub {net}, qword ptr [{shard} + 8]",
            "mov {folded}, qword ptr [{shard} + 16]",
            "test {batch}, {batch}",
            "jle 6f",
            // Twice the distance overflows if the shard is claimed.
            "mov rcx, {net}",
            "sub rcx, {folded}",
            "add rcx, rcx",
            "jo 6f",
            "lea rcx, [{net} + {token}]",
            "mov qword ptr [{shard} + 16], rcx", // commit
        ] else "xor {shard:e}, {shard:e}")
    };
    (add_gated $operands:tt) => {
        template!($operands [
            "cmp qword ptr [{gate}], {offset}",
            "jne {fail}",
            "add qword ptr [rax], {n}", // commit
        ])
    };
    (store_if_equal $operands:tt) => {
        template!($operands [
            "cmp qword ptr [rax], {expected}",
            "jne {fail}",
            "mov qword ptr [rax], {new}", // commit
        ])
    };
    (pop $operands:tt) => {
        template!($operands [
            "mov rcx, qword ptr [rax]",
            "test rcx, rcx",
            "jz 6f",
            "mov {item}, qword ptr [rcx - 8]",
            "test {item}, {item}",
            "jz 4f",
            // On an AMD EPYC, a pop-push pair takes 11 cycles if an instruction changes the word in
            // memory, and 12 to 18 cycles if it stores a register.
            "sub qword ptr [rax], 8", // commit
        ] else "xor {item:e}, {item:e}")
    };
    (pop_counted $operands:tt) => {
        template!($operands unit [
            "mov rcx, qword ptr [rax + {offset}]",
            "test rcx, rcx",
            "jz 6f",
            "cmp qword ptr [rax + {count}], {n}",
            "jle 6f",
            "mov {item}, qword ptr [rcx - 8]",
            "test {item}, {item}",
            "jz 4f",
            "sub qword ptr [rax + {count}], {n}",
            "add rax, {offset}",
            "sub qword ptr [rax], 8", // commit
        ] else "xor {item:e}, {item:e}")
    };
    (push $operands:tt) => {
        template!($operands [
            "mov rcx, qword ptr [rax]",
            "test ecx, {full}",
            "jz {fail}",
            "mov qword ptr [rcx], {item}",
            "add qword ptr [rax], 8", // commit
        ])
    };
    (pop_batch $operands:tt) => {
        template!($operands [
            "mov rcx, qword ptr [rax]",
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
            "mov qword ptr [rax], rcx", // commit
        ] else "xor {taken:e}, {taken:e}")
    };
    (push_batch $operands:tt) => {
        template!($operands [
            "mov rcx, qword ptr [rax]",
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
            "mov qword ptr [rax], rcx", // commit
        ] else "xor {put:e}, {put:e}")
    };
    (store $operands:tt) => {
        template!($operands [
            "mov qword ptr [rax], {operand}", // commit
        ])
    };
    (and $operands:tt) => {
        template!($operands [
            "and qword ptr [rax], {operand}", // commit
        ])
    };
    (or $operands:tt) => {
        template!($operands [
            "or qword ptr [rax], {operand}", // commit
        ])
    };
    (fetch_add $operands:tt) => {
        template!($operands [
            "mov {done:e}, 1",
            "mov {old}, qword ptr [rax]",
            "lea rcx, [{old} + {operand}]",
            "mov qword ptr [rax], rcx", // commit
        ] else "xor {done:e}, {done:e}")
    };
    (swap $operands:tt) => {
        template!($operands [
            "mov {done:e}, 1",
            "mov {old}, qword ptr [rax]",
            "mov qword ptr [rax], {operand}", // commit
        ] else "xor {done:e}, {done:e}")
    };
    (compare_exchange $operands:tt) => {
        template!($operands [
            "mov {done:e}, 1",
            "mov {old}, qword ptr [rax]",
            "cmp {old}, {expected}",
            "jne 4f",
            "mov qword ptr [rax], {new}", // commit
        ] else "xor {done:e}, {done:e}")
    };
    // The commit is one instruction, which an interrupt never divides.
    (compare_exchange_pair $operands:tt) => {
        template!($operands [
            "cmp qword ptr [rax], {first_expected}",
            "jne {fail}",
            "cmp qword ptr [rax + 8], {second_expected}",
            "jne {fail}",
            "movq {pair}, {first_new}",
            "movq {second}, {second_new}",
            "punpcklqdq {pair}, {second}",
            "movaps xmmword ptr [rax], {pair}", // commit
        ] {pair = out(xmm_reg) _, second = out(xmm_reg) _})
    };
    (add_pair $operands:tt) => {
        template!($operands [
            "movq {pair}, {n0}",
            "movq {high}, {n1}",
            "punpcklqdq {pair}, {high}",
            "paddq {pair}, xmmword ptr [rax]",
            "movaps xmmword ptr [rax], {pair}", // commit
        ] {pair = out(xmm_reg) _, high = out(xmm_reg) _})
    };
    (store_two_if_equal $operands:tt) => {
        template!($operands unit [
            "cmp qword ptr [rax + {offset}], {expected}",
            "jne {fail}",
            "mov qword ptr [rax + {other}], {value}",
            "mov qword ptr [rax + {offset}], {new}", // commit
        ])
    };
    (store_if_both_equal $operands:tt) => {
        template!($operands unit [
            "cmp qword ptr [rax + {offset}], {expected}",
            "jne {fail}",
            "cmp qword ptr [rax + {other}], {other_expected}",
            "jne {fail}",
            "mov qword ptr [rax + {offset}], {new}", // commit
        ])
    };
    (list_push $operands:tt) => {
        template!($operands [
            "mov rcx, qword ptr [rax]",
            "mov qword ptr [{item}], rcx",
            "mov qword ptr [rax], {item}", // commit
        ])
    };
    (list_pop $operands:tt) => {
        template!($operands [
            "mov {item}, qword ptr [rax]",
            "test {item}, {item}",
            "jz 4f",
            "mov rcx, qword ptr [{item}]",
            "mov qword ptr [rax], rcx", // commit
        ] else "xor {item:e}, {item:e}")
    };
    (append $operands:tt) => {
        template!($operands [
            "mov rcx, qword ptr [rax]",
            "mov {left}, rcx",
            "sub {left}, qword ptr [rax + {tail}]",
            "cmp {left}, {mask}",
            "ja 4f",
            "and rcx, {mask}",
            "add rcx, rax",
            "mov {left}, {words}",
            "7:",
            "mov {word}, qword ptr [{from} + {left} * 8 - 8]",
            "mov qword ptr [rcx + {left} * 8 + {slots} - 8], {word}",
            "dec {left}",
            "jnz 7b",
            "add qword ptr [rax], {step}", // commit
        ] else "mov {left:e}, {missing}")
    };
    (hold $operands:tt) => {
        template!($operands [
            "mov {left}, {rounds}",
            "mov qword ptr [rax], {token}",
            "7:",
            "cmp qword ptr [rax], {token}",
            "jne 4f",
            "dec {left}",
            "jnz 7b",
            "mov qword ptr [rax], {token}", // commit
        ] else "xor {left:e}, {left:e}")
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
