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
//!    the handler that belongs to the action, or else the next unused one. The handler has the mask
//!    and the flags of the action that it replaces.
//! 2. If a handler is called, by the kernel or by a later handler of the program, it reports the
//!    fault, and calls the function that it replaced. It stays installed. For an action without a
//!    function, it installs that action and returns. The instruction faults again, and the kernel
//!    does what the program asked for.
//! 3. The later handler may have passed one argument only. So the other arguments are used only if
//!    the replaced action takes them (`SA_SIGINFO`), or if the handler is the installed one.
//!
//! # Why no action of the program is lost
//!
//! The program may set an action at any moment. No system call replaces an action on the condition
//! that it is the expected one. So each exchange compares the action that it removed with the
//! expected one. If the two differ, the program has set the removed action in between, and that is
//! the newest action. The thread then makes another exchange: it installs the handler for the
//! newest action, or the newest action itself. The last exchange installs the action that the
//! program has set last, or the handler that belongs to this action.
//!
//! Until then, the handler of an older action is installed: the exchange is in *doubt*. [`STATE`]
//! shows this. A handler that finds an exchange under way waits for its end. If the exchange was in
//! doubt, the handler returns, and the instruction faults again, now with the right action.
//!
//! One answer may be wrong: an exchange is in doubt for some microseconds. A program that sets two
//! actions in this time may be told that the second one replaced the handler of the older action.

use super::page_number;
use super::report::{self, What};
use crate::sys;
use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr::null;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicUsize};
use pinfold_rseq::{kernel, syscall};

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

// SAFETY: one thread writes an action, before it counts the action in `USED`. Other threads read
// only actions that are counted.
unsafe impl Sync for Action {}

/// The program's actions that the handlers replaced.
static REPLACED: [Action; MOST] = [const { Action(UnsafeCell::new(MaybeUninit::zeroed())) }; MOST];
/// How many handlers have an action.
static USED: AtomicUsize = AtomicUsize::new(0);

/// The state of the last exchange that [`replace`] began. [`CHANGING`] is set until the exchange
/// ends. [`DOUBT`] is set when the exchange comes into doubt, and cleared when the next one begins.
static STATE: AtomicU32 = AtomicU32::new(0);
const CHANGING: u32 = 1;
const DOUBT: u32 = 2;
/// Microseconds for which an exchange in doubt stays [`CHANGING`] after its last step, so that a
/// handler that the kernel called during the doubt still sees the exchange.
const AFTER_DOUBT: u32 = 2000;
/// How often a handler checks an exchange under way before it goes on without waiting for the end:
/// for two seconds in all.
const PATIENCE: u32 = 20_000;
/// Microseconds between two of these checks.
const BETWEEN_LOOKS: u32 = 100;
/// The most rounds of one exchange. Each round but the first means that the program has set an
/// action within the last microsecond. Only a system that returns other actions than those that
/// were set needs this many rounds.
const ROUNDS: u32 = 1000;

fn replaced(nth: usize) -> *mut libc::sigaction {
    REPLACED[nth].0.get().cast()
}

/// Installs the handler, if the installed action for SIGSEGV is the program's. One thread at a time
/// calls this. Costs a system call.
pub(super) fn watch() {
    sys::keep_errno(|| {
        if let Some(now) = installed().filter(|now| !is_ours(now)) {
            replace(&now);
        }
    });
}

/// Installs the handler for the action `now`, which was installed a moment ago.
fn replace(now: &libc::sigaction) {
    let Some(ours) = handler_for(now) else {
        return;
    };
    // Release: a handler that the kernel calls from the exchange on sees the state. The kernel's
    // lock of the actions orders the two.
    STATE.store(CHANGING, Release);
    let (mut expected, mut ours) = (*now, ours);
    for _ in 0..ROUNDS {
        let old = exchange(&ours);
        if is_same(&old, &expected) {
            break;
        }
        STATE.fetch_or(DOUBT, Release);
        // The program has set `old`. If no handler is left for `old`, `old` itself is installed
        // again.
        expected = ours;
        ours = handler_for(&old).unwrap_or(old);
    }
    if STATE.load(Relaxed) & DOUBT != 0 {
        sys::sleep_microseconds(AFTER_DOUBT);
    }
    // Release pairs with the acquire in `was_in_doubt`: the handler sees the installed action.
    STATE.fetch_and(!CHANGING, Release);
}

