//! A process's folder in `/proc`.

use super::deadline;
use super::maps::Maps;
use rustix::fs::{CWD, Dir, Mode, OFlags, openat, readlinkat};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The largest size of a text of one process, except its mappings. A process in 65,536 groups, the
/// most that the kernel allows, has a `status` of 700 KiB.
const MAX_TEXT: usize = 1 << 20;
/// The characters of the longest path of a cgroup.
const CGROUP: usize = 256;

/// The highest number of processes and threads that the kernel can be set to.
const MAX_TASKS: usize = 1 << 22;

/// What to say if `/proc` shows no processes.
pub const NO_PROC: &str = "/proc shows no processes; mount it by `mount -t proc proc /proc`";

/// Returns whether `/proc` shows processes. Without it, every process seems to have ended.
pub fn is_proc_there() -> bool {
    Path::new("/proc/self").exists()
}

/// Returns whether an error of a file in a process's folder means that the process or thread has
/// ended. Any other error says nothing about it.
pub fn has_ended(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Returns the error of a process that has ended.
fn ended() -> io::Error {
    io::Error::from_raw_os_error(libc::ESRCH)
}

/// Returns the PIDs of all processes. `proc` is the folder in which the kernel shows them.
pub fn pids(proc: &Path) -> io::Result<Vec<u32>> {
    let folder = open_folder(CWD, proc)?;
    numbers(folder.as_fd(), MAX_TASKS)
}

fn open_folder(at: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    deadline::check()?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(at, path, flags, Mode::empty())?)
}

/// Returns the names in a folder that are numbers. Returns an error if there are more than `most`.
fn numbers(folder: BorrowedFd<'_>, most: usize) -> io::Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for entry in Dir::read_from(folder)? {
        deadline::check()?;
        let entry = entry?;
        let name = entry.file_name().to_str().ok();
        if let Some(number) = name.and_then(|name| name.parse().ok()) {
            if numbers.len() == most {
                return Err(too_much());
            }
            numbers.push(number);
        }
    }
    Ok(numbers)
}

fn too_much() -> io::Error {
    io::Error::new(
        ErrorKind::FileTooLarge,
        "it is larger than any such file should be",
    )
}

/// A file that is not read any more after this thread's [`Deadline`](super::Deadline).
struct Timed(File);

impl Read for Timed {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        deadline::check()?;
        self.0.read(bytes)
    }
}

/// A process, or one of its threads, by a descriptor of its folder.
///
/// The descriptor never leads to another process: after this one has ended, each read fails, even
/// if another process has got its PID.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    folder: OwnedFd,
    started: u64,
}

impl Process {
    /// Opens the folder of process `pid`. A process that has ended, and that its parent has not
    /// waited for yet, counts as ended.
    pub fn open(pid: u32) -> io::Result<Process> {
        Process::at(&PathBuf::from(format!("/proc/{pid}")), pid)
    }

    pub fn own() -> io::Result<Process> {
        // With the dot, the kernel follows the link before it in spite of `NOFOLLOW`.
        Process::at(Path::new("/proc/self/."), std::process::id())
    }

    /// Opens the folder of process `pid` at the path `folder`.
    pub fn at(folder: &Path, pid: u32) -> io::Result<Process> {
        let mut process = Process::in_any_state(folder, pid)?;
        process.started = process.stat()?.started()?;
        Ok(process)
    }

    /// Opens the folder of process `pid` at the path `folder`. The process may have ended, and its
    /// parent not waited for it yet.
    pub fn in_any_state(folder: &Path, pid: u32) -> io::Result<Process> {
        Ok(Process {
            pid,
            folder: open_folder(CWD, folder)?,
            started: 0,
        })
    }

    /// Returns the process's PID, as this command sees it.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns when the process was started, in ticks since the system's start.
    pub fn started(&self) -> u64 {
        self.started
    }

