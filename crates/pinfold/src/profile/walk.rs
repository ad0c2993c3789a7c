//! Walks the calling thread's stack, on a stack of its own.
//!
//! The unwinder needs a few KiB of stack, which a thread with a small stack may not have left. So a
//! walk switches to one of [`WALKERS`] stacks. A thread takes a stack by one compare-exchange, and
//! drops its sample if all are taken. Signals wait until the walk is over.
//!
//! A walk never calls the loader and never waits for the loader's lock. A thread that allocates may
//! hold that lock, as a library's constructor does, or the lock's holder may wait for this thread.
//! So [`prepare`] walks once, outside any allocation: that walk loads the unwinder's library and
//! finds its functions. No walk happens before, and none if the unwinder itself would take the lock
//! (`unwinder`).

use super::here;
use super::records::FRAMES;
use super::unwinder;
use crate::sys;
use core::ffi::{c_int, c_void};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU8, AtomicUsize};
use pinfold_rseq::kernel;
use pinfold_rseq::thread_pointer;

/// The number of stacks, and so of threads that can walk at the same time.
const WALKERS: usize = 16;
/// Bytes of each stack. No signal handler runs on it.
const STACK: usize = 64 << 10;

/// The thread pointers of the threads that walk, or 0.
static OWNERS: [AtomicUsize; WALKERS] = [const { AtomicUsize::new(0) }; WALKERS];
/// Whether stacks can be walked: [`UNPREPARED`], [`PREPARED`], or why they cannot.
static STATE: AtomicU8 = AtomicU8::new(UNPREPARED);
/// No walk has loaded the unwinder yet.
const UNPREPARED: u8 = 0;
const PREPARED: u8 = 1;
/// A walk may have to wait for a lock whose holder waits for the walk, because of
/// [`NoWalks::Unwinder`] or [`NoWalks::Tables`].
const UNWINDER_LOCKS: u8 = 2;
const TABLES_ARE_REGISTERED: u8 = 3;

/// Why a process cannot walk its call stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum NoWalks {
    /// The unwinder takes the loader's lock for each frame.
    Unwinder = 1,
    /// The program has registered unwinding tables.
    Tables = 2,
}

/// The address of the first stack.
static STACKS: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" {
    fn _Unwind_Backtrace(
        step: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        walk: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
    /// Returns the value that the frame's stack pointer had at the call.
    fn _Unwind_GetCFA(context: *mut c_void) -> usize;
}

/// Stops all later walks, and with them all samples of call stacks. For a process in which from now
/// on the unwinder may allocate while it holds a lock that a walk needs. One store.
pub fn forbid_walks() {
    // A walk that has begun holds no lock of this library's, so no other thread waits for it.
    STATE.store(TABLES_ARE_REGISTERED, Relaxed);
}

/// Returns why stacks cannot be walked, if that is known. One load.
pub fn no_walks() -> Option<NoWalks> {
    match STATE.load(Relaxed) {
        UNWINDER_LOCKS => Some(NoWalks::Unwinder),
        TABLES_ARE_REGISTERED => Some(NoWalks::Tables),
        _ => None,
    }
}

/// Returns whether [`forbid_walks`] was called, or the unwinder takes the loader's lock. One load.
pub(crate) fn walks_are_forbidden() -> bool {
    no_walks().is_some()
}

/// Makes the stacks, and walks once: that walk may load the unwinder's library. Returns false if
/// there is no memory, or if the stack cannot be walked now. Forbids walks if the unwinder takes
/// the loader's lock. The thread must not be in an allocation.
pub(crate) fn prepare() -> bool {
    if STACKS.load(Relaxed) == 0 {
        let Some(stacks) = sys::map_sparse(WALKERS * STACK) else {
            return false;
        };
        // Release pairs with the acquire in `on_own_stack`.
        STACKS.store(stacks.as_ptr() as usize, Release);
    }
    if STATE.load(Relaxed) == UNPREPARED {
        // Passes a frame to leave out, so that this walk calls every function that later walks
        // call.
        if walk_on_own_stack(&mut [0; FRAMES], here()).is_none() {
            return false;
        }
        let state = match unwinder::takes_loader_lock(_Unwind_Backtrace as *const () as usize) {
            true => UNWINDER_LOCKS,
            false => PREPARED,
        };
        // The exchange fails if walks were forbidden meanwhile. Relaxed: the word publishes no
        // data. The loader's locks, and the words that hold the functions' addresses, do that.
        let _ = STATE.compare_exchange(UNPREPARED, state, Relaxed, Relaxed);
    }
    STATE.load(Relaxed) == PREPARED
}

/// Returns whether `address` lies in the stacks on which call stacks are walked.
pub(super) fn holds(address: usize) -> bool {
    let start = STACKS.load(Relaxed);
    start != 0 && address.wrapping_sub(start) < WALKERS * STACK
}

/// For [`callers`] and [`walk`]: leaves no frame out.
pub(crate) const ALL: usize = 0;

