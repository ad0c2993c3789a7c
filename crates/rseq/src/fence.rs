//! The fence: returns when every operation that began before it is over.
#![allow(unsafe_code, reason = "calls membarrier")]

use crate::abi::{
    MEMBARRIER_CMD_FLAG_CPU, MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ, MEMBARRIER_CMD_QUERY,
    MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_RSEQ,
};
use crate::state::{Backend, Index, backend};
use crate::syscall;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicI32, AtomicPtr};

/// The error of [`fence()`]: the kernel cannot fence restartable sequences.
///
/// The kernel is older than 5.10, or a sandbox forbids `membarrier`. With `EBUSY`: without
/// restartable sequences, an operation of another thread or of an interrupted frame did not end.
///
/// ```
/// let error = pinfold_rseq::FenceError { errno: 38 };
/// assert!(error.to_string().contains("errno 38"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FenceError {
    /// The errno of the system call.
    pub errno: i32,
}

crate::error_texts! { FenceError:
    FenceError { errno: libc::EBUSY } => "an operation that another thread or an interrupted frame \
        has begun does not end; try again later";
    FenceError { errno } => "membarrier cannot fence restartable sequences (errno {errno}): it \
        needs Linux 5.10 and a sandbox that lets membarrier pass";
}

/// Returns when every operation that began before the call, on any CPU, has committed or was
/// aborted.
///
/// An aborted operation starts again, and sees everything that was written before the fence. On the
/// atomic backend this function does nothing. There,
/// [`Units::await_stopped`](crate::Units::await_stopped) and
/// [`Units::quiesce`](crate::Units::quiesce) wait for the operations instead.
///
/// Costs a system call and an interrupt to each other CPU that runs a thread of this process, some
/// microseconds in all. Costs three loads if the kernel has refused before. Keeps errno.
///
/// # Errors
///
/// Returns [`FenceError`] if the kernel cannot fence. Nothing is fenced then.
pub fn fence() -> Result<(), FenceError> {
    membarrier(0, 0)
}

/// Returns when every operation that began on `index` before the call is over.
///
/// If the index is a CPU number, interrupts only that CPU. A concurrency id names no CPU, so this
/// function then fences all CPUs, as [`fence()`] does. Costs a system call and one interrupt, or as
/// much as [`fence()`].
///
/// # Errors
///
/// Returns [`FenceError`] if the kernel cannot fence. Nothing is fenced then.
pub fn fence_index(index: usize) -> Result<(), FenceError> {
    match backend() {
        Backend::Rseq(Index::Cpu) => membarrier(MEMBARRIER_CMD_FLAG_CPU, index as libc::c_int),
        _ => fence(),
    }
}

/// Returns whether the kernel has refused to fence, so that [`fence()`] would fail. Two loads.
pub fn fence_is_refused() -> bool {
    backend() != Backend::Atomic && ANSWER.load(Relaxed) > WORKS
}

/// Asks the kernel whether it can fence, without fencing, and remembers a refusal. Always returns
/// true on the atomic backend.
///
/// Costs at most one system call, and one more the first time.
pub fn can_fence() -> bool {
    if backend() == Backend::Atomic {
        return true;
    }
    register();
    if ANSWER.load(Relaxed) == WORKS
        && let Err(refused) = call(MEMBARRIER_CMD_QUERY, 0, 0)
    {
        remember(Err(refused));
    }
    ANSWER.load(Relaxed) == WORKS
}

/// The state of `membarrier`: [`UNTRIED`], [`WORKS`], or the errno with which the kernel refused.
static ANSWER: AtomicI32 = AtomicI32::new(UNTRIED);
const UNTRIED: i32 = -1;
const WORKS: i32 = 0;

/// Registers the process for fences.
///
/// Registering a process with several threads takes the kernel milliseconds. So `init` calls this
/// function when it chooses the backend, usually while the process has one thread.
pub(crate) fn register() {
    if ANSWER.load(Relaxed) == UNTRIED {
        let answer = call(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_RSEQ, 0, 0);
        remember(answer);
    }
}

/// Stores a refusal, so that this module does not ask the kernel again. `ENOMEM` is not stored,
/// because the kernel may have memory later.
fn remember(answer: Result<(), FenceError>) {
    match answer {
        Ok(()) => ANSWER.store(WORKS, Relaxed),
        Err(FenceError {
            errno: libc::ENOMEM,
        }) => {}
        Err(FenceError { errno }) => ANSWER.store(errno, Relaxed),
    }
}

/// The function that [`watch_fences`] was given, or null.
static WATCHER: AtomicPtr<()> = AtomicPtr::new(null_mut());

/// Has each later fence call `watcher` before it interrupts CPUs: with a CPU, or with `None` for
/// all CPUs that run a thread of this process. The watcher must not fence.
#[doc(hidden)]
pub fn watch_fences(watcher: fn(Option<usize>)) {
    // Release pairs with the acquire in `tell`.
    WATCHER.store(watcher as *mut (), Release);
}

/// Tells the watcher of a fence that is about to be executed.
#[cold]
#[inline(never)]
fn tell(flags: libc::c_uint, cpu: libc::c_int) {
    let watcher = WATCHER.load(Acquire);
    if !watcher.is_null() {
        // SAFETY: `watch_fences`, which alone stores to `WATCHER`, stored a function of this type.
        let watcher = unsafe { core::mem::transmute::<*mut (), fn(Option<usize>)>(watcher) };
        watcher((flags == MEMBARRIER_CMD_FLAG_CPU).then_some(cpu as usize));
    }
}

fn membarrier(flags: libc::c_uint, cpu: libc::c_int) -> Result<(), FenceError> {
    if backend() == Backend::Atomic {
        return Ok(());
    }
    register();
    match ANSWER.load(Relaxed) {
        WORKS => {}
        UNTRIED => {
            return Err(FenceError {
                errno: libc::ENOMEM,
            });
        }
        errno => return Err(FenceError { errno }),
    }
    tell(flags, cpu);
    let answer = call(MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ, flags, cpu);
    if answer.is_err() {
        remember(answer);
    }
    answer
}

/// Makes the system call.
fn call(command: libc::c_int, flags: libc::c_uint, cpu: libc::c_int) -> Result<(), FenceError> {
    let arguments = [command as usize, flags as usize, cpu as usize];
    // SAFETY: membarrier takes three integers and accesses no memory of the process.
    let answer = unsafe { syscall(libc::SYS_membarrier, arguments) };
    answer.map(drop).map_err(|errno| FenceError { errno })
}
