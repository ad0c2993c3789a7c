//! Whether a debugger or tracer steps through this thread.

use core::arch::asm;

/// Returns whether the processor's trap flag is set.
#[inline(always)]
pub(crate) fn is_stepped() -> bool {
    const TRAP: u64 = 1 << 8;
    let flags: u64;
    // SAFETY: copies the flags by way of one word of the stack.
    unsafe {
        asm!("pushfq", "pop {}", out(reg) flags, options(preserves_flags));
    }
    flags & TRAP != 0
}
