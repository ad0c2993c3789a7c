//! Notes calls that give a thread a policy, of either kind:
//!
//! * A real-time policy. The shepherd's thread, which this library starts by itself, would inherit
//!   such a policy. So after such a call, the library starts no shepherd by itself.
//! * A memory policy. Pools of pages follow the policy of the calling thread, and ask the kernel
//!   for it after a change.
//!
//! `pthread_setschedparam` calls the C library's function. `sched_setscheduler` and `set_mempolicy`
//! make the system call. The library does not notice a program that makes the system call itself.

use crate::next::Next;
use core::ffi::{c_int, c_long, c_ulong};
use pinfold_malloc::background;
use pinfold_malloc::c::kernel_policy::pinfold_mempolicy_thread_changed;
use pinfold_rseq::syscall;

/// Calls the C library's `pthread_setschedparam`, and notes the policy.
///
/// # Safety
///
/// The arguments are valid for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_setschedparam(
    thread: libc::pthread_t,
    policy: c_int,
    parameters: *const libc::sched_param,
) -> c_int {
    type Function = unsafe extern "C" fn(libc::pthread_t, c_int, *const libc::sched_param) -> c_int;
    static NEXT: Next = Next::new(c"pthread_setschedparam");
    let next = NEXT.address();
    if next.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the C library's function of that name has this type.
    let next = unsafe { core::mem::transmute::<*mut libc::c_void, Function>(next) };
    // SAFETY: the caller's arguments are valid for the C library's function.
    let error = unsafe { next(thread, policy, parameters) };
    if error == 0 {
        background::note_policy(policy);
    }
    error
}

/// Does what the C library's `sched_setscheduler` does, and notes the policy.
///
/// # Safety
///
/// `parameters` is readable for a `sched_param`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sched_setscheduler(
    process: libc::pid_t,
    policy: c_int,
    parameters: *const libc::sched_param,
) -> c_int {
    let arguments = [process as usize, policy as usize, parameters as usize];
    // SAFETY: the caller promises that `parameters` is readable, which is all the call requires.
    let answer = answer(unsafe { syscall(libc::SYS_sched_setscheduler, arguments) });
    if answer == 0 {
        // Also notes the policy if `process` is another process. To tell whether `process` is a
        // thread of this process would take another system call.
        background::note_policy(policy);
    }
    answer as c_int
}

/// Does what libnuma's `set_mempolicy` does, and notes the change. libnuma's own functions, such as
/// `numa_set_preferred`, call it too.
///
/// # Safety
///
/// `nodes` is null, or readable for `maxnode` bits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn set_mempolicy(
    mode: c_int,
    nodes: *const c_ulong,
    maxnode: c_ulong,
) -> c_long {
    let arguments = [mode as usize, nodes as usize, maxnode as usize];
    // SAFETY: the caller promises that the nodes are readable, which is all the call requires.
    let answer = answer(unsafe { syscall(libc::SYS_set_mempolicy, arguments) });
    if answer == 0 {
        pinfold_mempolicy_thread_changed();
    }
    answer
}

/// Returns the kernel's answer as the C library does: −1 with errno after an error.
pub(crate) fn answer(answer: Result<usize, c_int>) -> c_long {
    match answer {
        Ok(answer) => answer as c_long,
        Err(error) => {
            // SAFETY: errno is the calling thread's own.
            unsafe { *libc::__errno_location() = error };
            -1
        }
    }
}
