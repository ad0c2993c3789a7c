//! Finds a process's statistics segment, and reads it.
//!
//! The segment is a file without a name, behind one of the process's descriptors. Where the program
//! has closed them all, root can open the mapping instead. In a process that counts every call, the
//! segment is a file with a name, which the process has mapped.

use super::snapshot::{Refused, Snapshot};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// How the kernel names the files of `pinfold::segment`.
const SEGMENT_LINK: &str = "/memfd:pinfold (deleted)";
pub(super) const MAILBOX_LINK: &str = "/memfd:pinfold-mailbox (deleted)";
/// How long to wait for forked children: somewhat longer than the time between two ticks.
pub const PATIENCE: Duration = Duration::from_millis(1200);
/// More bytes than a segment has on the largest machine. Other files are not read to their end.
const MAX_BYTES: u64 = 64 << 20;

/// A process that shows its statistics.
pub struct Source {
    /// The process's number, as this command sees it.
    pub pid: u32,
    held: Held,
    /// When the process was started, as the kernel counts.
    started: u64,
}

/// Why a process cannot be read.
#[derive(Debug)]
pub enum Unreadable {
    /// There is no such process, or it has ended.
    Gone,
    /// This user may not look.
    Forbidden,
    /// It does not run on Pinfold, or shows no statistics.
    NotShown,
    /// It has closed the descriptors of its files, and this user may not open its mappings.
    Closed,
    /// It has no mailbox.
    NoMailbox,
    /// It is a child of a fork, and has not made a segment of its own yet.
    Child,
    /// It has started another program since its segment was opened.
    Replaced,
    /// This other process has the same mailbox, and the same number in its PID namespace.
    Namesake(u32),
    Refused(Refused),
    System(io::Error),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unreadable::Gone => "there is no such process, or it has ended",
            Unreadable::Forbidden => {
                "this user may not look at it: run this as its owner, or as root with CAP_SYS_PTRACE"
            }
            Unreadable::NotShown => {
                "it shows no statistics: it does not run on Pinfold, or has PINFOLD_SEGMENT=off or too low a limit; start it with `pinfold run`, and see `pinfold list`"
            }
            Unreadable::Closed => {
                "it has closed its descriptors: run this as root with CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE"
            }
            Unreadable::NoMailbox => {
                "it takes no requests: it does not run on Pinfold, counts every call (`pinfold run --stats`), or has another version of Pinfold; start it with `pinfold run` without --stats"
            }
            Unreadable::Child => {
                "it is a forked child without statistics of its own yet; run `pinfold list`, which asks it for them, and try again"
            }
            Unreadable::Replaced => "it has started another program; run the command again",
            Unreadable::Namesake(other) => {
                return write!(
                    f,
                    "it cannot be told from process {other}, which it was forked with: both have the same number in their own PID namespaces; end that process first"
                );
            }
            Unreadable::Refused(refused) => return refused.fmt(f),
            Unreadable::System(error) => return error.fmt(f),
        })
    }
}

impl std::error::Error for Unreadable {}

impl From<io::Error> for Unreadable {
    fn from(error: io::Error) -> Unreadable {
        match error.kind() {
            ErrorKind::PermissionDenied => Unreadable::Forbidden,
            ErrorKind::NotFound => Unreadable::Gone,
            _ if error.raw_os_error() == Some(libc::ESRCH) => Unreadable::Gone,
            _ => Unreadable::System(error),
        }
    }
}

