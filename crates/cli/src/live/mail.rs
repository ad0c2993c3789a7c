//! Asks a process for something through its mailbox, and waits for the answer.

use super::source::{
    MAILBOX_LINK, PATIENCE, Unreadable, files, folder, inner_pid, started, status,
};
use pinfold::segment::{Answer, MAKE, Mailbox, Posted, Request};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A process's mailbox, mapped. A forked child has its parent's.
pub struct Mail {
    at: *mut libc::c_void,
    pid: u32,
    /// The process's number as it sees itself.
    inner: u32,
    started: u64,
}

/// Why there is no answer.
#[derive(Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// All slots of the mailbox are taken.
    Full,
    /// The process has not looked in time.
    Late,
    /// The process has begun with what it was asked for, and has not ended it in time.
    Busy,
    /// The process has ended.
    Gone,
}

impl Mail {
    /// Opens the mailbox of process `pid`.
    pub fn open(pid: u32) -> Result<Mail, Unreadable> {
        let folder = folder(pid);
        let start = started(&folder).ok_or(Unreadable::Gone)?;
        let inner = inner_pid(&folder, pid);
        for file in files(&folder, MAILBOX_LINK)? {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let file = OpenOptions::new().read(true).write(true).open(path)?;
            // SAFETY: the call uses no memory of this process.
            let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
            // A file that shrinks later would be a signal here.
            let stays = seals >= 0 && seals & libc::F_SEAL_SHRINK != 0;
            if !stays || file.metadata()?.len() != size_of::<Mailbox>() as u64 {
                continue;
            }
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            let (size, fd) = (size_of::<Mailbox>(), file.as_raw_fd());
            // SAFETY: the kernel chooses the place.
            let at = unsafe { libc::mmap(null_mut(), size, protection, flags, fd, 0) };
            if at == libc::MAP_FAILED {
                return Err(io::Error::last_os_error().into());
            }
            let mail = Mail {
                at,
                pid,
                inner,
                started: start,
            };
            // Another process may have got the number before its files were opened.
            if started(&folder) != Some(start) {
                return Err(Unreadable::Gone);
            }
            if mail.mailbox().is_ready() {
                return Ok(mail);
            }
        }
        Err(Unreadable::NotShown)
    }

    fn mailbox(&self) -> &Mailbox {
        // SAFETY: the mapping is as large as a mailbox, all its fields are atomics, and it stays
        // until this value is dropped.
        unsafe { &*self.at.cast_const().cast::<Mailbox>() }
    }

    fn post(&self, what: u32, argument: u64, time: Duration) -> Option<Posted> {
        let request = Request::new(self.inner, what, time.as_millis() as u64);
        let posted = self.mailbox().post(request, argument);
        let (bell, operation, all) = (self.mailbox().bell.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        // SAFETY: the operation reads no memory but the word, which is mapped.
        unsafe { libc::syscall(libc::SYS_futex, bell, operation, all) };
        posted
    }

    /// Asks the process for `what`, and waits for its answer for `patience` at most.
    pub fn ask(&self, what: u32, argument: u64, patience: Duration) -> Result<Answer, NoAnswer> {
        let begin = Instant::now();
        let posted = self.post(what, argument, patience).ok_or(NoAnswer::Full)?;
        let mut pause = Duration::from_micros(200);
        loop {
            if let Some(answer) = self.mailbox().answer_to(posted) {
                return Ok(answer);
            }
            let is_gone = started(&folder(self.pid)) != Some(self.started);
            if is_gone || begin.elapsed() >= patience {
                let was_taken = self.mailbox().withdraw(posted);
                return Err(match was_taken {
                    _ if is_gone => NoAnswer::Gone,
                    true => NoAnswer::Busy,
                    false => NoAnswer::Late,
                });
            }
            sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }
}

impl Drop for Mail {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more.
        unsafe { libc::munmap(self.at, size_of::<Mailbox>()) };
    }
}

/// Returns whether a process has a seccomp filter, which may end the process at a system call that
/// it has not made before.
pub fn has_filter(pid: u32) -> bool {
    status(&folder(pid), "Seccomp:").is_none_or(|mode| mode != "0")
}

/// Whether a process was asked.
pub enum Asked {
    Posted,
    /// All slots of the mailbox are taken.
    Full,
    /// A seccomp filter may end the process if it makes a file.
    Filtered,
}

/// Asks a forked child to make a segment of its own. Does not wait for it.
pub fn ask_to_show(pid: u32) -> Result<Asked, Unreadable> {
    if has_filter(pid) {
        return Ok(Asked::Filtered);
    }
    let posted = Mail::open(pid)?.post(MAKE, 0, PATIENCE);
    Ok(posted.map_or(Asked::Full, |_| Asked::Posted))
}
