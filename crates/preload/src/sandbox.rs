//! Notes when the program is about to enter a sandbox. From then on, the shepherd's thread that
//! this library starts by itself makes no system call that malloc does not make: the sandbox's
//! filter may end the process at such a call.
//!
//! A thread without privileges must call `prctl(PR_SET_NO_NEW_PRIVS)` before it may load a filter.
//! libseccomp makes that call for every program. A thread with privileges may skip the call, and
//! load its filter by the system call `seccomp`. The library does not notice such a thread.

use crate::policies::answer;
use core::ffi::{c_int, c_ulong};
use pinfold_malloc::background;
use pinfold_rseq::syscall;

/// Does what the C library's `prctl` does. Calls [`background::enters_sandbox`] before a call that
/// loads a filter or prepares for one.
///
/// # Safety
///
/// The arguments are valid for the system call `prctl` with this option.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(
    option: c_int,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
) -> c_int {
    if matches!(option, libc::PR_SET_SECCOMP | libc::PR_SET_NO_NEW_PRIVS) {
        background::enters_sandbox();
    }
    let rest = [second, third, fourth, fifth].map(|argument| argument as usize);
    let arguments = [option as usize, rest[0], rest[1], rest[2], rest[3]];
    // SAFETY: the caller promises that the arguments are valid. The C library's function takes the
    // arguments after the first as variable ones, in the same registers.
    answer(unsafe { syscall(libc::SYS_prctl, arguments) }) as c_int
}
