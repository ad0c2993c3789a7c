//! Starts programs, waits for them until a deadline, and reads what they cost.
//!
//! A signal that arrives between a check and a wait would be lost to a handler. So the command
//! blocks SIGCHLD and the signals that end it, and takes them with `sigtimedwait`.
#![allow(unsafe_code, reason = "calls of the C library")]

use crate::foreign::{Process, pids};
use rustix::process::{
    Pid, Signal, kill_process, kill_process_group, set_child_subreaper,
    set_parent_process_death_signal,
};
use std::collections::HashSet;
use std::io::{self, Read};
use std::mem::zeroed;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::ptr::null_mut;
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

/// How long a program may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(10);
/// The most bytes that are kept of the beginning, and of the end, of what a program writes.
const KEPT: usize = 4096;

/// Why a run has no figures.
#[derive(Debug)]
pub enum Stop {
    /// The run failed.
    Failed(String),
    /// This signal asks the command to end.
    Signal(i32),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        Stop::Failed(error.to_string())
    }
}

/// The signals that the command takes, and the processes that it starts.
pub struct Children {
    taken: libc::sigset_t,
    mask: libc::sigset_t,
    /// The children that this process had at its start, as a shell that has become this command.
    others: HashSet<u32>,
}

impl Children {
    /// Blocks the signals, and becomes the parent of each orphan among the started processes.
    pub fn watch() -> io::Result<Children> {
        let others = children()?.into_iter().collect();
        set_child_subreaper(Some(rustix::process::getpid()))?;
        // SAFETY: zero bytes are a valid `sigset_t` and `sigaction`, and the calls write only to
        // these variables. No code handles SIGCHLD, so its default action changes nothing else.
        unsafe {
            let (mut taken, mut mask): (libc::sigset_t, libc::sigset_t) = (zeroed(), zeroed());
            libc::sigemptyset(&raw mut taken);
            for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGHUP] {
                let mut action: libc::sigaction = zeroed();
                libc::sigaction(signal, std::ptr::null(), &raw mut action);
                // A signal that is ignored, as under nohup, must not end the command.
                if action.sa_sigaction != libc::SIG_IGN {
                    libc::sigaddset(&raw mut taken, signal);
                }
            }
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            libc::sigaddset(&raw mut taken, libc::SIGCHLD);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const taken, &raw mut mask);
            Ok(Children {
                taken,
                mask,
                others,
            })
        }
    }

    /// Waits until a child has ended or `until` has come. Returns false if `until` has come.
    pub fn wait(&self, until: Instant) -> Result<bool, Stop> {
        let left = until.saturating_duration_since(Instant::now());
        let left = libc::timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        // SAFETY: the set and the time are initialised, and a null pointer means that the signal's
        // description is not wanted.
        match unsafe { libc::sigtimedwait(&raw const self.taken, null_mut(), &raw const left) } {
            libc::SIGCHLD => Ok(true),
            signal if signal > 0 => Err(Stop::Signal(signal)),
            _ => Ok(Instant::now() < until),
        }
    }

    /// Starts a command in a process group of its own. With `show`, its output is this command's.
    pub fn start(&self, mut command: Command, show: bool) -> io::Result<Running> {
        let output = || {
            if show {
                Stdio::inherit()
            } else {
                Stdio::piped()
            }
        };
        let mask = self.mask;
        command.stdin(Stdio::null()).stdout(output());
        command.stderr(output()).process_group(0);
        // `exec` hands the peak of resident memory on to the new program. A command with a closure
        // is started by `fork`, so the peak is that of the forked process: its own pages without
        // those of files, less than any dynamically linked program has. `posix_spawn` would hand
        // on the peak of this whole command.
        //
        // SAFETY: the closure makes two system calls, and touches no other memory than its own.
        unsafe {
            command.pre_exec(move || {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, null_mut());
                Ok(())
            });
        }
        let started = Instant::now();
        let mut child = command.spawn()?;
        Ok(Running {
            pid: Pid::from_child(&child),
            started,
            out: child.stdout.take().map(drain),
            err: child.stderr.take().map(drain),
            ended: None,
        })
    }

    /// Kills all processes that the command has started and that still run. Returns false if one
    /// of them may still run, as a process of another user.
    pub fn end_all(&self) -> bool {
        let end = Instant::now() + GRACE;
        while Instant::now() < end {
            // SAFETY: a null pointer means that the status is not wanted.
            while unsafe { libc::waitpid(-1, null_mut(), libc::WNOHANG) } > 0 {}
            // Children of children become this process's, so the next pass finds them.
            let own = self.own();
            if own.as_ref().is_ok_and(Vec::is_empty) {
                return true;
            }
            for child in own.into_iter().flatten() {
                // The number is still the child's, because nothing has reaped the child yet.
                let _ = kill_process(child, Signal::KILL);
            }
            sleep(Duration::from_millis(1));
        }
        false
    }

    fn own(&self) -> io::Result<Vec<Pid>> {
        let own = children()?.into_iter();
        let own = own.filter(|pid| !self.others.contains(pid));
        Ok(own.filter_map(|pid| Pid::from_raw(pid as i32)).collect())
    }

    /// Returns the resident memory of all processes that the command has started. A page that
    /// several processes share counts once, except those of processes of other users.
    pub fn resident(&self) -> io::Result<u64> {
        let mut found: HashSet<u32> = (self.own()?.into_iter())
            .map(|pid| pid.as_raw_nonzero().get() as u32)
            .collect();
        let parents = parents()?;
        loop {
            let before = found.len();
            let below = parents.iter().filter(|(_, parent)| found.contains(parent));
            let below: Vec<u32> = below.map(|(pid, _)| *pid).collect();
            found.extend(below);
            if found.len() == before {
                break;
            }
        }
        match found.into_iter().filter_map(resident).sum() {
            0 => Err(io::Error::other("the server's memory cannot be read")),
            sum => Ok(sum),
        }
    }
}

