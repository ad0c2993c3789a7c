//! Asks a process for something through its mailbox, and waits for the answer.

use super::numbers::Numbers;
use super::source::{MAILBOX_LINK, PATIENCE, Unreadable, files, is_mapped};
use crate::foreign::{Process, has_ended, reopen_for_writing};
use pinfold::segment::{Answer, Code, MAKE, Mailbox, Posted, Request};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A process's mailbox, mapped. A forked child has its parent's.
pub struct Mail {
    page: Page,
    process: Process,
    /// The process's number as it sees itself.
    inner: u32,
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
        let process = Process::open(pid)?;
        let inner = process.inner_pid()?;
        for (file, mapping) in files(&process, MAILBOX_LINK)? {
            let file = reopen_for_writing(&file)?;
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
            let page = Page(at.cast());
            // Another program may have begun before the files were opened.
            if process.has_ended()? {
                return Err(Unreadable::Gone);
            }
            if page.mailbox().is_ready() {
                // A process of which that is not known may have the same mailbox, unless it has
                // other rights than the one that this user may look at.
                let shares = |other: &u32| {
                    let other = Process::open(*other);
                    match other.and_then(|other| is_mapped(&other, &mapping)) {
                        Ok(shares) => shares,
                        Err(error) => {
                            !has_ended(&error) && error.kind() != ErrorKind::PermissionDenied
                        }
                    }
                };
                return match numbers.others(pid, inner).find(shares) {
                    Some(other) => Err(Unreadable::Namesake(other)),
                    None => Ok(Mail {
                        page,
                        process,
                        inner,
                    }),
                };
            }
        }
        Err(Unreadable::NoMailbox)
    }

    fn mailbox(&self) -> &Mailbox {
        self.page.mailbox()
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
        self.process.has_ended().is_ok_and(|ended| !ended)
    }

    /// Returns the answer, if there is one. Gives the process its consent if it wants it.
    fn answer_to(&self, posted: Posted) -> Result<Option<Answer>, NoAnswer> {
        if self.mailbox().wants_consent(posted) {
            if has_filter(&self.process) {
                self.mailbox().withdraw(posted);
                return Err(NoAnswer::Filtered);
            }
            self.mailbox().give_consent(posted);
        }
        Ok(self.mailbox().answer_to(posted))
    }
}

/// A mapping of a mailbox.
struct Page(*mut Mailbox);

impl Page {
    fn mailbox(&self) -> &Mailbox {
        // SAFETY: the mapping is as large as a mailbox, all its fields are atomics, and it stays
        // until this value is dropped.
        unsafe { &*self.0 }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more.
        unsafe { libc::munmap(self.0.cast(), size_of::<Mailbox>()) };
    }
}

/// Returns whether a thread of a process has a seccomp filter. A filter may end the process at a
/// system call that it has not made before. Returns `true` if that cannot be told.
pub fn has_filter(process: &Process) -> bool {
    let Ok(tasks) = process.tasks() else {
        return true;
    };
    let mut without = 0;
    for task in tasks {
        if !task.is_ok_and(|task| is_without_filter(&task)) {
            return true;
        }
        without += 1;
    }
    without == 0
}

/// Returns whether a thread is known to have no seccomp filter, because it has ended, or because
/// its `status` says so.
fn is_without_filter(task: &Process) -> bool {
    match task.status() {
        Ok(status) => match status.field("Seccomp:") {
            Some(mode) => mode == b"0",
            // A kernel without seccomp has no such line.
            None => status.is_whole_status(),
        },
        Err(error) => has_ended(&error),
    }
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
    let mail = Mail::open(pid, numbers)?;
    if has_filter(&mail.process) {
        return Ok(Asked::Filtered);
    }
    let posted = mail.post(MAKE, 0, PATIENCE);
    Ok(posted.map_or(Asked::Full, |posted| Asked::Posted(Child { mail, posted })))
}

impl Child {
    pub fn pid(&self) -> u32 {
        self.mail.process.pid()
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::Path;

    const STAT: &str = "7 (x) R 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23\n";
    const END: &str = "nonvoluntary_ctxt_switches:\t0\n";

    /// Returns whether a made-up process has a filter. Its second thread is made by `make`, in a
    /// folder of its own.
    fn with_task(make: impl FnOnce(&Path)) -> bool {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("stat"), STAT).unwrap();
        for task in ["7", "8"] {
            fs::create_dir_all(folder.path().join("task").join(task)).unwrap();
        }
        let status = format!("Name:\tx\nSeccomp:\t0\n{END}");
        fs::write(folder.path().join("task/7/status"), status).unwrap();
        make(&folder.path().join("task/8"));
        has_filter(&Process::at(folder.path(), 7).unwrap())
    }

    fn with_status(status: &[u8]) -> bool {
        with_task(|task| fs::write(task.join("status"), status).unwrap())
    }

    #[test]
    fn a_status_that_says_so_means_no_filter() {
        for name in [
            &b"x"[..],
            b"\xd1\x81\xd0\xb5\xd1\x80\xd0\xb2\xd0\xb5\xd1\x80-1\xd1",
        ] {
            for (mode, filtered) in [(b'0', false), (b'1', true), (b'2', true)] {
                let mut status = [b"Name:\t", name, b"\nSeccomp:\t"].concat();
                status.extend([mode, b'\n']);
                status.extend(END.bytes());
                assert_eq!(with_status(&status), filtered);
            }
        }
        // A kernel without seccomp.
        assert!(!with_status(format!("Name:\tx\n{END}").as_bytes()));
    }

    #[test]
    fn only_a_thread_that_has_ended_has_no_status() {
        assert!(!with_task(|_| {}));
        assert!(!with_task(|task| fs::remove_dir(task).unwrap()));
    }

    #[test]
    fn what_is_not_known_means_a_filter() {
        for status in [
            &b""[..],
            b"Name:\tx\n",
            b"Name:\tx\nSeccomp:",
            b"Name:\tx\nSeccomp:\t\nnonvoluntary_ctxt_switches:\t0\n",
            b"Name:\tx\nnonvoluntary_ctxt_switches:\t0",
            b"\xff\xfe",
        ] {
            assert!(with_status(status), "{status:?}");
        }
        let long = [&vec![b'x'; 2 << 20][..], b"\nSeccomp:\t0\n", END.as_bytes()].concat();
        assert!(with_status(&long));
        assert!(with_task(
            |task| fs::create_dir(task.join("status")).unwrap()
        ));
        // Too many links, as a stand-in for errors that have nothing to do with the thread.
        assert!(with_task(
            |task| symlink("status", task.join("status")).unwrap()
        ));
        assert!(with_task(|task| {
            fs::remove_dir(task).unwrap();
            fs::write(task, "no folder").unwrap();
        }));
        // SAFETY: the call has no preconditions.
        if unsafe { libc::geteuid() } != 0 {
            assert!(with_task(|task| {
                let status = task.join("status");
                fs::write(&status, format!("Seccomp:\t0\n{END}")).unwrap();
                fs::set_permissions(&status, fs::Permissions::from_mode(0o0)).unwrap();
            }));
        }
    }

    #[test]
    fn a_process_whose_threads_cannot_be_listed_has_a_filter() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("stat"), STAT).unwrap();
        let process = Process::at(folder.path(), 7).unwrap();
        assert!(has_filter(&process));
        fs::create_dir(folder.path().join("task")).unwrap();
        assert!(has_filter(&process));
    }
}