pub(super) fn folder(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

impl Source {
    /// Opens the segment of process `pid`.
    pub fn open(pid: u32) -> Result<Source, Unreadable> {
        let folder = folder(pid);
        let started = started(&folder).ok_or(Unreadable::Gone)?;
        let inner = inner_pid(&folder, pid);
        let mut found = Err(Unreadable::NotShown);
        let shown = files(&folder, SEGMENT_LINK)?;
        for held in shown.into_iter().chain(counted(&folder, inner)) {
            match Snapshot::parse(&bytes_of(&held.file)?) {
                // A child in a PID namespace of its own may have its parent's number.
                Ok(snapshot) if snapshot.pid == inner && held.is_mapped(&folder)? => {
                    return Ok(Source { pid, held, started });
                }
                Ok(_) => found = Err(Unreadable::Child),
                Err(refused) => found = Err(Unreadable::Refused(refused)),
            }
        }
        found
    }

    /// Returns a source whose numbers are not read.
    #[cfg(test)]
    pub fn of_this_process() -> Source {
        let pid = std::process::id();
        Source {
            pid,
            held: Held {
                file: File::open("/dev/null").unwrap(),
                path: None,
                link: String::new(),
            },
            started: started(&folder(pid)).unwrap(),
        }
    }

    /// Reads the numbers of this moment.
    pub fn read(&self) -> Result<Snapshot, Unreadable> {
        // The file outlives the process as long as it is open here.
        let folder = folder(self.pid);
        if started(&folder) != Some(self.started) {
            return Err(Unreadable::Gone);
        }
        if !self.held.is_behind_path() && !self.held.is_mapped(&folder)? {
            return Err(Unreadable::Replaced);
        }
        Snapshot::parse(&bytes_of(&self.held.file)?).map_err(Unreadable::Refused)
    }

    /// Returns when the process was started, in seconds since the epoch. Returns `None` if the
    /// kernel does not say when it was started itself.
    pub fn start_seconds(&self) -> Option<f64> {
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let boot = stat.lines().find_map(|line| line.strip_prefix("btime "))?;
        let since_boot = self.started as f64 / ticks_per_second();
        Some(boot.trim().parse::<f64>().ok()? + since_boot)
    }

    /// Returns the CPU time of all the process's threads in seconds.
    pub fn cpu_seconds(&self) -> Option<f64> {
        let stat = fs::read(folder(self.pid).join("stat")).ok()?;
        let stat = String::from_utf8_lossy(&stat);
        // The name, in brackets, may hold any characters. User and system time are fields 14 and
        // 15, and the state is field 3.
        let mut words = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
        let mut ticks = || words.next()?.parse::<u64>().ok();
        let all = ticks()?.saturating_add(ticks()?);
        Some(all as f64 / ticks_per_second())
    }

    /// Returns the name of the process's program, with unprintable characters escaped.
    pub fn name(&self) -> String {
        name(self.pid)
    }
}

/// Reads the process's own file without a name that the kernel calls `link`. The process's number
/// is the word of 4 bytes behind the first 12. A forked child may have its parent's file.
pub fn memory_file(pid: u32, link: &str) -> Result<Vec<u8>, Unreadable> {
    let folder = folder(pid);
    started(&folder).ok_or(Unreadable::Gone)?;
    let inner = inner_pid(&folder, pid);
    for held in files(&folder, link)? {
        let bytes = bytes_of(&held.file)?;
        let is_own = bytes.get(12..16) == Some(&inner.to_le_bytes()[..]);
        // A child in a PID namespace of its own may have its parent's number.
        if is_own && held.is_mapped(&folder)? {
            return Ok(bytes);
        }
    }
    Err(Unreadable::NotShown)
}

/// Returns how many of the kernel's ticks are a second.
fn ticks_per_second() -> f64 {
    // SAFETY: `sysconf` has no preconditions.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    ticks.max(1) as f64
}

/// Returns the name of a process's program, with unprintable characters escaped.
pub fn name(pid: u32) -> String {
    let name = fs::read(folder(pid).join("comm")).unwrap_or_default();
    let name = String::from_utf8_lossy(&name);
    name.trim_end_matches('\n').escape_debug().to_string()
}

/// Returns when a process was started, in ticks since the system's start. Returns `None` if it has
/// ended.
pub(super) fn started(folder: &Path) -> Option<u64> {
    let stat = fs::read(folder.join("stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    // The name, in brackets, may hold any characters. The state is field 3, the start field 22.
    let mut words = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = words.next()?;
    (state != "Z" && state != "X")
        .then(|| words.nth(18)?.parse().ok())
        .flatten()
}

/// Returns the numbers of all processes.
pub(super) fn pids() -> io::Result<Vec<u32>> {
    let entries = fs::read_dir("/proc")?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter_map(|name| name.parse().ok()).collect())
}

/// Returns the number that the process has in its own PID namespace.
pub(super) fn inner_pid(folder: &Path, pid: u32) -> u32 {
    let numbers = status(folder, "NSpid:");
    let inner = numbers.as_deref().and_then(|numbers| {
        let last = numbers.split_ascii_whitespace().last()?;
        last.parse().ok()
    });
    inner.unwrap_or(pid)
}

/// Returns what a process's `status` says behind `field`.
pub(super) fn status(folder: &Path, field: &str) -> Option<String> {
    let status = fs::read_to_string(folder.join("status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    line.map(|rest| rest.trim().to_owned())
}

/// A file that another process holds.
pub(super) struct Held {
    pub(super) file: File,
    /// The place in /proc that leads to the file as long as the process has not closed it.
    path: Option<PathBuf>,
    /// How the kernel's list of the process's mappings ends a line with this file.
    link: String,
}

impl Held {
    /// Returns whether the file's place still leads to it.
    fn is_behind_path(&self) -> bool {
        let there = self.path.as_ref().and_then(|path| fs::metadata(path).ok());
        let here = self.file.metadata();
        there
            .zip(here.ok())
            .is_some_and(|(there, here)| (there.dev(), there.ino()) == (here.dev(), here.ino()))
    }

    /// Returns whether the process has mapped the file. A forked child that has replaced its
    /// parent's mapping has not, nor has a process that has started another program.
    pub(super) fn is_mapped(&self, folder: &Path) -> io::Result<bool> {
        let maps = fs::read_to_string(folder.join("maps"))?;
        let number = format!(" {} ", self.file.metadata()?.ino());
        // Some file systems show other numbers in this list. The name of a file there is unique.
        let is_this = |line: &str| self.path.is_none() || line.contains(&number);
        Ok(maps
            .lines()
            .any(|line| line.ends_with(&self.link) && is_this(line)))
    }
}

/// Opens the process's files without a name that the kernel calls `link`: first those behind its
/// descriptors, or else those that it has mapped.
pub(super) fn files(folder: &Path, link: &str) -> Result<Vec<Held>, Unreadable> {
    let mut files = Vec::new();
    let mut hold = |path: PathBuf| -> io::Result<()> {
        if let Some(file) = regular(&path)? {
            files.push(Held {
                file,
                path: Some(path),
                link: link.to_owned(),
            });
        }
        Ok(())
    };
    let mut is_open = false;
    for entry in fs::read_dir(folder.join("fd"))? {
        let path = entry?.path();
        // A descriptor may be closed meanwhile.
        if fs::read_link(&path).is_ok_and(|target| target == Path::new(link)) {
            is_open = true;
            hold(path)?;
        }
    }
    if !is_open {
        let maps = fs::read_to_string(folder.join("maps"))?;
        for line in maps.lines().filter(|line| line.ends_with(link)) {
            let range = line.split(' ').next().unwrap_or_default();
            hold(folder.join("map_files").join(range)).map_err(|error| match error.kind() {
                ErrorKind::PermissionDenied => Unreadable::Closed,
                _ => error.into(),
            })?;
        }
    }
    Ok(files)
}

/// Opens a file that another process has chosen. Returns `None` if it is not a regular file. Never
/// waits, as the open of a pipe would.
fn regular(path: &Path) -> io::Result<Option<File>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    Ok(file.metadata()?.is_file().then_some(file))
}

/// Opens what may be the segment of a process that counts every call: mapped files whose names are
/// the process's number and a count.
fn counted(folder: &Path, pid: u32) -> Vec<Held> {
    let maps = fs::read_to_string(folder.join("maps")).unwrap_or_default();
    let prefix = format!("{pid}.");
    let is_segment = |path: &str| {
        let count = path
            .rsplit('/')
            .next()
            .and_then(|name| name.strip_prefix(&prefix));
        count.is_some_and(|count| {
            !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit())
        })
    };
    let shared = maps.lines().filter(|line| line.contains(" rw-s "));
    let mut paths: Vec<&str> = shared
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .filter(|path| is_segment(path))
        .collect();
    paths.dedup();
    let opened = paths.into_iter().filter_map(|path| {
        // The process may see another file system.
        let place = folder.join("root").join(path.trim_start_matches('/'));
        let file = regular(&place).ok()??;
        Some(Held {
            file,
            path: None,
            link: path.to_owned(),
        })
    });
    opened.collect()
}

/// Reads a whole file. A file whose size can never change is mapped and read word by word, so that
/// each number is one that the process stored.
fn bytes_of(file: &File) -> io::Result<Vec<u8>> {
    let size = file.metadata()?.len().min(MAX_BYTES) as usize;
    // SAFETY: the call uses no memory of this process.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 || size == 0 {
        let mut bytes = vec![0; size];
        let got = file.read_at(&mut bytes, 0)?;
        bytes.truncate(got);
        return Ok(bytes);
    }
    let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: the kernel chooses the place.
    let at = unsafe { libc::mmap(null_mut(), size, protection, flags, file.as_raw_fd(), 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let words = (0..size / 8).map(|nth| {
        // SAFETY: the mapping has `size` bytes, and the seal keeps the file from shrinking below.
        let word = unsafe { &*at.cast::<AtomicU64>().add(nth) };
        word.load(Relaxed).to_ne_bytes()
    });
    let bytes = words.flatten().collect();
    // SAFETY: nothing refers to the mapping any more.
    unsafe { libc::munmap(at, size) };
    Ok(bytes)
}
