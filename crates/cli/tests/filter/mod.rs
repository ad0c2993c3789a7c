//! Runs a command, or the test itself, below a seccomp filter.
#![allow(dead_code, reason = "each test uses a part")]

use std::io::{Error, Result};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Returns a filter that gives `answer` to these system calls and allows all others.
pub fn filter(calls: &[libc::c_long], answer: u32) -> Vec<libc::sock_filter> {
    let statement = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let (load, end) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_RET | libc::BPF_K,
    );
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    // The first word of the filter's input is the number of the system call.
    let mut filter = vec![statement(load, 0, 0, 0)];
    for &call in calls {
        filter.push(statement(equal, call as u32, 0, 1));
        filter.push(statement(end, answer, 0, 0));
    }
    filter.push(statement(end, libc::SECCOMP_RET_ALLOW, 0, 0));
    filter
}

/// Puts the calling thread below a filter, or all threads with `SECCOMP_FILTER_FLAG_TSYNC`.
/// Allocates nothing.
pub fn install(filter: &[libc::sock_filter], flags: libc::c_ulong) -> Result<()> {
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: `program` refers to `filter`, which the kernel copies.
    let refused = unsafe {
        let mode = libc::SECCOMP_SET_MODE_FILTER;
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) != 0
    };
    match refused {
        true => Err(Error::last_os_error()),
        false => Ok(()),
    }
}

/// Lets these system calls fail with `errno` in the command and in its child processes.
pub fn forbid(command: &mut Command, calls: &[libc::c_long], errno: i32) {
    let filter = filter(calls, libc::SECCOMP_RET_ERRNO | errno as u32);
    // SAFETY: the closure makes two system calls and allocates nothing, so it may run after fork.
    unsafe { command.pre_exec(move || install(&filter, 0)) };
}
