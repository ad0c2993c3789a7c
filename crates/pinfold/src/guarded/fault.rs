//! The handler of SIGSEGV: reports accesses to closed pages of the pool, and passes every signal on
//! to the program's own action.
//!
//! The program may install its own handler before or after this one. It may also keep the action
//! that it replaced, to call it or to restore it later. If one handler served all these actions, it
//! could pass a signal to an action that the program has since replaced. So there are several
//! handlers here, [`HANDLERS`], which differ only in their number. Each belongs to one action of
//! the program, the one that it replaced ([`REPLACED`]).
//!
//! 1. [`watch`] reads the installed action. If that is none of the handlers here, `watch` installs
//!    the handler that belongs to the action, or else the next unused one.
//! 2. If the kernel calls a handler, the handler reports the fault, restores the program's action,
//!    and returns. The instruction faults again, and the kernel does what the program asked for,
//!    with the program's mask, stack and flags. [`watch`] installs the handler again when the next
//!    block is guarded.
//! 3. If a later handler of the program calls a handler here, the installed action is the later
//!    one. Then this handler changes no action. It calls the function that it replaced.
//! 4. The later handler may have passed one argument only. So the other arguments are used only if
//!    the replaced action takes them (`SA_SIGINFO`).
//!
//! The program may change the action between two system calls of this module. So each change looks
//! at the action that it removed, and puts an unexpected one back.

use super::page_number;
use super::report::{self, What};
use crate::sys;
use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr::{null, null_mut};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// The most actions of a program that are replaced. Later ones stay, and get no reports.
const MOST: usize = 8;
static HANDLERS: [Handler; MOST] = [
    handle::<0>,
    handle::<1>,
    handle::<2>,
    handle::<3>,
    handle::<4>,
    handle::<5>,
    handle::<6>,
    handle::<7>,
];

struct Action(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: one thread writes an action, before it counts the action in `USED`. Others read only
// actions that are counted.
unsafe impl Sync for Action {}

/// The program's actions that the handlers replaced.
static REPLACED: [Action; MOST] = [const { Action(UnsafeCell::new(MaybeUninit::zeroed())) }; MOST];
/// How many handlers have an action.
static USED: AtomicUsize = AtomicUsize::new(0);

fn replaced(nth: usize) -> *mut libc::sigaction {
    REPLACED[nth].0.get().cast()
}

/// Installs the handler, if the program has another action for SIGSEGV. One thread at a time calls
/// this. Costs a system call.
pub(super) fn watch() {
    sys::keep_errno(|| {
        let Some(now) = installed() else {
            return;
        };
        let is_ours = |&handler: &Handler| handler as usize == now.sa_sigaction;
        if !HANDLERS.iter().any(is_ours) {
            replace(&now);
        }
    });
}

fn replace(now: &libc::sigaction) {
    let used = USED.load(Relaxed);
    // SAFETY: only this thread writes actions, and the first `used` are written.
    let same = (0..used).find(|&nth| is_same(now, unsafe { &*replaced(nth) }));
    let nth = same.unwrap_or(used);
    if nth == MOST {
        return;
    }
    // SAFETY: a `sigaction` of zeroes is valid.
    let mut ours: libc::sigaction = unsafe { core::mem::zeroed() };
    ours.sa_sigaction = HANDLERS[nth] as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // A system call that a sent signal interrupts goes on as it does without this handler.
    if now.sa_sigaction == libc::SIG_IGN || now.sa_flags & libc::SA_RESTART != 0 {
        ours.sa_flags |= libc::SA_RESTART;
    }
    if same.is_none() {
        // SAFETY: action `nth` is this thread's alone, until it is counted.
        unsafe { replaced(nth).write(*now) };
        // Release pairs with the acquire in `replaced_by`.
        USED.store(used + 1, Release);
    }
    exchange(&ours, now.sa_sigaction);
}

/// Installs `new`, if the handler of the action that it replaces is `expected`.
fn exchange(new: &libc::sigaction, expected: usize) {
    // SAFETY: a `sigaction` of zeroes is valid.
    let mut old: libc::sigaction = unsafe { core::mem::zeroed() };
    // SAFETY: both actions come from the C library, or are this module's, whose code stays loaded.
    unsafe {
        libc::sigaction(libc::SIGSEGV, new, &raw mut old);
        if old.sa_sigaction != expected {
            libc::sigaction(libc::SIGSEGV, &raw const old, null_mut());
        }
    }
}

/// Returns the installed action for SIGSEGV.
fn installed() -> Option<libc::sigaction> {
    // SAFETY: a `sigaction` of zeroes is valid.
    let mut now: libc::sigaction = unsafe { core::mem::zeroed() };
    // SAFETY: the call only writes to `now`.
    let known = unsafe { libc::sigaction(libc::SIGSEGV, null(), &raw mut now) } == 0;
    known.then_some(now)
}

/// Returns whether two actions that the C library has returned are the same.
fn is_same(one: &libc::sigaction, other: &libc::sigaction) -> bool {
    // The kernel knows 64 signals. The C library leaves any bytes behind them.
    // SAFETY: a set of signals begins with a word of 64 bits.
    let signals = |set: &libc::sigset_t| unsafe { core::ptr::from_ref(set).cast::<u64>().read() };
    one.sa_sigaction == other.sa_sigaction
        && one.sa_flags == other.sa_flags
        && signals(&one.sa_mask) == signals(&other.sa_mask)
}

extern "C" fn handle<const NTH: usize>(
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    let Some(replaced) = replaced_by(NTH) else {
        return;
    };
    let ours = HANDLERS[NTH] as usize;
    let now = sys::keep_errno(installed);
    let by_kernel = now.is_none_or(|now| now.sa_sigaction == ours);
    // Several threads may fault at once. The first one brings the action back for all.
    let is_back = now.is_some_and(|now| is_same(&now, &replaced));
    if by_kernel || is_back || replaced.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: the kernel passes valid pointers. So does a later handler of the program, which
        // takes this handler for the replaced one, for which it needs them.
        sys::keep_errno(|| unsafe { look(info, context) });
    }
    if by_kernel || is_back {
        sys::keep_errno(|| {
            if by_kernel {
                exchange(&replaced, ours);
            }
            // SAFETY: the kernel passes valid information.
            unsafe { send_again(signal, info) };
        });
    } else {
        // The function may leave by a jump. Nothing here needs to run after it.
        // SAFETY: the caller's arguments are those for the replaced action.
        unsafe { call(&replaced, signal, info, context) };
    }
}

