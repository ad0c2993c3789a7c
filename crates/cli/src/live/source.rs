//! Finds a process's statistics segment, and reads it.
//!
//! The segment is a file without a name that the process has mapped. Root opens it by the mapping.
//! The process's own user opens it by one of the process's descriptors. In a forked child, and
//! where the program has closed its descriptors, it is read in the process's memory ([`Behind`]).
//! In a process that counts every call, the segment is a file with a name.
//!
//! The process may be hostile, and `pinfold list` reads all processes. So at most [`FILES`] files
//! of a process are opened, and a page of each is read before any more.

use super::behind::Behind;
use super::snapshot::{Refused, Snapshot};
use crate::foreign::{
    Content, Mapping, NO_PROC, Process, Unopened, has_ended, is_proc_there, number, open_mapped,
    regular,
};
use rustix::fs::{Stat, major, minor};
use rustix::param::clock_ticks_per_second;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind};

/// How the kernel names the files of `pinfold::internal::segment`.
const SEGMENT_LINK: &[u8] = b"/memfd:pinfold (deleted)";
pub(super) const MAILBOX_LINK: &[u8] = b"/memfd:pinfold-mailbox (deleted)";
/// How many files of a process are opened. A process has one file of each kind, and a forked child
/// may still have its parent's.
const FILES: usize = 2;
/// The most descriptors of a process that are searched: as many as Linux allows by default.
const DESCRIPTORS: usize = 1 << 20;

/// A process that shows its statistics.
pub struct Source {
    /// The process's number, as this command sees it.
    pub pid: u32,
    process: Process,
    place: Place,
}

/// Where a process's segment is.
enum Place {
    File(Held),
    Memory(Behind),
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
    /// It is a forked child or has closed its descriptors, and this user may not trace it.
    Untraceable,
    /// It has no mailbox.
    NoMailbox,
    /// It has its parent's statistics.
    Shares,
    /// It has started another program since its segment was opened.
    Replaced,
    Refused(Refused),
    System(io::Error),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unreadable::Gone if !is_proc_there() => NO_PROC,
            Unreadable::Gone => "there is no such process, or it has ended",
            Unreadable::Forbidden => {
                "this user may not look at it: run this as its owner, or as root with CAP_SYS_PTRACE"
            }
            Unreadable::NotShown => {
                "it shows no statistics: it does not run on Pinfold, or has PINFOLD_SEGMENT=off or too low a limit; start it with `pinfold run` (a Rust program with object caches needs pinfold-malloc as its global allocator), and see `pinfold list`"
            }
            Unreadable::Untraceable => {
                "it is a forked child or has closed its descriptors, so only a process that may trace it can read or ask it: run this as root with CAP_SYS_PTRACE, or as its owner while kernel.yama.ptrace_scope is 0"
            }
            Unreadable::NoMailbox => {
                "it takes no requests: it does not run on Pinfold, counts every call (`pinfold run --stats`), or has another version of Pinfold; start it with `pinfold run` without --stats"
            }
            Unreadable::Shares => {
                "it was made by a call that runs no fork handlers, as _Fork, so it shares its parent's statistics until it starts another program"
            }
            Unreadable::Replaced => "it has started another program; run the command again",
            Unreadable::Refused(refused) => return refused.fmt(f),
            Unreadable::System(error) => return error.fmt(f),
        })
    }
}

impl std::error::Error for Unreadable {}

impl Unreadable {
    /// Returns whether a [`Deadline`](crate::foreign::Deadline) ended the reads.
    pub fn is_late(&self) -> bool {
        matches!(self, Unreadable::System(error) if error.kind() == ErrorKind::TimedOut)
    }
}

impl From<Refused> for Unreadable {
    fn from(refused: Refused) -> Unreadable {
        Unreadable::Refused(refused)
    }
}

impl From<io::Error> for Unreadable {
    fn from(error: io::Error) -> Unreadable {
        match error.kind() {
            ErrorKind::PermissionDenied => Unreadable::Forbidden,
            _ if has_ended(&error) => Unreadable::Gone,
            _ => Unreadable::System(error),
        }
    }
}