    pub fn folder(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// Returns whether the process has ended. Returns an error if that cannot be told.
    pub fn has_ended(&self) -> io::Result<bool> {
        match self.stat().and_then(|stat| stat.started()) {
            Ok(_) => Ok(false),
            Err(error) if has_ended(&error) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Reads a file of the process. Returns an error if it has more than `most` bytes.
    pub fn read(&self, name: &str, most: usize) -> io::Result<Vec<u8>> {
        let mut bytes = self.read_start(name, most + 1)?;
        if bytes.len() > most {
            return Err(too_much());
        }
        bytes.shrink_to_fit();
        Ok(bytes)
    }

    /// Reads at most the first `most` bytes of a file of the process.
    pub fn read_start(&self, name: &str, most: usize) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = Timed(self.file(name)?);
        file.take(most as u64).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Opens a file of the kernel's in the process's folder for reading.
    pub(super) fn file(&self, name: &str) -> io::Result<File> {
        self.opened(name, OFlags::RDONLY)
    }

    /// Opens a file of the kernel's in the process's folder for reading and writing.
    pub(super) fn file_to_write(&self, name: &str) -> io::Result<File> {
        self.opened(name, OFlags::RDWR)
    }

    fn opened(&self, name: &str, access: OFlags) -> io::Result<File> {
        deadline::check()?;
        let flags = access | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = openat(&self.folder, name, flags | OFlags::NONBLOCK, Mode::empty())?;
        Ok(file.into())
    }

    /// Returns where a link in the process's folder leads.
    pub fn link(&self, name: &str) -> io::Result<Vec<u8>> {
        deadline::check()?;
        Ok(readlinkat(&self.folder, name, Vec::new())?.into_bytes())
    }

    /// Reads the process's `stat`.
    pub fn stat(&self) -> io::Result<Stat> {
        Ok(Stat(self.read("stat", MAX_TEXT)?))
    }

    pub fn status(&self) -> io::Result<Fields> {
        self.fields("status")
    }

    /// Reads a file whose lines begin with names: `status`, `limits`, `smaps_rollup`.
    pub fn fields(&self, name: &str) -> io::Result<Fields> {
        Ok(Fields(self.read(name, MAX_TEXT)?))
    }

    /// Returns the name of the process's program.
    pub fn name(&self) -> io::Result<String> {
        let name = self.read("comm", MAX_TEXT)?;
        let name = name.strip_suffix(b"\n").unwrap_or(&name);
        Ok(String::from_utf8_lossy(name).into_owned())
    }

    /// Returns the path of the process's cgroup, or its last [`CGROUP`] characters: of the memory
    /// controller's hierarchy if that is a separate one, and otherwise of the unified hierarchy.
    pub fn cgroup(&self) -> Option<String> {
        let text = self.read("cgroup", MAX_TEXT).ok()?;
        let text = String::from_utf8_lossy(&text);
        let path = |middle: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once(':'));
            lines.find_map(|(_, rest)| {
                let (controllers, path) = rest.split_once(':')?;
                controllers
                    .split(',')
                    .any(|name| name == middle)
                    .then_some(path)
            })
        };
        let path = path("memory").or_else(|| path(""))?;
        let skipped = path.chars().count().saturating_sub(CGROUP);
        Some(path.chars().skip(skipped).collect())
    }

    /// Returns the PID that the process has in its own PID namespace.
    pub fn inner_pid(&self) -> io::Result<u32> {
        let status = self.status()?;
        // Kernels without PID namespaces have no such line.
        let Some(numbers) = status.field("NSpid:") else {
            return Ok(self.pid);
        };
        let last = numbers.split(u8::is_ascii_whitespace).next_back();
        last.and_then(number).ok_or(ErrorKind::InvalidData.into())
    }

    /// Iterates over the process's threads, which are opened one at a time. Those that end
    /// meanwhile are left out.
    pub fn tasks(&self) -> io::Result<impl Iterator<Item = io::Result<Process>> + use<>> {
        let folder = open_folder(self.folder(), Path::new("task"))?;
        let pids = numbers(folder.as_fd(), MAX_TASKS)?.into_iter();
        Ok(pids.filter_map(move |pid| {
            match open_folder(folder.as_fd(), Path::new(&pid.to_string())) {
                Ok(folder) => Some(Ok(Process {
                    pid,
                    folder,
                    started: 0,
                })),
                Err(error) if has_ended(&error) => None,
                Err(error) => Some(Err(error)),
            }
        }))
    }

    /// Returns the numbers of the process's descriptors. Returns an error if there are more than
    /// `most`.
    pub fn descriptors(&self, most: usize) -> io::Result<Vec<u32>> {
        let folder = open_folder(self.folder(), Path::new("fd"))?;
        numbers(folder.as_fd(), most)
    }

    /// Reads the process's mappings, one at a time.
    pub fn maps(&self) -> io::Result<Maps> {
        Ok(Maps::new(self.file("maps")?))
    }

    /// Returns where the process's root directory is, as this command sees it.
    pub(super) fn root(&self) -> io::Result<PathBuf> {
        Ok(PathBuf::from(OsStr::from_bytes(&self.link("root")?)))
    }
}

/// Reads a file of the kernel's own whose lines begin with names, as `/proc/stat`.
pub fn system_fields(path: &Path) -> io::Result<Fields> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file: File = openat(CWD, path, flags, Mode::empty())?.into();
    let mut bytes = Vec::new();
    file.take(MAX_TEXT as u64).read_to_end(&mut bytes)?;
    Ok(Fields(bytes))
}