/// Returns the action that handler `nth` replaced.
fn replaced_by(nth: usize) -> Option<libc::sigaction> {
    // Acquire pairs with the release in `replace`: this thread sees the action.
    // SAFETY: the action is counted, so nobody writes it any more.
    (nth < USED.load(Acquire)).then(|| unsafe { *replaced(nth) })
}

/// Reports the fault, if it is a wrong access to a guarded block.
///
/// # Safety
///
/// The pointers are those that the kernel passes to a handler.
unsafe fn look(info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the caller promises valid pointers. A fault's information has an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code > 0
        && page_number(address).is_some()
        && let Some(nth) = report::meant(address)
    {
        // SAFETY: the caller passes the thread's context.
        let (what, from) = unsafe { instruction(context) };
        report::write(nth, what, address, from);
    }
}

/// Sends the signal again if a process sent it. A fault repeats itself; a sent signal does not.
///
/// # Safety
///
/// The kernel passed `info`.
unsafe fn send_again(signal: c_int, info: *mut libc::siginfo_t) {
    // SAFETY: the caller promises valid information, and the calls have no other preconditions.
    unsafe {
        if (*info).si_code <= 0 {
            let (process, thread) = (libc::getpid(), libc::gettid());
            libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info);
        }
    }
}

/// Does what `action` asks for, for a handler of the program that passes a signal on. If that is
/// the kernel's default, installs it: a fault happens again, and ends the process. A signal that a
/// process has sent does not come again, and cannot be told from a fault here.
///
/// # Safety
///
/// `info` and `context` are the kernel's, if the action's function takes them.
unsafe fn call(
    action: &libc::sigaction,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    match action.sa_sigaction {
        libc::SIG_IGN => {}
        // SAFETY: the default action needs no code.
        libc::SIG_DFL => unsafe {
            libc::sigaction(libc::SIGSEGV, action, null_mut());
        },
        function if action.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: the program installed a function of this type.
            let function = unsafe { core::mem::transmute::<usize, Handler>(function) };
            function(signal, info, context);
        }
        function => {
            // SAFETY: the program installed a function of this type.
            let function = unsafe { core::mem::transmute::<usize, extern "C" fn(c_int)>(function) };
            function(signal);
        }
    }
}

/// Returns what the instruction did that faulted, and its address.
///
/// # Safety
///
/// `context` is what the kernel passed to the handler.
#[cfg(target_arch = "x86_64")]
unsafe fn instruction(context: *mut c_void) -> (What, Option<usize>) {
    /// The bit of the processor's error code for a write.
    const WRITE: i64 = 2;
    // SAFETY: the kernel passes a `ucontext_t`.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let what = match registers[libc::REG_ERR as usize] & WRITE {
        0 => What::Read,
        _ => What::Write,
    };
    (what, Some(registers[libc::REG_RIP as usize] as usize))
}

/// Returns what the instruction did that faulted, and its address.
///
/// # Safety
///
/// `context` is what the kernel passed to the handler.
#[cfg(target_arch = "aarch64")]
unsafe fn instruction(context: *mut c_void) -> (What, Option<usize>) {
    // SAFETY: the kernel passes a `ucontext_t`.
    let pc = unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.pc };
    (What::Access, Some(pc as usize))
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn instruction(_: *mut c_void) -> (What, Option<usize>) {
    (What::Access, None)
}