/// Writes the return addresses of the calling thread's frames to `frames`, innermost first. Returns
/// how many there are, or `None` if the stack cannot be walked now.
///
/// Leaves out the frame of the function in which [`here`] returned `from`, and the frames of the
/// functions that it called.
pub fn callers(frames: &mut [usize; FRAMES], from: usize) -> Option<usize> {
    match STATE.load(Relaxed) {
        PREPARED => walk_on_own_stack(frames, from),
        _ => None,
    }
}

fn walk_on_own_stack(frames: &mut [usize; FRAMES], from: usize) -> Option<usize> {
    let mut depth = 0;
    on_own_stack(&mut || depth = walk(frames, from));
    (depth > 0).then_some(depth)
}

/// Runs `f` on one of the stacks of this module. Does nothing if [`prepare`] has made none, if all
/// are in use, or if the thread runs on one already.
fn on_own_stack(f: &mut dyn FnMut()) {
    let stacks = STACKS.load(Acquire);
    if stacks != 0 {
        // Frees the stack before signals are unblocked: a handler may leave by `longjmp`, and the
        // stack would stay taken.
        without_signals(u64::MAX, || take_stack_and_run(stacks, f));
    }
}

fn take_stack_and_run(stacks: usize, f: &mut dyn FnMut()) {
    let thread = thread_pointer();
    let is_mine = |owner: &AtomicUsize| owner.load(Relaxed) == thread;
    // Acquire and the release below pair: a thread sees that the last one has left the stack.
    let take = |owner: &AtomicUsize| owner.compare_exchange(0, thread, Acquire, Relaxed).is_ok();
    if OWNERS.iter().any(is_mine) {
        return;
    }
    let Some(nth) = OWNERS.iter().position(take) else {
        return;
    };
    // SAFETY: this thread owns the stack, whose end is a multiple of 16.
    unsafe { run_on_stack(stacks + (nth + 1) * STACK, f) };
    OWNERS[nth].store(0, Release);
}

/// Runs `f`, which switches to another stack, with the signals in `which` blocked in this thread.
/// Bit 0 is signal 1. Does nothing, and returns false, if the system refuses.
///
/// A signal handler that ran on a stack of this library would find little room there. It could
/// leave that stack by a jump. And if this thread is in a handler on an alternate stack, the kernel
/// would begin the next handler at that stack's top, over the frames of the first.
pub(crate) fn without_signals(which: u64, f: impl FnOnce()) -> bool {
    // Makes the system call itself, because the C library would leave its own signals unblocked.
    let Ok(before) = kernel::block_signals(libc::SIG_BLOCK, which) else {
        return false;
    };
    f();
    let _ = kernel::block_signals(libc::SIG_SETMASK, before);
    true
}

/// Runs `f` on the stack that ends at `top`.
///
/// # Safety
///
/// `top` is a multiple of 16, and the end of memory that is large enough for `f`, and that no other
/// code uses.
pub(crate) unsafe fn run_on_stack(top: usize, mut f: &mut dyn FnMut()) {
    // SAFETY: the caller promises the stack. `run` expects the address of a `&mut dyn FnMut()`.
    unsafe { on_stack(top, run, (&raw mut f).cast()) };
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

extern "C" fn run(f: *mut c_void) {
    // SAFETY: `run_on_stack` passes the address of its own `&mut dyn FnMut()`, which lives until
    // this function returns.
    let f = unsafe { &mut *f.cast::<&mut dyn FnMut()>() };
    f();
}

struct Walk<'f> {
    frames: &'f mut [usize],
    depth: usize,
    /// Frames are left out up to the one that contains this address. [`ALL`] from then on.
    from: usize,
}

/// Writes the return addresses of the calling thread's frames to `frames`, innermost first, and
/// returns how many there are. Leaves frames out as [`callers`] does. Uses a few KiB of the stack.
/// The process's first walk may load the unwinder's library.
#[inline(never)]
pub(crate) fn walk(frames: &mut [usize], from: usize) -> usize {
    let mut this = Walk {
        frames,
        depth: 0,
        from,
    };
    // SAFETY: `step` expects a `Walk`, which lives until the call returns.
    unsafe { _Unwind_Backtrace(step, (&raw mut this).cast()) };
    this.depth
}

/// Records one frame. The unwinder calls this for each frame. A result of 0 continues the walk, any
/// other result ends it.
extern "C" fn step(context: *mut c_void, this: *mut c_void) -> c_int {
    // SAFETY: `walk` passed the `Walk`, and the unwinder passes a valid context.
    let (this, address) = unsafe { (&mut *this.cast::<Walk<'_>>(), _Unwind_GetIP(context)) };
    if this.from != ALL {
        // SAFETY: the unwinder passes a valid context.
        let stack_pointer = unsafe { _Unwind_GetCFA(context) };
        let walkers = STACKS.load(Relaxed);
        let is_walkers = (walkers..walkers + WALKERS * STACK).contains(&stack_pointer);
        if is_walkers || stack_pointer <= this.from {
            return 0;
        }
        this.from = ALL;
    }
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