/// Returns the resident bytes of a process, and of a page that it shares only its part.
fn resident(pid: u32) -> Option<u64> {
    let process = Process::open(pid).ok()?;
    let kib = match process.fields("smaps_rollup") {
        Ok(fields) => fields.number("Pss:"),
        // Another user's process shows its size, but not its mappings.
        Err(_) => process.status().ok()?.number("VmRSS:"),
    };
    Some(kib? << 10)
}

/// Returns each process with its parent.
fn parents() -> io::Result<Vec<(u32, u32)>> {
    let parent = |pid| -> Option<(u32, u32)> {
        let folder = Path::new("/proc").join(u32::to_string(&pid));
        let stat = Process::in_any_state(&folder, pid).ok()?.stat().ok()?;
        Some((pid, stat.number(4)?.try_into().ok()?))
    };
    Ok(pids(Path::new("/proc"))?
        .into_iter()
        .filter_map(parent)
        .collect())
}

/// Returns this process's children.
fn children() -> io::Result<Vec<u32>> {
    let own = std::process::id();
    let mut all = parents()?;
    all.retain(|(_, parent)| *parent == own);
    Ok(all.into_iter().map(|(pid, _)| pid).collect())
}

/// A program that was started.
pub struct Running {
    pid: Pid,
    started: Instant,
    out: Option<JoinHandle<Written>>,
    err: Option<JoinHandle<Written>>,
    ended: Option<Ended>,
}

/// What a program has cost, with its children that it has waited for.
#[derive(Clone, Copy)]
pub struct Ended {
    pub status: ExitStatus,
    pub seconds: f64,
    pub cpu_seconds: f64,
    /// The peak of resident memory of the largest process.
    pub peak_bytes: f64,
    pub faults: f64,
}

