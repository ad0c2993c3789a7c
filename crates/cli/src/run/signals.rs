//! System calls that `run` needs and std does not offer: signals, and the capabilities of files.
#![allow(unsafe_code, reason = "calls of the C library")]

use std::ffi::CStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};

/// Signals that this process passes on to the command.
const RELAYED: [i32; 11] = [
    libc::SIGABRT,
    libc::SIGPWR,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGWINCH,
    libc::SIGCONT,
];

/// Signals that a terminal sends to the command as well. They would arrive twice, so they are
/// passed on only if another process has sent them. A terminal that is closed sends SIGHUP to the
/// first process of its session only.
const OF_TERMINALS: [i32; 3] = [libc::SIGINT, libc::SIGQUIT, libc::SIGWINCH];

/// Signals that ask a program to end, and that this process lets pass while it reports. `timeout`
/// and service managers send one to this process and then to its whole group. The program may end
/// at the first, and the second must not end this process before its report is written. SIGQUIT
/// ends it.
const OF_THE_END: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The command's process id. 0 before it has started, and after it has ended.
static CHILD: AtomicI32 = AtomicI32::new(0);
/// Who sent each signal that arrived before [`CHILD`] was known: a process, or [`ANYBODY`]. 0 if
/// the signal has not arrived. The command may run, and send a signal, before its id is known here.
static EARLY: [AtomicI32; 65] = [const { AtomicI32::new(0) }; 65];
/// The kernel or several processes.
const ANYBODY: i32 = -1;

/// Restores the default action of SIGPIPE. The Rust runtime ignores the signal, but the command
/// must start with the action that shells leave.
pub fn restore_sigpipe() {
    // SAFETY: sets a default action, which runs no code of this process.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Calls `f` while all signals are blocked, so that a thread which `f` starts runs no handler: it
/// might be interrupted in one, and send the signal when the child has been reaped.
pub fn blocked<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: zero bytes are a valid set, which `sigfillset` fills. `pthread_sigmask` writes the
    // other one, and fails only for a wrong first argument.
    let before = unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    let result = f();
    // SAFETY: the call reads the set, and takes null for the other one.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    result
}

/// Passes signals that arrive at this process on to the command while the command lives.
pub struct Relay {
    before: Vec<(i32, libc::sigaction)>,
}

extern "C" fn relay(signal: i32, about: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel calls a handler with SA_SIGINFO with the signal's description.
    let about = unsafe { &*about };
    let child = CHILD.load(Ordering::Relaxed);
    // The command has the signals that it sends to its whole group. This process sends a signal to
    // itself only when it aborts, and ends after this handler.
    if sender(about).is_some_and(|it| it == child || it == std::process::id() as i32) {
        return;
    }
    // A positive code means that the kernel sent the signal.
    let has_it = about.si_code > 0 && OF_TERMINALS.contains(&signal);
    if child == 0 {
        let (early, by) = (&EARLY[signal as usize], sender(about).unwrap_or(ANYBODY));
        let first = early.compare_exchange(0, by, Ordering::Relaxed, Ordering::Relaxed);
        if first.is_err_and(|other| other != by) {
            early.store(ANYBODY, Ordering::Relaxed);
        }
    } else if !has_it {
        // SAFETY: `errno` is the thread's own.
        let errno = unsafe { *libc::__errno_location() };
        if about.si_code == libc::SI_QUEUE {
            // SAFETY: as below, and a signal with this code has a value.
            unsafe { libc::sigqueue(child, signal, about.si_value()) };
        } else {
            // SAFETY: `kill` may be called in handlers, and touches no memory. The id is still the
            // child's: the thread that runs the handlers reaps the child, and stores 0 before.
            unsafe { libc::kill(child, signal) };
        }
        // SAFETY: as above. The interrupted code may be about to read it.
        unsafe { *libc::__errno_location() = errno };
    }
}

/// Returns the id of the process that sent a signal, if a process of this namespace did.
fn sender(about: &libc::siginfo_t) -> Option<i32> {
    let by_process = [libc::SI_USER, libc::SI_QUEUE, libc::SI_TKILL];
    // SAFETY: a signal with one of these codes has the sender's id.
    let sender = || unsafe { about.si_pid() };
    let sender = by_process.contains(&about.si_code).then(sender);
    sender.filter(|&it| it != 0)
}

/// Returns the signals that are passed on.
fn relayed() -> impl Iterator<Item = i32> {
    let real_time = libc::SIGRTMIN()..=libc::SIGRTMAX();
    RELAYED.into_iter().chain(real_time)
}

impl Relay {
    pub fn start() -> Relay {
        let mut before = Vec::new();
        for signal in relayed() {
            let old = action_of(signal);
            let new = libc::sigaction {
                sa_sigaction: relay as *const () as usize,
                sa_flags: libc::SA_RESTART | libc::SA_SIGINFO,
                ..old
            };
            set_action(signal, &new);
            before.push((signal, old));
        }
        // While SIGCHLD is ignored, the kernel reaps children and forgets their status.
        let old = action_of(libc::SIGCHLD);
        let default = libc::sigaction {
            sa_sigaction: libc::SIG_DFL,
            ..old
        };
        set_action(libc::SIGCHLD, &default);
        before.push((libc::SIGCHLD, old));
        Relay { before }
    }

