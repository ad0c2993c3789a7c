//! Asks a process for something through its mailbox, and waits for the answer.

use super::numbers::Numbers;
use super::source::{
    MAILBOX_LINK, PATIENCE, Unreadable, files, folder, inner_pid, started, status,
};
use pinfold::segment::{Answer, Code, MAKE, Mailbox, Posted, Request};
use std::fs::{self, DirEntry, OpenOptions};
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
    /// A seccomp filter may end the process at what it was asked for.
    Filtered,
    /// This process has not found out in time whether the other one's threads have seccomp filters.
    Slow,
}

/// The longest time between two looks for an answer. A process that wants consent waits for it in
/// an allocation or free, and gives up after 100 ms.
pub const LONGEST_PAUSE: Duration = Duration::from_millis(2);

impl Mail {
    /// Opens the mailbox of process `pid`. `numbers` are those of all processes.
    pub fn open(pid: u32, numbers: &Numbers) -> Result<Mail, Unreadable> {
        let own = folder(pid);
        let start = started(&own).ok_or(Unreadable::Gone)?;
        let inner = inner_pid(&own, pid);
        for held in files(&own, MAILBOX_LINK)? {
            let path = format!("/proc/self/fd/{}", held.file.as_raw_fd());
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
            if started(&own) != Some(start) {
                return Err(Unreadable::Gone);
            }
            if mail.mailbox().is_ready() {
                let shares = |other: &u32| held.is_mapped(&folder(*other)).unwrap_or(false);
                return match numbers.others(pid, inner).find(shares) {
                    Some(other) => Err(Unreadable::Namesake(other)),
                    None => Ok(mail),
                };
            }
        }
        Err(Unreadable::NoMailbox)
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
        let mut posted = self.post(what, argument, patience).ok_or(NoAnswer::Full)?;
        let mut pause = Duration::from_micros(200);
        loop {
            match self.answer_to(posted)? {
                Some(answer) if answer.code() != Some(Code::NoConsent) => return Ok(answer),
                Some(_) if begin.elapsed() >= patience => return Err(NoAnswer::Slow),
                // The consent came too late, or another process's request took the time.
                Some(_) => {
                    let rest = patience.saturating_sub(begin.elapsed());
                    posted = self.post(what, argument, rest).ok_or(NoAnswer::Full)?;
                }
                None => {}
            }
            let is_gone = !self.is_alive();
            if is_gone || begin.elapsed() >= patience {
                let was_taken = self.mailbox().withdraw(posted);
                return Err(match was_taken {
                    _ if is_gone => NoAnswer::Gone,
                    true => NoAnswer::Busy,
                    false => NoAnswer::Late,
                });
            }
            sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn is_alive(&self) -> bool {
        started(&folder(self.pid)) == Some(self.started)
    }

    /// Returns the answer, if there is one. Gives the process its consent if it wants it.
    fn answer_to(&self, posted: Posted) -> Result<Option<Answer>, NoAnswer> {
        if self.mailbox().wants_consent(posted) {
            if has_filter(self.pid) {
                self.mailbox().withdraw(posted);
                return Err(NoAnswer::Filtered);
            }
            self.mailbox().give_consent(posted);
        }
        Ok(self.mailbox().answer_to(posted))
    }
}

impl Drop for Mail {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more.
        unsafe { libc::munmap(self.at, size_of::<Mailbox>()) };
    }
}

/// Returns whether a thread of a process has a seccomp filter. A filter may end the process at a
/// system call that it has not made before.
pub fn has_filter(pid: u32) -> bool {
    let tasks = fs::read_dir(folder(pid).join("task"));
    let Ok(tasks) = tasks.and_then(Iterator::collect::<io::Result<Vec<_>>>) else {
        return true;
    };
    // A thread that has ended has no status, and a kernel without seccomp tells no mode.
    let mode = |task: &DirEntry| status(&task.path(), "Seccomp:");
    tasks
        .iter()
        .any(|task| mode(task).is_some_and(|mode| mode != "0"))
}

/// A forked child that was asked to make a segment of its own.
pub struct Child {
    mail: Mail,
    posted: Posted,
}

/// Whether a forked child was asked to make a segment of its own.
pub enum Asked {
    Posted(Child),
    /// All slots of the mailbox are taken.
    Full,
    /// A seccomp filter may end the process if it makes a file.
    Filtered,
}

/// Asks a forked child to make a segment of its own. Does not wait for it.
pub fn ask_to_show(pid: u32, numbers: &Numbers) -> Result<Asked, Unreadable> {
    if has_filter(pid) {
        return Ok(Asked::Filtered);
    }
    let mail = Mail::open(pid, numbers)?;
    let posted = mail.post(MAKE, 0, PATIENCE);
    Ok(posted.map_or(Asked::Full, |posted| Asked::Posted(Child { mail, posted })))
}

impl Child {
    pub fn pid(&self) -> u32 {
        self.mail.pid
    }

    pub fn is_alive(&self) -> bool {
        self.mail.is_alive()
    }

    /// Returns what the child has answered, if it has. Call this every [`LONGEST_PAUSE`], because
    /// the child may be waiting for the consent to make a file.
    pub fn answer(&self) -> Result<Option<Answer>, NoAnswer> {
        self.mail.answer_to(self.posted)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.mail.mailbox().withdraw(self.posted);
    }
}