impl Running {
    /// Returns the program's cost if it has ended.
    pub fn ended(&mut self) -> io::Result<Option<Ended>> {
        if self.ended.is_some() {
            return Ok(self.ended);
        }
        let (mut status, pid) = (0, self.pid.as_raw_nonzero().get());
        // SAFETY: zero bytes are a valid `rusage`.
        let mut usage: libc::rusage = unsafe { zeroed() };
        // SAFETY: the call may write to `status` and `usage`.
        let answer = unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG, &raw mut usage) };
        let seconds = self.started.elapsed().as_secs_f64();
        match answer {
            0 => return Ok(None),
            answer if answer < 0 => return Err(io::Error::last_os_error()),
            _ => {}
        }
        let time = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
        self.ended = Some(Ended {
            status: ExitStatus::from_raw(status),
            seconds,
            cpu_seconds: time(usage.ru_utime) + time(usage.ru_stime),
            peak_bytes: usage.ru_maxrss as f64 * 1024.0,
            faults: (usage.ru_minflt + usage.ru_majflt) as f64,
        });
        Ok(self.ended)
    }

    /// Waits until the program ends, at most until a deadline.
    pub fn wait(&mut self, children: &Children, until: Instant) -> Result<Option<Ended>, Stop> {
        loop {
            let ended = self.ended()?;
            if ended.is_some() || !children.wait(until)? {
                return Ok(ended);
            }
        }
    }

    /// Asks the program's process group to end, and kills it if it does not. A signal to this
    /// command ends the patience, and is returned once the program has ended.
    pub fn stop(&mut self, children: &Children) -> Result<Ended, Stop> {
        let mut taken = None;
        for (signal, time) in [(Signal::TERM, GRACE), (Signal::KILL, GRACE)] {
            if self.ended()?.is_none() {
                // The number is still the program's, because nothing has reaped the program yet.
                let _ = kill_process_group(self.pid, signal);
                if let Err(Stop::Signal(signal)) = self.wait(children, Instant::now() + time) {
                    taken = Some(signal);
                }
            }
        }
        if let Some(signal) = taken {
            return Err(Stop::Signal(signal));
        }
        self.ended()?
            .ok_or_else(|| Stop::Failed("it does not end, although it was killed".to_owned()))
    }

    /// Returns what the program wrote to standard output and standard error. Only after
    /// [`Children::end_all`]: a process that still runs could keep an output open.
    pub fn written(self) -> [Written; 2] {
        let get = |thread: Option<JoinHandle<Written>>| thread.and_then(|it| it.join().ok());
        [self.out, self.err].map(|thread| get(thread).unwrap_or_default())
    }
}

/// What a program wrote to a pipe.
#[derive(Default)]
pub struct Written {
    /// The FNV-1a hash of all bytes.
    pub hash: u64,
    pub head: Vec<u8>,
    tail: Vec<u8>,
}

impl Written {
    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        let room = KEPT - self.head.len();
        self.head.extend(&bytes[..room.min(bytes.len())]);
        self.tail.extend(bytes);
        self.tail.drain(..self.tail.len().saturating_sub(KEPT));
    }

    /// Returns the last line that is not empty, after a colon, or nothing.
    pub fn last_line(&self) -> String {
        let text = String::from_utf8_lossy(&self.tail);
        let line = text.lines().rev().find(|line| !line.trim().is_empty());
        line.map_or(String::new(), |line| format!(": {}", line.trim()))
    }
}

/// Reads a pipe to its end, in a thread.
fn drain(mut pipe: impl Read + Send + 'static) -> JoinHandle<Written> {
    thread::spawn(move || {
        let mut written = Written {
            hash: 0xcbf2_9ce4_8422_2325,
            ..Written::default()
        };
        let mut bytes = vec![0; 64 << 10];
        loop {
            match pipe.read(&mut bytes) {
                Ok(0) => return written,
                Ok(count) => written.add(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return written,
            }
        }
    })
}