impl Source {
    pub fn open(pid: u32) -> Result<Source, Unreadable> {
        let process = Process::open(pid)?;
        let inner = process.inner_pid()?;
        let shown = mapped(&process, |mapping| {
            mapping.path == SEGMENT_LINK || is_counted(mapping, inner)
        })?;
        let mut found = Unreadable::NotShown;
        for mapping in shown {
            let held = match Held::open(&process, mapping) {
                Ok(held) => held,
                Err(why) => {
                    found = why;
                    continue;
                }
            };
            match held.read()? {
                // A child in a PID namespace of its own may have its parent's number.
                Ok(snapshot) if snapshot.pid == inner => {
                    let place = Place::File(held);
                    return Ok(Source {
                        pid,
                        process,
                        place,
                    });
                }
                Ok(_) => {}
                Err(refused) => found = Unreadable::Refused(refused),
            }
        }
        let Some(behind) = Behind::find(&process)? else {
            return Err(found);
        };
        behind.snapshot()?;
        Ok(Source {
            pid,
            process,
            place: Place::Memory(behind),
        })
    }

    /// Returns a source whose numbers are not read.
    #[cfg(test)]
    pub fn of_this_process() -> Source {
        let process = Process::own().unwrap();
        let first = process.maps().unwrap().next().unwrap().unwrap();
        Source {
            pid: process.pid(),
            place: Place::File(Held {
                content: Content::of_file(tempfile::tempfile().unwrap()).unwrap(),
                place: String::new(),
                mapping: first,
            }),
            process,
        }
    }

    /// Reads the numbers of this moment.
    ///
    /// Only [`Unreadable::Gone`] and [`Unreadable::Replaced`] mean that they can never be read
    /// again.
    pub fn read(&self) -> Result<Snapshot, Unreadable> {
        // The file outlives the process as long as it is open here.
        if self.process.has_ended()? {
            return Err(Unreadable::Gone);
        }
        match &self.place {
            Place::Memory(behind) => behind.snapshot(),
            Place::File(held)
                if !held.is_in_place(&self.process) && !held.is_mapped(&self.process)? =>
            {
                Err(Unreadable::Replaced)
            }
            Place::File(held) => Ok(held.read()??),
        }
    }

    /// Returns the CPU time of all the process's threads in seconds.
    pub fn cpu_seconds(&self) -> Option<f64> {
        let stat = self.process.stat().ok()?;
        let all = stat.number(14)?.saturating_add(stat.number(15)?);
        Some(all as f64 / clock_ticks_per_second() as f64)
    }

    /// Returns the process, for what else is read of it.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Returns the name of the process's program.
    pub fn name(&self) -> String {
        self.process.name().unwrap_or_default()
    }
}

/// Opens the process's own file without a name that the kernel calls `link`. A forked child may
/// have its parent's file.
pub fn memory_file(process: &Process, link: &[u8]) -> Result<Content, Unreadable> {
    let mut found = Unreadable::NotShown;
    for mapping in mapped(process, |mapping| mapping.path == link)? {
        match own_file(process, mapping) {
            Ok(Some(content)) => return Ok(content),
            Ok(None) => {}
            Err(why) => found = why,
        }
    }
    let behind = Behind::find(process)?;
    let profile = behind.map(|behind| behind.profile()).transpose()?;
    match profile.flatten() {
        Some(content) if is_own(process, &content)? => Ok(content),
        _ => Err(found),
    }
}

/// Opens the file without a name that the process has mapped. Returns `None` if it is the file of
/// another process, as of a forked child's parent.
pub fn own_file(process: &Process, mapping: Mapping) -> Result<Option<Content>, Unreadable> {
    let content = Held::open(process, mapping)?.content;
    Ok(is_own(process, &content)?.then_some(content))
}

/// Returns whether the word of 4 bytes behind the first 12 is the process's number. A child in a
/// PID namespace of its own may have its parent's number.
fn is_own(process: &Process, content: &Content) -> io::Result<bool> {
    Ok(content.read(12, 4)? == process.inner_pid()?.to_le_bytes())
}

pub fn name(pid: u32) -> String {
    let name = Process::open(pid).and_then(|process| process.name());
    name.unwrap_or_default()
}

