//! Finds a process's statistics segment, and reads it.
//!
//! The segment is a file without a name, behind one of the process's descriptors. Where the program
//! has closed them all, root can open the mapping instead.

use super::snapshot::{Refused, Snapshot};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
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
    file: File,
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
    /// It is a child of a fork, and has not made a segment of its own yet.
    Child,
    Refused(Refused),
    System(io::Error),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unreadable::Gone => "there is no such process, or it has ended",
            Unreadable::Forbidden => {
                "this user may not look at it: run this as its owner, or as root"
            }
            Unreadable::NotShown => {
                "it shows no statistics: it does not run on Pinfold, counts for `pinfold run --stats`, has PINFOLD_SEGMENT=off or too low a limit, or has closed its descriptors (then root can look)"
            }
            Unreadable::Child => {
                "it is a forked child without statistics of its own yet; run `pinfold list`, which asks it for them, and try again"
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
        for file in files(&folder, SEGMENT_LINK)? {
            match Snapshot::parse(&bytes_of(&file)?) {
                Ok(snapshot) if snapshot.pid == inner => {
                    return Ok(Source { pid, file, started });
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
            file: File::open("/dev/null").unwrap(),
            started: started(&folder(pid)).unwrap(),
        }
    }

    /// Reads the numbers of this moment.
    pub fn read(&self) -> Result<Snapshot, Unreadable> {
        // The file outlives the process as long as it is open here.
        if started(&folder(self.pid)) != Some(self.started) {
            return Err(Unreadable::Gone);
        }
        Snapshot::parse(&bytes_of(&self.file)?).map_err(Unreadable::Refused)
    }

    /// Returns when the process was started, in seconds since the epoch. Returns `None` if the
    /// kernel does not say when it was started itself.
    pub fn start_seconds(&self) -> Option<f64> {
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let boot = stat.lines().find_map(|line| line.strip_prefix("btime "))?;
        // SAFETY: `sysconf` has no preconditions.
        let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        let since_boot = self.started as f64 / ticks as f64;
        Some(boot.trim().parse::<f64>().ok()? + since_boot)
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
    for file in files(&folder, link)? {
        let bytes = bytes_of(&file)?;
        if bytes.get(12..16) == Some(&inner.to_le_bytes()[..]) {
            return Ok(bytes);
        }
    }
    Err(Unreadable::NotShown)
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

/// Returns the number that the process has in its own namespace.
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

/// Opens the process's files without a name that the kernel calls `link`: first those behind its
/// descriptors, or else those that it has mapped.
pub(super) fn files(folder: &Path, link: &str) -> Result<Vec<File>, Unreadable> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder.join("fd"))? {
        let path = entry?.path();
        // A descriptor may be closed meanwhile.
        if fs::read_link(&path).is_ok_and(|target| target == Path::new(link)) {
            files.push(File::open(path)?);
        }
    }
    if files.is_empty() {
        let maps = fs::read_to_string(folder.join("maps"))?;
        for line in maps.lines().filter(|line| line.ends_with(link)) {
            let range = line.split(' ').next().unwrap_or_default();
            files.push(File::open(folder.join("map_files").join(range))?);
        }
    }
    Ok(files)
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
