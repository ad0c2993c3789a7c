//! The fence: waiting until every operation that has begun is over.
#![allow(unsafe_code, reason = "calls membarrier")]

use crate::abi::{
    MEMBARRIER_CMD_FLAG_CPU, MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ, MEMBARRIER_CMD_QUERY,
    MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_RSEQ,
};
use crate::state::{Backend, Index, backend};
use core::sync::atomic::AtomicI32;
use core::sync::atomic::Ordering::Relaxed;

/// The kernel cannot fence restartable sequences: it is older than 5.10, or a sandbox forbids `membarrier`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FenceError {
    /// What the system call answered.
    pub errno: i32,
}

impl core::fmt::Display for FenceError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "membarrier cannot fence restartable sequences (errno {}): it needs Linux 5.10 and a sandbox that lets membarrier pass",
            self.errno
        )
    }
}

impl core::error::Error for FenceError {}

/// Returns when every operation that began before the call, on any CPU, has committed or was aborted; an aborted one
/// starts again and sees everything written before the fence.
///
/// Costs a system call and an interrupt to each other CPU that runs a thread of this process, some
/// microseconds; a load where the kernel has refused before. Keeps errno. On the atomic backend it
/// does nothing: [`Units::await_stopped`](crate::Units::await_stopped) waits there.
///
/// # Errors
///
/// [`FenceError`] where the kernel cannot; nothing is fenced then.
pub fn fence() -> Result<(), FenceError> {
    membarrier(0, 0)
}

/// [`fence()`] for one index only: by CPU number it interrupts just that CPU. Concurrency ids name no CPU, so there
/// it fences all.
///
/// # Errors
///
/// As for [`fence()`].
pub fn fence_index(index: usize) -> Result<(), FenceError> {
    match backend() {
        Backend::Rseq(Index::Cpu) => membarrier(MEMBARRIER_CMD_FLAG_CPU, index as libc::c_int),
        _ => fence(),
    }
}

/// Whether the kernel has refused to fence, so that [`fence()`] would fail. One load.
pub fn fence_is_refused() -> bool {
    backend() != Backend::Atomic && ANSWER.load(Relaxed) > WORKS
}

/// Asks the kernel whether it fences, without a fence. Remembers a refusal. One system call.
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

/// What is known of `membarrier`: [`UNTRIED`], [`WORKS`], or the errno with which the kernel
/// refused.
static ANSWER: AtomicI32 = AtomicI32::new(UNTRIED);
const UNTRIED: i32 = -1;
const WORKS: i32 = 0;

/// Registers the process for fences. The backend's choice calls it, when a process has one thread
/// as a rule: registering a process with threads takes the kernel milliseconds.
pub(crate) fn register() {
    if ANSWER.load(Relaxed) == UNTRIED {
        let answer = call(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_RSEQ, 0, 0);
        remember(answer);
    }
}

/// Notes a refusal, so that the kernel is not asked again. A kernel without memory for the moment
/// may be asked again.
fn remember(answer: Result<(), FenceError>) {
    match answer {
        Ok(()) => ANSWER.store(WORKS, Relaxed),
        Err(FenceError {
            errno: libc::ENOMEM,
        }) => {}
        Err(FenceError { errno }) => ANSWER.store(errno, Relaxed),
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
    let answer = call(MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ, flags, cpu);
    if answer.is_err() {
        remember(answer);
    }
    answer
}

/// Makes the system call; keeps errno.
fn call(command: libc::c_int, flags: libc::c_uint, cpu: libc::c_int) -> Result<(), FenceError> {
    // SAFETY: errno is the calling thread's own.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    // SAFETY: membarrier takes three integers and touches no memory of ours.
    let answer = unsafe { libc::syscall(libc::SYS_membarrier, command, flags, cpu) };
    // SAFETY: as above.
    let refused = unsafe { core::mem::replace(&mut *errno, before) };
    // A query answers with the commands that there are.
    if answer >= 0 {
        Ok(())
    } else {
        Err(FenceError { errno: refused })
    }
}