/// Returns an action with the handler that belongs to `action`. Returns `None` if all handlers
/// belong to other actions. If `action` has a handler of this module, returns `action`.
fn handler_for(action: &libc::sigaction) -> Option<libc::sigaction> {
    if is_ours(action) {
        return Some(*action);
    }
    let used = USED.load(Relaxed);
    // SAFETY: only this thread writes actions, and the first `used` are written.
    let same = (0..used).find(|&nth| is_same(action, unsafe { &*replaced(nth) }));
    let nth = same.unwrap_or(used);
    if nth == MOST {
        return None;
    }
    let mut ours = *action;
    ours.sa_sigaction = HANDLERS[nth] as usize;
    ours.sa_flags = (ours.sa_flags | libc::SA_SIGINFO) & !libc::SA_RESETHAND;
    if !has_function(action) {
        // To report an overflowed stack, the handler needs another stack. If the program ignores
        // the signal, the handler must not interrupt a system call, so calls are restarted.
        ours.sa_flags |= libc::SA_ONSTACK | libc::SA_RESTART;
    }
    // A sandbox may carry out system calls in a handler of SIGSYS. The kernel ends a process that
    // blocks SIGSYS there, so the handler leaves it unblocked.
    let signals = (&raw mut ours.sa_mask).cast::<u64>();
    // SAFETY: a set of signals begins with a word of 64 bits, one for each signal.
    unsafe { *signals &= !(1 << (libc::SIGSYS - 1)) };
    if same.is_none() {
        // SAFETY: action `nth` is this thread's alone, until it is counted.
        unsafe { replaced(nth).write(*action) };
        // Release pairs with the acquire in `replaced_by`.
        USED.store(used + 1, Release);
    }
    Some(ours)
}

fn is_ours(action: &libc::sigaction) -> bool {
    let is_ours = |&handler: &Handler| handler as usize == action.sa_sigaction;
    HANDLERS.iter().any(is_ours)
}

fn has_function(action: &libc::sigaction) -> bool {
    !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
}

/// Installs `new`, and returns the action that it replaces. If the system refuses, returns `new`.
fn exchange(new: &libc::sigaction) -> libc::sigaction {
    let mut old = *new;
    // SAFETY: the action comes from the C library, or is this module's, whose code stays loaded.
    unsafe { libc::sigaction(libc::SIGSEGV, new, &raw mut old) };
    old
}

