//! System calls that `run` needs and std does not offer: signals, and the capabilities of files.
#![allow(unsafe_code, reason = "calls of the C library")]

use anyhow::Result;
use std::ffi::CStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};

/// Signals that this process passes on to the command.
const RELAYED: [i32; 7] = [
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGWINCH,
    libc::SIGCONT,
];
/// Signals that the terminal sends to the command as well. This process must survive them to
/// report.
const LEFT_TO_THE_COMMAND: [i32; 2] = [libc::SIGINT, libc::SIGQUIT];

static CHILD: AtomicI32 = AtomicI32::new(0);

/// Restores the default action of SIGPIPE. The Rust runtime ignores the signal, but the command
/// must start with the action that shells leave.
pub fn restore_sigpipe() {
    // SAFETY: sets a default action, which runs no code of this process.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Passes signals that arrive at this process on to the command while the command lives.
pub struct Relay {
    before: Vec<(i32, libc::sigaction)>,
}

extern "C" fn relay(signal: i32) {
    let child = CHILD.load(Ordering::Relaxed);
    if child > 0 {
        // SAFETY: `kill` may be called in handlers, and touches no memory. The id is still the
        // child's, because nothing reaps the child before `stop_at_the_end` stores 0.
        unsafe { libc::kill(child, signal) };
    }
}

impl Relay {
    pub fn start() -> Result<Relay> {
        let relayed = RELAYED.map(|signal| (signal, relay as *const () as usize));
        let ignored = LEFT_TO_THE_COMMAND.map(|signal| (signal, libc::SIG_IGN));
        let mut before = Vec::new();
        for (signal, action) in relayed.into_iter().chain(ignored) {
            let old = action_of(signal);
            // An ignored signal stays ignored, as under nohup.
            if old.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            let new = libc::sigaction {
                sa_sigaction: action,
                sa_flags: libc::SA_RESTART,
                ..old
            };
            // SAFETY: the handler only loads an atomic and calls `kill`.
            unsafe { libc::sigaction(signal, &raw const new, std::ptr::null_mut()) };
            before.push((signal, old));
        }
        Ok(Relay { before })
    }

    pub fn send_to(&self, child: u32) {
        CHILD.store(child as i32, Ordering::Relaxed);
    }

    /// Waits until the child ends, and stops. Leaves the child to be reaped, so that no handler
    /// sends a signal to another process that got the child's id.
    pub fn stop_at_the_end(self) {
        let child = CHILD.load(Ordering::Relaxed);
        loop {
            // SAFETY: zero bytes are a valid `siginfo_t`, and the call may write to `info`.
            let waited = unsafe {
                let mut info: libc::siginfo_t = std::mem::zeroed();
                let flags = libc::WEXITED | libc::WNOWAIT;
                libc::waitid(libc::P_PID, child as u32, &raw mut info, flags)
            };
            let error = io::Error::last_os_error();
            if waited == 0 || error.kind() != io::ErrorKind::Interrupted {
                break;
            }
        }
        CHILD.store(0, Ordering::Relaxed);
        for (signal, old) in &self.before {
            // SAFETY: `old` is the action that `start` read for this signal.
            unsafe { libc::sigaction(*signal, old, std::ptr::null_mut()) };
        }
    }
}

/// Makes the child begin with the default actions of SIGPIPE, and of SIGINT and SIGQUIT unless they
/// are ignored now. To be called before [`Relay::start`], which makes this process ignore them.
pub fn prepare_child(command: &mut Command) {
    let reset = LEFT_TO_THE_COMMAND.map(|signal| action_of(signal).sa_sigaction != libc::SIG_IGN);
    // SAFETY: the closure calls only `signal`, which is allowed between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            for (signal, reset) in LEFT_TO_THE_COMMAND.into_iter().zip(reset) {
                if reset {
                    libc::signal(signal, libc::SIG_DFL);
                }
            }
            Ok(())
        });
    }
}

/// Returns this process's action for a signal.
fn action_of(signal: i32) -> libc::sigaction {
    // SAFETY: zero bytes are a valid `sigaction`, which holds only integers and an optional
    // pointer. The call only writes to it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action);
        action
    }
}

pub fn has_capabilities(path: &CStr) -> bool {
    // SAFETY: both strings end with a NUL. With a size of 0 the kernel writes nothing.
    unsafe {
        libc::getxattr(
            path.as_ptr(),
            c"security.capability".as_ptr(),
            std::ptr::null_mut(),
            0,
        ) > 0
    }
}