pub fn number<N: std::str::FromStr>(bytes: &[u8]) -> Option<N> {
    str::from_utf8(bytes).ok()?.parse().ok()
}

/// The text of a file whose lines begin with names.
#[derive(Debug)]
pub struct Fields(Vec<u8>);

impl Fields {
    /// Returns what follows `name` at the beginning of a line, without white space around it.
    pub fn field(&self, name: &str) -> Option<&[u8]> {
        let mut lines = self.0.split(|&byte| byte == b'\n');
        lines.find_map(|line| Some(line.strip_prefix(name.as_bytes())?.trim_ascii()))
    }

    /// Returns the number that follows `name` at the beginning of a line.
    pub fn number(&self, name: &str) -> Option<u64> {
        let mut words = self.field(name)?.split(u8::is_ascii_whitespace);
        number(words.next()?)
    }

    /// Returns the lines, in which bytes that are no UTF-8 are replaced.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }

    /// Returns whether this is a whole `status`: its last line is there.
    pub fn is_whole_status(&self) -> bool {
        self.0.ends_with(b"\n") && self.field("nonvoluntary_ctxt_switches:").is_some()
    }
}

/// The text of a `stat` file: `PID (name) state ...`. The name may hold any bytes.
#[derive(Debug)]
pub struct Stat(Vec<u8>);

impl Stat {
    fn name_end(&self) -> Option<usize> {
        self.0.iter().rposition(|&byte| byte == b')')
    }

    pub fn name(&self) -> Option<&[u8]> {
        let start = self.0.iter().position(|&byte| byte == b'(')?;
        self.0.get(start + 1..self.name_end()?)
    }

    /// Returns field `nth`. The fields count from 1, and the state, behind the name, is field 3.
    pub fn word(&self, nth: usize) -> Option<&[u8]> {
        let rest = self.0.get(self.name_end()? + 1..)?.trim_ascii();
        rest.split(|&byte| byte == b' ').nth(nth.checked_sub(3)?)
    }

    pub fn number(&self, nth: usize) -> Option<u64> {
        number(self.word(nth)?)
    }

    /// Returns whether the process has ended, and its parent has not waited for it.
    pub fn is_ended(&self) -> bool {
        matches!(self.word(3), Some(b"Z" | b"X" | b"x"))
    }

