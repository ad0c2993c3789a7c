//! Asks a process for something through its mailbox, and waits for the answer.

use super::behind::Behind;
use super::source::{MAILBOX_LINK, Unreadable, files};
use crate::foreign::{Process, has_ended, reopen_for_writing};
use pinfold::internal::segment::{Answer, Code, Mailbox, Posted, Request};
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::thread::sleep;
use std::time::{Duration, Instant};

pub struct Mail {
    page: Page,
    process: Process,
    /// The process's number as it sees itself.
    inner: u32,
    /// The process's memory, if this user may trace the process.
    behind: Option<Behind>,
}

/// How the mailbox is reached.
enum Page {
    Mapped(Mapped),
    /// In the process's memory.
    Behind,
}

/// Why there is no answer.
#[derive(Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// All slots of the mailbox are taken.
    Full,
    /// The process has not looked in time.
    Late,
    /// The process has not looked in time, and this user may not trace it to have it look.
    Untraceable,
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

/// How long a request may wait before this command closes the fast paths of malloc.
const CLOSE_AFTER: Duration = Duration::from_millis(20);

impl Mail {
    pub fn open(pid: u32) -> Result<Mail, Unreadable> {
        let process = Process::open(pid)?;
        let inner = process.inner_pid()?;
        let behind = Behind::find(&process);
        let mapped = Mapped::open(&process);
        // Another process may have got the number before its files were opened.
        if process.has_ended()? {
            return Err(Unreadable::Gone);
        }
        let (page, behind) = match (mapped, behind) {
            (Ok(Some(mapped)), behind) => (Page::Mapped(mapped), behind.ok().flatten()),
            (_, Ok(Some(behind))) if behind.with_mailbox(Mailbox::is_ready)? => {
                (Page::Behind, Some(behind))
            }
            (Err(why), _) | (_, Err(why)) => return Err(why),
            _ => return Err(Unreadable::NoMailbox),
        };
        Ok(Mail {
            page,
            process,
            inner,
            behind,
        })
    }

    /// Has `act` work on the mailbox.
    fn with<R>(&self, act: impl FnOnce(&Mailbox) -> R) -> Result<R, NoAnswer> {
        match (&self.page, &self.behind) {
            (Page::Mapped(mapped), _) => Ok(act(mapped.mailbox())),
            (Page::Behind, Some(behind)) => behind.with_mailbox(act).map_err(|_| NoAnswer::Gone),
            (Page::Behind, None) => Err(NoAnswer::Gone),
        }
    }

    fn post(&self, what: u32, argument: u64, time: Duration) -> Result<Posted, NoAnswer> {
        let request = Request::new(self.inner, what, time.as_millis() as u64);
        let posted = self.with(|mailbox| mailbox.post(request, argument))?;
        if let Page::Mapped(mapped) = &self.page {
            let (bell, operation) = (mapped.mailbox().bell.as_ptr(), libc::FUTEX_WAKE);
            // SAFETY: the operation reads no memory but the word, which is mapped.
            unsafe { libc::syscall(libc::SYS_futex, bell, operation, i32::MAX) };
        }
        posted.ok_or(NoAnswer::Full)
    }

    /// Asks the process for `what`, and waits for its answer for `patience` at most.
    pub fn ask(&self, what: u32, argument: u64, patience: Duration) -> Result<Answer, NoAnswer> {
        let begin = Instant::now();
        let mut posted = self.post(what, argument, patience)?;
        let mut pause = Duration::from_micros(200);
        let mut closed = begin;
        loop {
            match self.answer_to(posted)? {
                Some(answer) if answer.code() != Some(Code::NoConsent) => return Ok(answer),
                Some(_) if begin.elapsed() >= patience => return Err(NoAnswer::Slow),
                // The consent came too late, or another process's request took the time.
                Some(_) => {
                    let rest = patience.saturating_sub(begin.elapsed());
                    posted = self.post(what, argument, rest)?;
                }
                None => {}
            }
            let is_gone = !self.is_alive();
            if is_gone || begin.elapsed() >= patience {
                let was_taken = self.with(|mailbox| mailbox.withdraw(posted));
                return Err(match was_taken {
                    _ if is_gone => NoAnswer::Gone,
                    Ok(true) => NoAnswer::Busy,
                    Ok(false) if self.behind.is_none() => NoAnswer::Untraceable,
                    Ok(false) => NoAnswer::Late,
                    Err(why) => why,
                });
            }
            if closed.elapsed() >= CLOSE_AFTER && self.with(|mailbox| mailbox.is_waiting(posted))? {
                closed = Instant::now();
                // A process that has become another program has no such gates.
                let _ = self.behind.as_ref().map(Behind::close_gates);
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
        if self.with(|mailbox| mailbox.wants_consent(posted))? {
            if has_filter(&self.process) {
                self.with(|mailbox| mailbox.withdraw(posted))?;
                return Err(NoAnswer::Filtered);
            }
            self.with(|mailbox| mailbox.give_consent(posted))?;
        }
        self.with(|mailbox| mailbox.answer_to(posted))
    }
}

/// A mailbox's file, mapped.
struct Mapped(*mut libc::c_void);

impl Mapped {
    /// Maps the mailbox of a process. Returns `None` if it has none in shared memory, as a forked
    /// child.
    fn open(process: &Process) -> Result<Option<Mapped>, Unreadable> {
        for file in files(process, MAILBOX_LINK)? {
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
            let mapped = Mapped(at);
            if mapped.mailbox().is_ready() {
                return Ok(Some(mapped));
            }
        }
        Ok(None)
    }

    fn mailbox(&self) -> &Mailbox {
        // SAFETY: the mapping is as large as a mailbox, all its fields are atomics, and it stays
        // until this value is dropped.
        unsafe { &*self.0.cast_const().cast::<Mailbox>() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more.
        unsafe { libc::munmap(self.0, size_of::<Mailbox>()) };
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
