//! Walks the calling thread's stack, on a stack of its own.
//!
//! The unwinder needs a few KiB of stack, which a thread with a small stack may not have left. So a
//! walk switches to one of [`WALKERS`] stacks. A thread takes a stack by one compare-exchange, and
//! drops its sample if all are taken, or if it is a signal handler that has interrupted a walk of
//! the same thread.

use super::records::FRAMES;
use crate::sys;
use core::ffi::{c_int, c_void};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pinfold_rseq::thread_pointer;

/// The number of stacks, and so of threads that can walk at the same time.
const WALKERS: usize = 16;
/// Bytes of each stack.
const STACK: usize = 64 << 10;

/// The thread pointers of the threads that walk, or 0.
static OWNERS: [AtomicUsize; WALKERS] = [const { AtomicUsize::new(0) }; WALKERS];
/// The address of the first stack.
static STACKS: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" {
    fn _Unwind_Backtrace(
        step: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        walk: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

/// Makes the stacks, and walks once: the first walk may load the unwinder's library. Returns false
/// if there is no memory, or if the stack cannot be walked now.
pub(super) fn prepare() -> bool {
    if STACKS.load(Relaxed) == 0 {
        let Some(stacks) = sys::map_sparse(WALKERS * STACK) else {
            return false;
        };
        // Release pairs with the acquire in `callers`.
        STACKS.store(stacks.as_ptr() as usize, Release);
    }
    callers(&mut [0; FRAMES]).is_some()
}

/// Writes the return addresses of the calling thread's frames to `frames`, innermost first. Returns
/// how many there are, or `None` if the stack cannot be walked now.
///
/// The innermost frames are those of this library.
pub fn callers(frames: &mut [usize; FRAMES]) -> Option<usize> {
    let stacks = STACKS.load(Acquire);
    let thread = thread_pointer();
    let is_mine = |owner: &AtomicUsize| owner.load(Relaxed) == thread;
    if stacks == 0 || OWNERS.iter().any(is_mine) {
        return None;
    }
    // Acquire and the release below pair: a thread sees that the last one has left the stack.
    let nth = OWNERS
        .iter()
        .position(|owner| owner.compare_exchange(0, thread, Acquire, Relaxed).is_ok())?;
    let mut this = Walk { frames, depth: 0 };
    // SAFETY: this thread owns the stack, whose end is a multiple of 16. `walk_here` expects a
    // `Walk`.
    unsafe {
        on_stack(
            stacks + (nth + 1) * STACK,
            walk_here,
            (&raw mut this).cast(),
        );
    };
    let depth = this.depth;
    OWNERS[nth].store(0, Release);
    (depth > 0).then_some(depth)
}

/// Frees the stacks of threads that do not exist in the child of a fork.
pub(super) fn in_child() {
    let thread = thread_pointer();
    for owner in &OWNERS {
        if owner.load(Relaxed) != thread {
            owner.store(0, Relaxed);
        }
    }
}

struct Walk<'f> {
    frames: &'f mut [usize; FRAMES],
    depth: usize,
}

extern "C" fn walk_here(this: *mut c_void) {
    // SAFETY: `callers` passes a `Walk` that lives until this function returns.
    walk(unsafe { &mut *this.cast() });
}

fn walk(this: &mut Walk<'_>) {
    // SAFETY: `step` expects a `Walk`.
    unsafe { _Unwind_Backtrace(step, core::ptr::from_mut(this).cast()) };
}

/// Records one frame. The unwinder calls this for each frame. A result of 0 continues the walk, any
/// other result ends it.
extern "C" fn step(context: *mut c_void, this: *mut c_void) -> c_int {
    // SAFETY: `walk` passed the `Walk`, and the unwinder passes a valid context.
    let (this, address) = unsafe { (&mut *this.cast::<Walk<'_>>(), _Unwind_GetIP(context)) };
    match this.frames.get_mut(this.depth) {
        Some(frame) if address != 0 => {
            *frame = address;
            this.depth += 1;
            0
        }
        _ => 1,
    }
}

unsafe extern "C" {
    /// Calls `f(argument)` on the stack that ends at `top`.
    ///
    /// The caller's stack pointer is kept in the frame pointer, and the unwinding table says so. So
    /// the unwinder finds the caller's frames.
    #[link_name = "pinfold_profile_on_stack"]
    fn on_stack(top: usize, f: extern "C" fn(*mut c_void), argument: *mut c_void);
}

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .text.pinfold_profile_on_stack, \"ax\", @progbits",
    ".hidden pinfold_profile_on_stack",
    ".globl pinfold_profile_on_stack",
    ".type pinfold_profile_on_stack, @function",
    "pinfold_profile_on_stack:",
    ".cfi_startproc",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    "mov rsp, rdi",
    "mov rdi, rdx",
    "call rsi",
    "mov rsp, rbp",
    "pop rbp",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_endproc",
    ".size pinfold_profile_on_stack, . - pinfold_profile_on_stack",
    ".popsection",
);

#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".pushsection .text.pinfold_profile_on_stack, \"ax\", @progbits",
    ".balign 4",
    ".hidden pinfold_profile_on_stack",
    ".globl pinfold_profile_on_stack",
    ".type pinfold_profile_on_stack, @function",
    "pinfold_profile_on_stack:",
    ".cfi_startproc",
    "stp x29, x30, [sp, #-16]!",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset x29, -16",
    ".cfi_offset x30, -8",
    "mov x29, sp",
    ".cfi_def_cfa_register x29",
    "mov sp, x0",
    "mov x0, x2",
    "blr x1",
    "mov sp, x29",
    ".cfi_def_cfa_register sp",
    "ldp x29, x30, [sp], #16",
    ".cfi_def_cfa_offset 0",
    ".cfi_restore x29",
    ".cfi_restore x30",
    "ret",
    ".cfi_endproc",
    ".size pinfold_profile_on_stack, . - pinfold_profile_on_stack",
    ".popsection",
);

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod elsewhere {
    use super::c_void;

    /// Calls `f(argument)` on the caller's own stack.
    #[unsafe(no_mangle)]
    extern "C" fn pinfold_profile_on_stack(
        _: usize,
        f: extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) {
        f(argument);
    }
}
