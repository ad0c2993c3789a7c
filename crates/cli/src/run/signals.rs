//! Signals around the command: what it inherits, and what is passed on to it while its parent waits to report.
//!
//! The command finds every action and the mask as this process found them. Rust's runtime ignores SIGPIPE before
//! `main`, so what was there is noted before the runtime starts.
//!
//! While a parent waits, a signal is in one of two classes:
//!
//! | signals | sent by a process | sent by the kernel |
//! |---|---|---|
//! | TERM, HUP, USR1, USR2, ALRM | passed on | passed on |
//! | INT, QUIT, WINCH, CONT, TSTP | passed on | left: the terminal sent it to the whole process group |
//!
//! What the command itself sends here is never passed back: a `kill 0` of it has reached it already. Signals that were
//! ignored at the start stay ignored in both, as under `nohup`.
//!
//! All of these signals are blocked from before the command exists until its number is known, so that none is lost, and
//! their handlers stay until the statistics' directory is gone, so that none leaves it behind.
#![allow(unsafe_code, reason = "handlers, and what runs between fork and exec")]

use anyhow::{Context, Result};
use libc::{SIG_DFL, SIG_IGN, c_int, c_void, sigaction, siginfo_t, sigset_t};
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

const PASSED_ON: [c_int; 5] = [
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
];
const TERMINALS: [c_int; 5] = [
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGWINCH,
    libc::SIGCONT,
    libc::SIGTSTP,
];

/// The command's process, while it is there to be signalled.
static CHILD: AtomicI32 = AtomicI32::new(0);

/// Whether this process was started with SIGPIPE ignored, as systemd starts its services.
static PIPE_WAS_IGNORED: AtomicBool = AtomicBool::new(false);

// The section holds pointers to functions that the C library calls before main, with arguments that a function
// without parameters leaves alone.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = note_sigpipe;

extern "C" fn note_sigpipe() {
    PIPE_WAS_IGNORED.store(action(libc::SIGPIPE) == SIG_IGN, Ordering::Relaxed);
}

/// What is done on a signal.
fn action(signal: c_int) -> usize {
    // SAFETY: all zeroes are a sigaction, and the call only writes to it.
    unsafe {
        let mut now: sigaction = zeroed();
        sigaction(signal, null(), &raw mut now);
        now.sa_sigaction
    }
}

fn set_action(signal: c_int, to: usize) {
    // SAFETY: all zeroes are a sigaction; `to` is SIG_DFL, SIG_IGN or `relay`, which has the type that SA_SIGINFO asks for.
    unsafe {
        let mut new: sigaction = zeroed();
        new.sa_sigaction = to;
        new.sa_flags = libc::SA_RESTART | libc::SA_SIGINFO;
        if signal == libc::SIGTSTP {
            // The handler stops this process by the default action, which is to be there while it runs.
            new.sa_flags |= libc::SA_RESETHAND | libc::SA_NODEFER;
        }
        sigaction(signal, &raw const new, null_mut());
    }
}

extern "C" fn relay(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    let child = CHILD.load(Ordering::Relaxed);
    // SAFETY: the kernel gives handlers a siginfo, which names the sender where a process sent the signal.
    let (by_kernel, by_child) = unsafe {
        let by_kernel = (*info).si_code > 0;
        (by_kernel, !by_kernel && (*info).si_pid() == child)
    };
    let reached_it = by_child || by_kernel && TERMINALS.contains(&signal);
    if child > 0 && !reached_it {
        // SAFETY: kill and errno may be used in handlers; the child's number is its own until it is waited for, and
        // CHILD is 0 before that.
        unsafe {
            let errno = *libc::__errno_location();
            libc::kill(child, signal);
            *libc::__errno_location() = errno;
        }
    }
    if signal == libc::SIGTSTP {
        // SAFETY: raise may be called in handlers. The default action is in place, and the call returns when this process
        // goes on.
        unsafe { libc::raise(signal) };
        set_action(signal, relay_address());
    }
}

fn relay_address() -> usize {
    relay as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize
}

/// Lets the command begin with the actions that this process was started with. It takes this process's place.
pub fn prepare_exec(command: &mut Command) {
    // SAFETY: the closure calls sigaction only.
    unsafe { command.pre_exec(restore_sigpipe) };
}

/// std has made it the default by now.
fn restore_sigpipe() -> io::Result<()> {
    if PIPE_WAS_IGNORED.load(Ordering::Relaxed) {
        set_action(libc::SIGPIPE, SIG_IGN);
    }
    Ok(())
}

/// Passes signals sent to this process on to the command, from [`Relay::spawn`] to [`Relay::wait`], and holds them off
/// before and after. Dropped, it leaves the actions as it found them.
pub struct Relay {
    handled: Vec<c_int>,
    mask: sigset_t,
    children_were_ignored: bool,
}

impl Relay {
    pub fn start() -> Relay {
        let all = || PASSED_ON.into_iter().chain(TERMINALS);
        let mut mask = MaybeUninit::uninit();
        // SAFETY: sigemptyset makes the set, and pthread_sigmask writes the old mask.
        let mask = unsafe {
            let mut block = zeroed();
            libc::sigemptyset(&raw mut block);
            for signal in all() {
                libc::sigaddset(&raw mut block, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const block, mask.as_mut_ptr());
            mask.assume_init()
        };
        let handled: Vec<c_int> = all().filter(|&signal| action(signal) != SIG_IGN).collect();
        for &signal in &handled {
            set_action(signal, relay_address());
        }
        // Who ignores SIGCHLD is not told how a child ended.
        let children_were_ignored = action(libc::SIGCHLD) == SIG_IGN;
        if children_were_ignored {
            set_action(libc::SIGCHLD, SIG_DFL);
        }
        Relay {
            handled,
            mask,
            children_were_ignored,
        }
    }

    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let (handled, mask, children_were_ignored) =
            (self.handled.clone(), self.mask, self.children_were_ignored);
        let as_found = move || {
            restore_sigpipe()?;
            if children_were_ignored {
                set_action(libc::SIGCHLD, SIG_IGN);
            }
            // exec would do this too, but what arrives before must find it done.
            handled
                .iter()
                .for_each(|&signal| set_action(signal, SIG_DFL));
            set_mask(&mask);
            Ok(())
        };
        // SAFETY: the closure calls sigaction and sigprocmask only, and allocates nothing.
        unsafe { command.pre_exec(as_found) };
        let child = command.spawn()?;
        CHILD.store(child.id() as i32, Ordering::Relaxed);
        set_mask(&self.mask);
        Ok(child)
    }

    /// Waits for the child to end. From then on signals are held off.
    pub fn wait(&self, child: &mut Child) -> Result<ExitStatus> {
        // WNOWAIT leaves the child's number taken until the handlers know that it is gone.
        let flags = libc::WEXITED | libc::WNOWAIT;
        loop {
            // SAFETY: all zeroes are a siginfo, which the call fills in.
            let answer = unsafe {
                let mut info: siginfo_t = zeroed();
                libc::waitid(libc::P_PID, child.id(), &raw mut info, flags)
            };
            if answer == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                break;
            }
        }
        CHILD.store(0, Ordering::Relaxed);
        child.wait().context("waiting for the command")
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        CHILD.store(0, Ordering::Relaxed);
        for &signal in &self.handled {
            set_action(signal, SIG_DFL);
        }
        set_mask(&self.mask);
    }
}

fn set_mask(mask: &sigset_t) {
    // SAFETY: a mask that pthread_sigmask has given.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, null_mut()) };
}