    /// Makes the command begin with the default action of SIGPIPE, and ignore the signals that this
    /// process has ignored before, as under nohup. `exec` sets the other signals to their defaults.
    pub fn prepare(&self, command: &mut Command) {
        let ignored = self
            .before
            .iter()
            .filter(|(_, old)| old.sa_sigaction == libc::SIG_IGN);
        let ignored: Vec<i32> = ignored.map(|(signal, _)| *signal).collect();
        // SAFETY: the closure calls only `signal`, which is allowed between fork and exec.
        unsafe {
            command.pre_exec(move || {
                libc::signal(libc::SIGPIPE, libc::SIG_DFL);
                for &signal in &ignored {
                    libc::signal(signal, libc::SIG_IGN);
                }
                Ok(())
            });
        }
    }

    pub fn send_to(&self, child: u32) {
        let child = child as i32;
        CHILD.store(child, Ordering::Relaxed);
        for (signal, early) in EARLY.iter().enumerate() {
            let by = early.swap(0, Ordering::Relaxed);
            if by != 0 && by != child {
                // SAFETY: `kill` touches no memory, and nothing has reaped the child yet.
                unsafe { libc::kill(child, signal as i32) };
            }
        }
    }

    /// Waits until the child ends, and stops. From then on, the signals of [`OF_THE_END`] have no
    /// effect on this process, and the others their former one. Leaves the child to be reaped, so
    /// that no handler sends a signal to another process that got the child's id.
    ///
    /// Reaps other children. The first process of a container gets all processes whose parents have
    /// ended.
    pub fn stop_at_the_end(self) {
        let child = CHILD.load(Ordering::Relaxed);
        loop {
            // SAFETY: zero bytes are a valid `siginfo_t`, and the call may write to `info`.
            let (waited, ended) = unsafe {
                let mut info: libc::siginfo_t = std::mem::zeroed();
                let flags = libc::WEXITED | libc::WNOWAIT;
                let waited = libc::waitid(libc::P_ALL, 0, &raw mut info, flags);
                (waited, info.si_pid())
            };
            if waited == 0 && ended != child {
                // SAFETY: a null pointer means that the status is not wanted.
                unsafe { libc::waitpid(ended, std::ptr::null_mut(), libc::WNOHANG) };
                continue;
            }
            let error = io::Error::last_os_error();
            if waited == 0 || error.kind() != io::ErrorKind::Interrupted {
                break;
            }
        }
        CHILD.store(0, Ordering::Relaxed);
        for (signal, old) in &self.before {
            let mut action = *old;
            if OF_THE_END.contains(signal) {
                // The process that names functions for the report inherits this.
                action.sa_sigaction = libc::SIG_IGN;
            }
            set_action(*signal, &action);
        }
    }
}

/// Sets the action for a signal: [`relay`], the default, to ignore the signal, or one that
/// [`action_of`] has returned.
fn set_action(signal: i32, action: &libc::sigaction) {
    // SAFETY: the handler only uses atomics and sends signals. The old actions were in effect
    // before.
    unsafe { libc::sigaction(signal, action, std::ptr::null_mut()) };
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

#[cfg(test)]
mod tests {
    use super::*;

    static CAUGHT: AtomicI32 = AtomicI32::new(0);

    extern "C" fn catch(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        CAUGHT.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs `f` in a forked child, and returns what `f` returns.
    fn forked(f: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the child of each caller uses atomics and calls functions that are allowed
        // between fork and exec, and malloc, whose locks the C library takes for a fork.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let result = f();
            // SAFETY: the child has nothing to clean up.
            unsafe { libc::_exit(result) };
        }
        exit_status(child)
    }

    fn exit_status(child: i32) -> i32 {
        let mut status = 0;
        // SAFETY: the call writes to `status`.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        libc::WEXITSTATUS(status)
    }

    /// Returns how often a command catches SIGUSR1 after it, or its parent, has sent the signal to
    /// this process, which does not know the command's id yet.
    fn caught(by_command: bool) -> i32 {
        forked(|| {
            let relay = Relay::start();
            // The command gets no signal before it catches it.
            let command = blocked(|| {
                // SAFETY: as in `forked`.
                let command = unsafe { libc::fork() };
                if command == 0 {
                    let mut action = action_of(libc::SIGUSR1);
                    action.sa_sigaction = catch as *const () as usize;
                    set_action(libc::SIGUSR1, &action);
                }
                command
            });
            if command == 0 {
                // SAFETY: these calls touch no memory. A signal ends the sleep.
                unsafe {
                    if by_command {
                        libc::kill(libc::getppid(), libc::SIGUSR1);
                    }
                    libc::usleep(300_000);
                    libc::_exit(CAUGHT.load(Ordering::Relaxed));
                }
            }
            if !by_command {
                let sender = || {
                    // SAFETY: the call touches no memory.
                    unsafe { libc::kill(libc::getppid(), libc::SIGUSR1) }
                };
                assert_eq!(forked(sender), 0);
            }
            while EARLY[libc::SIGUSR1 as usize].load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            relay.send_to(command as u32);
            exit_status(command)
        })
    }

    #[test]
    fn a_command_gets_no_signal_back_that_it_sent_before_its_id_was_known() {
        assert_eq!(caught(true), 0);
        assert_eq!(caught(false), 1);
    }
}
