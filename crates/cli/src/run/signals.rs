//! What `run` needs of the system that std does not offer: signals, and the ids that `exec` would change.
#![allow(unsafe_code, reason = "calls of the C library")]

use anyhow::Result;
use std::ffi::CStr;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};

/// Signals that are passed on to the command.
const RELAYED: [i32; 7] = [
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGWINCH,
    libc::SIGCONT,
];
/// Signals that the terminal sends to the command too: the parent must outlive them to report.
const LEFT_TO_THE_COMMAND: [i32; 2] = [libc::SIGINT, libc::SIGQUIT];

static CHILD: AtomicI32 = AtomicI32::new(0);

/// Rust ignores SIGPIPE; the command must find it as shells leave it.
pub fn restore_sigpipe() {
    // SAFETY: sets a signal's default action.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Passes signals sent to this process on to the command, while it lives.
pub struct Relay {
    before: Vec<(i32, libc::sigaction)>,
}

extern "C" fn relay(signal: i32) {
    let child = CHILD.load(Ordering::Relaxed);
    if child > 0 {
        // SAFETY: kill may be called in a handler; the child is waited for only after the relay has stopped.
        unsafe { libc::kill(child, signal) };
    }
}

impl Relay {
    pub fn start() -> Result<Relay> {
        let relayed = RELAYED.map(|signal| (signal, relay as *const () as usize));
        let ignored = LEFT_TO_THE_COMMAND.map(|signal| (signal, libc::SIG_IGN));
        let mut before = Vec::new();
        for (signal, action) in relayed.into_iter().chain(ignored) {
            // SAFETY: sigaction is plain data; the handler only loads and kills.
            unsafe {
                let mut old: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, std::ptr::null(), &raw mut old);
                // What was ignored stays ignored, as under nohup.
                if old.sa_sigaction != libc::SIG_IGN {
                    let mut new: libc::sigaction = std::mem::zeroed();
                    new.sa_sigaction = action;
                    new.sa_flags = libc::SA_RESTART;
                    libc::sigaction(signal, &raw const new, std::ptr::null_mut());
                    before.push((signal, old));
                }
            }
        }
        Ok(Relay { before })
    }

    pub fn send_to(&self, child: u32) {
        CHILD.store(child as i32, Ordering::Relaxed);
    }

    pub fn stop(self) {
        CHILD.store(0, Ordering::Relaxed);
        for (signal, old) in &self.before {
            // SAFETY: restores what was there.
            unsafe { libc::sigaction(*signal, old, std::ptr::null_mut()) };
        }
    }
}

/// Lets the child begin with the signal actions that this process was started with.
pub fn prepare_child(command: &mut Command) {
    // SAFETY: the closure calls only sigaction and signal, which are allowed between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            for signal in LEFT_TO_THE_COMMAND {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        });
    }
}

pub fn effective_uid() -> u32 {
    // SAFETY: no preconditions.
    unsafe { libc::geteuid() }
}

pub fn effective_gid() -> u32 {
    // SAFETY: no preconditions.
    unsafe { libc::getegid() }
}

/// Whether a file has capabilities of its own.
pub fn has_capabilities(path: &CStr) -> bool {
    // SAFETY: both strings end with a NUL; a size of 0 only asks.
    unsafe {
        libc::getxattr(
            path.as_ptr(),
            c"security.capability".as_ptr(),
            std::ptr::null_mut(),
            0,
        ) > 0
    }
}
