//! Runs a command below a seccomp filter.

use std::io::Error;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Lets these system calls fail with `errno` in the command and in its child processes.
pub fn forbid(command: &mut Command, calls: &[libc::c_long], errno: i32) {
    let statement = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    // The first word of the filter's input is the number of the system call.
    let mut filter = vec![statement(
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        0,
        0,
        0,
    )];
    for &call in calls {
        let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        filter.push(statement(equal, call as u32, 0, 1));
        let answer = libc::SECCOMP_RET_ERRNO | errno as u32;
        filter.push(statement(libc::BPF_RET | libc::BPF_K, answer, 0, 0));
    }
    let allow = libc::SECCOMP_RET_ALLOW;
    filter.push(statement(libc::BPF_RET | libc::BPF_K, allow, 0, 0));
    let install = move || {
        let program = libc::sock_fprog {
            len: filter.len() as u16,
            filter: filter.as_ptr().cast_mut(),
        };
        // SAFETY: `program` points to `filter`, which lives in this closure, and prctl copies it.
        let refused = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(
                    libc::PR_SET_SECCOMP,
                    libc::SECCOMP_MODE_FILTER,
                    &raw const program,
                ) != 0
        };
        if refused {
            return Err(Error::last_os_error());
        }
        Ok(())
    };
    // SAFETY: the closure makes two system calls and allocates nothing, so it may run after fork.
    unsafe { command.pre_exec(install) };
}