/// A file that another process has mapped.
pub(super) struct Held {
    content: Content,
    /// The link in the process's folder that led to the file.
    place: String,
    mapping: Mapping,
}

impl Held {
    /// Opens the file of a mapping.
    fn open(process: &Process, mapping: Mapping) -> Result<Held, Unreadable> {
        let (file, place) = open(process, &mapping)?;
        Ok(Held {
            content: Content::of_file(file)?,
            place,
            mapping,
        })
    }

    fn read(&self) -> io::Result<Result<Snapshot, Refused>> {
        Snapshot::read(|at, size| self.content.read(at as u64, size))
    }

    /// Returns whether the link still leads to the file.
    fn is_in_place(&self, process: &Process) -> bool {
        let there = process.link(&self.place);
        there.is_ok_and(|there| there == self.mapping.path)
            && regular(process, &self.place, |stat| is_of(stat, &self.mapping)).is_ok()
    }

    /// Returns whether the process has mapped the file. A forked child that has replaced its
    /// parent's mapping has not, nor has a process that has started another program.
    fn is_mapped(&self, process: &Process) -> io::Result<bool> {
        for other in process.maps()? {
            if other?.is_same_file(&self.mapping) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Returns the first mappings that are wanted, one of each file.
fn mapped(
    process: &Process,
    mut is_wanted: impl FnMut(&Mapping) -> bool,
) -> io::Result<Vec<Mapping>> {
    let mut found: Vec<Mapping> = Vec::new();
    for mapping in process.maps()? {
        let mapping = mapping?;
        if mapping.is_shared()
            && is_wanted(&mapping)
            && found.len() < FILES
            && !found.iter().any(|known| known.is_same_file(&mapping))
        {
            found.push(mapping);
        }
    }
    Ok(found)
}

/// Opens the process's files without a name that the kernel calls `link`.
pub(super) fn files(process: &Process, link: &[u8]) -> Result<Vec<File>, Unreadable> {
    let mappings = mapped(process, |mapping| mapping.path == link)?;
    let opened = mappings.iter().map(|mapping| Ok(open(process, mapping)?.0));
    opened.collect()
}

/// Returns whether a file is the one of a mapping of memory.
fn is_of(stat: &Stat, mapping: &Mapping) -> bool {
    stat.st_ino == mapping.inode && (major(stat.st_dev), minor(stat.st_dev)) == mapping.device
}

/// Opens the file of a mapping. Returns the link in the process's folder that led to it, too.
fn open(process: &Process, mapping: &Mapping) -> Result<(File, String), Unreadable> {
    let place = mapping.map_file();
    let why = match regular(process, &place, |_| true) {
        Ok(file) => return Ok((file, place)),
        Err(why) => why,
    };
    let is_memory = mapping.path.starts_with(b"/memfd:");
    if !is_memory {
        return Ok((open_mapped(process, mapping).map_err(unopened)?, place));
    }
    // This user may not open mappings.
    for descriptor in process.descriptors(DESCRIPTORS)? {
        let place = format!("fd/{descriptor}");
        // A descriptor may be closed meanwhile.
        if process.link(&place).is_ok_and(|link| link == mapping.path)
            && let Ok(file) = regular(process, &place, |stat| is_of(stat, mapping))
        {
            return Ok((file, place));
        }
    }
    Err(match unopened(why) {
        Unreadable::Forbidden => Unreadable::Untraceable,
        why => why,
    })
}

fn unopened(why: Unopened) -> Unreadable {
    match why {
        Unopened::System(error) => error.into(),
        _ => Unreadable::NotShown,
    }
}

/// Returns whether a mapping may be of the segment of a process that counts every call: the file's
/// name is the process's number and a count.
fn is_counted(mapping: &Mapping, pid: u32) -> bool {
    let name = mapping.path.rsplit(|&byte| byte == b'/').next();
    let count = name.and_then(|name| {
        let at = name.iter().position(|&byte| byte == b'.')?;
        (number(&name[..at]) == Some(pid)).then_some(&name[at + 1..])
    });
    mapping.path.starts_with(b"/")
        && mapping.permissions == *b"rw-s"
        && count.is_some_and(|count| !count.is_empty() && count.iter().all(u8::is_ascii_digit))
}