/// Installs `new`, an action without a function, in the place of `expected`. If the program has set
/// another action in between, that action stays.
fn give_way(new: &libc::sigaction, expected: &libc::sigaction) {
    let (mut new, mut expected) = (*new, *expected);
    for _ in 0..ROUNDS {
        let old = exchange(&new);
        if is_same(&old, &expected) || is_same(&old, &new) {
            return;
        }
        (expected, new) = (new, old);
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

fn is_same(one: &libc::sigaction, other: &libc::sigaction) -> bool {
    // The kernel knows 64 signals. The bytes behind them may hold anything, so they are not
    // compared.
    // SAFETY: a set of signals begins with a word of 64 bits.
    let signals = |set: &libc::sigset_t| unsafe { core::ptr::from_ref(set).cast::<u64>().read() };
    // The C library sets this flag itself.
    const RESTORER: c_int = 0x0400_0000;
    one.sa_sigaction == other.sa_sigaction
        && (one.sa_flags ^ other.sa_flags) & !RESTORER == 0
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
    let takes_information = replaced.sa_flags & libc::SA_SIGINFO != 0 && has_function(&replaced);
    let is_once = replaced.sa_flags & libc::SA_RESETHAND != 0 && has_function(&replaced);
    let was_in_doubt = sys::keep_errno(was_in_doubt);
    // If the installed action is another one, a later handler of the program may be the caller.
    let now = match was_in_doubt || is_once || !takes_information {
        true => sys::keep_errno(installed),
        false => None,
    };
    let is_installed = now.is_none_or(|now| now.sa_sigaction == HANDLERS[NTH] as usize);
    let has_arguments = takes_information || is_installed;
    if was_in_doubt && !is_installed {
        if has_arguments {
            // SAFETY: the caller passes the kernel's information.
            sys::keep_errno(|| unsafe { send_again(signal, info) });
        }
        return;
    }
    if has_arguments {
        // SAFETY: the kernel passes valid pointers. So does a later handler of the program: the
        // replaced action, which it means to call, takes them.
        sys::keep_errno(|| unsafe { look(info, context) });
    }
    // The function may leave by a jump. Nothing here needs to run after it.
    match replaced.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => sys::keep_errno(|| {
            // SAFETY: `has_arguments` says that `info` is the kernel's.
            let is_sent = has_arguments && unsafe { (*info).si_code } <= 0;
            // The kernel does not ignore a fault: it ends the process.
            if replaced.sa_sigaction == libc::SIG_IGN && (is_sent || !has_arguments) {
                return;
            }
            if let Some(now) = now {
                give_way(&replaced, &now);
            }
            if is_sent {
                // SAFETY: `is_sent` is true only if `info` is the kernel's.
                unsafe { send_again(signal, info) };
            }
        }),
        _ => {
            if let Some(now) = now.filter(|_| is_once && is_installed) {
                let mut default = replaced;
                default.sa_sigaction = libc::SIG_DFL;
                sys::keep_errno(|| give_way(&default, &now));
            }
            // SAFETY: the program installed this function, and the arguments are those that it
            // takes.
            unsafe { call(&replaced, signal, info, context) }
        }
    }
}

/// Waits until no exchange is under way. Returns whether one was, and was in doubt.
fn was_in_doubt() -> bool {
    // Acquire pairs with the releases in `replace`.
    let mut state = STATE.load(Acquire);
    if state & CHANGING == 0 {
        return false;
    }
    // The thread that made the exchange may have been killed, or interrupted by this handler.
    for _ in 0..PATIENCE {
        state = STATE.load(Acquire);
        if state & CHANGING == 0 {
            return state & DOUBT != 0;
        }
        sys::sleep_microseconds(BETWEEN_LOOKS);
    }
    // The exchange does not end. The next handler does not wait for it.
    let _ = STATE.compare_exchange(state, state & !CHANGING, Relaxed, Relaxed);
    state & DOUBT != 0
}

/// Forgets, in the child of a fork, an exchange that another thread of the parent had under way.
pub(super) fn in_child() {
    STATE.store(0, Relaxed);
}

/// Returns the action that handler `nth` replaced.
fn replaced_by(nth: usize) -> Option<libc::sigaction> {
    // Acquire pairs with the release in `handler_for`: this thread sees the action.
    // SAFETY: the action is counted, so no thread writes it any more.
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
    let (process, thread) = (kernel::process() as usize, kernel::thread() as usize);
    let arguments = [process, thread, signal as usize, info as usize];
    // SAFETY: the caller promises valid information.
    unsafe {
        if (*info).si_code <= 0 {
            let _ = syscall(libc::SYS_rt_tgsigqueueinfo, arguments);
        }
    }
}

/// Calls the function of `action`.
///
/// # Safety
///
/// The action has a function. `info` and `context` are the kernel's, if the function takes them.
unsafe fn call(
    action: &libc::sigaction,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    let function = action.sa_sigaction;
    if action.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: the program installed a function of this type.
        let function = unsafe { core::mem::transmute::<usize, Handler>(function) };
        function(signal, info, context);
    } else {
        // SAFETY: the program installed a function of this type.
        let function = unsafe { core::mem::transmute::<usize, extern "C" fn(c_int)>(function) };
        function(signal);
    }
}

/// Returns which access the faulting instruction made, if the machine tells, and the address of the
/// instruction.
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

/// Returns which access the faulting instruction made, if the machine tells, and the address of the
/// instruction.
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