    /// Returns when the process was started. For a process that has ended, returns an error for
    /// which [`has_ended`] is true.
    pub(super) fn started(&self) -> io::Result<u64> {
        if self.is_ended() {
            return Err(ended());
        }
        self.number(22).ok_or(ErrorKind::InvalidData.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_hold_anything() {
        let mut text = b"7 (a ) \xd1 b) R".to_vec();
        text.extend_from_slice(b" 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23\n");
        let stat = Stat(text);
        assert_eq!(stat.name(), Some(&b"a ) \xd1 b"[..]));
        assert_eq!((stat.word(3), stat.number(23)), (Some(&b"R"[..]), Some(23)));
        assert_eq!(stat.started().unwrap(), 22);
        for text in [&b""[..], b")", b"(", b"7 (short) R 1", b") R", b")("] {
            assert!(Stat(text.to_vec()).started().is_err());
        }
    }

    #[test]
    fn fields_are_found_beside_any_bytes() {
        let status = Fields(b"Name:\t\xd1\xff\nSeccomp:\t2\nVmRSS:\t  12 kB\nnonvol".to_vec());
        assert_eq!(status.field("Seccomp:"), Some(&b"2"[..]));
        assert_eq!(status.number("VmRSS:"), Some(12));
        assert_eq!(status.number("Name:"), None);
        assert_eq!(status.field("NSpid:"), None);
        assert!(!status.is_whole_status());
    }

    #[test]
    fn this_process_is_read() {
        let process = Process::own().unwrap();
        assert_eq!(process.inner_pid().unwrap(), process.pid());
        assert!(process.status().unwrap().is_whole_status());
        assert!(
            process
                .tasks()
                .unwrap()
                .any(|task| task.unwrap().pid() == process.pid())
        );
        assert!(!process.has_ended().unwrap() && process.started() > 0);
        assert_eq!(
            process.read("stat", 3).unwrap_err().kind(),
            ErrorKind::FileTooLarge
        );
        assert_eq!(process.read_start("stat", 3).unwrap().len(), 3);
    }

    #[test]
    fn the_cgroup_of_either_version_is_read() {
        let proc = tempfile::tempdir().unwrap();
        let process = Process::in_any_state(proc.path(), 7).unwrap();
        assert_eq!(process.cgroup(), None);
        let long = format!("0::/{}\n", "x".repeat(2000));
        for (text, expected) in [
            (
                "0::/system.slice/a:b.service\n",
                Some("/system.slice/a:b.service"),
            ),
            ("5:cpu,cpuacct:/c\n3:memory:/m\n0::/u\n", Some("/m")),
            (&long, Some(&long.trim()[long.len() - 1 - CGROUP..])),
            ("nonsense\n", None),
        ] {
            std::fs::write(proc.path().join("cgroup"), text).unwrap();
            assert_eq!(process.cgroup().as_deref(), expected, "{text}");
        }
    }

    /// The kernel gives the PID of a process that has ended to another one.
    #[test]
    fn a_number_that_another_process_gets_is_not_followed() {
        let proc = tempfile::tempdir().unwrap();
        let (folder, ended) = (proc.path().join("7"), proc.path().join("ended"));
        let show = |name: &str| {
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("comm"), name).unwrap();
        };
        show("first");
        let process = Process::in_any_state(&folder, 7).unwrap();
        std::fs::rename(&folder, &ended).unwrap();
        show("second");
        assert_eq!(process.name().unwrap(), "first");
        std::fs::remove_dir_all(&ended).unwrap();
        assert!(has_ended(&process.name().unwrap_err()));
    }

    #[test]
    fn a_process_that_has_ended_is_never_mistaken_for_another() {
        let mut child = std::process::Command::new("sleep")
            .arg("100")
            .spawn()
            .unwrap();
        let process = Process::open(child.id()).unwrap();
        assert!(!process.has_ended().unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_ended().unwrap());
        for name in ["status", "stat", "maps"] {
            assert!(has_ended(&process.read(name, 1 << 20).unwrap_err()));
        }
    }
}
