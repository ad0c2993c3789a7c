//! Whether a debugger or tracer steps through this thread.

use core::arch::global_asm;

// A separate function, so that its unwinding table can describe the pushed word. In inlined code,
// an unwinder that starts between the two instructions would compute a wrong frame.
global_asm!(
    ".pushsection .text.pinfold_rseq_flags, \"ax\", @progbits",
    ".hidden pinfold_rseq_flags",
    ".globl pinfold_rseq_flags",
    ".type pinfold_rseq_flags, @function",
    "pinfold_rseq_flags:",
    ".cfi_startproc",
    "pushfq",
    ".cfi_adjust_cfa_offset 8",
    "pop rax",
    ".cfi_adjust_cfa_offset -8",
    "ret",
    ".cfi_endproc",
    ".size pinfold_rseq_flags, . - pinfold_rseq_flags",
    ".popsection",
);

unsafe extern "C" {
    /// Returns the processor's flags.
    safe fn pinfold_rseq_flags() -> u64;
}

/// Returns whether the processor's trap flag is set.
#[inline(always)]
pub(crate) fn is_stepped() -> bool {
    const TRAP: u64 = 1 << 8;
    pinfold_rseq_flags() & TRAP != 0
}
