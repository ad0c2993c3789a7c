//! Finds the heap profiles of processes.

use super::naming::Subject;
use crate::foreign::{Content, Mapping, Process};
use crate::live::{Source, Unreadable, memory_file, own_file};
use anyhow::{Context, Result, bail};
use pinfold::internal::profile::{BYTES, Head};
use pinfold_pprof::internal::raw::{Raw, mapped};
use std::io::{self, ErrorKind};
use std::mem::offset_of;

/// How the kernel names the file of a running process.
const LINK: &[u8] = b"/memfd:pinfold-heap (deleted)";

/// Reads the profile of a running process, and says whose files its mappings are of.
pub fn of_process(pid: u32) -> Result<(Raw, Subject)> {
    let process = || format!("process {pid}");
    let open = || Process::open(pid).map_err(Unreadable::from);
    let observed = open().with_context(process)?;
    let content = match memory_file(&observed, LINK) {
        Ok(content) => content,
        Err(Unreadable::NotShown) => {
            // A process that is not on Pinfold cannot start one.
            if let Err(why @ Unreadable::NotShown) = Source::open(pid) {
                return Err(why).with_context(process);
            }
            bail!(
                "{}: it has no heap profile; start one with `pinfold heap start {pid}`, or start the program with `pinfold run --heap`",
                process()
            )
        }
        Err(error) => return Err(error).with_context(process),
    };
    let bytes = read_between_looks(&content).with_context(process)?;
    let maps = observed.maps().map_err(Unreadable::from);
    let (program, mappings) = mapped(maps.with_context(process)?).with_context(process)?;
    let mut raw = Raw::parse(&bytes).with_context(process)?;
    raw.pid = pid;
    raw.program = observed.name().unwrap_or(program);
    raw.mappings = mappings;
    let subject = Subject::Process {
        pid,
        started: observed.started(),
    };
    Ok((raw, subject))
}

/// Reads a profile. Reads it again if the process has begun or ended a look at its slabs meanwhile.
/// If that happens each time, the profile does not say who keeps free bytes.
fn read_between_looks(content: &Content) -> io::Result<Vec<u8>> {
    const LOOKS: usize = offset_of!(Head, weighed);
    let number = LOOKS..LOOKS + 4;
    let mut bytes = Vec::new();
    for _ in 0..3 {
        bytes = content.read(0, BYTES)?;
        if bytes.get(number.clone()) == Some(&content.read(LOOKS as u64, 4)?) {
            return Ok(bytes);
        }
    }
    if let Some(number) = bytes.get_mut(number) {
        number.fill(0);
    }
    Ok(bytes)
}

/// The profile of a process that may end at any time.
///
/// The profile's numbers lie in a file without a name, so they can be read as long as the file is
/// open here, also after the process has ended. The mappings end with the process, so they are
/// read before.
pub struct Kept {
    process: Process,
    content: Content,
    file: Mapping,
    program: String,
    mappings: Vec<Mapping>,
}

impl Kept {
    /// Opens the profile of a process. Returns `None` if the process has none in a file of its own,
    /// as a forked child that has not started another program.
    pub fn of(process: Process) -> Option<Kept> {
        let Ok(Some((file, program, mappings))) = executable(&process) else {
            return None;
        };
        let content = own_file(&process, file.clone()).ok()??;
        Some(Kept {
            process,
            content,
            file,
            program,
            mappings,
        })
    }

    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Reads the mappings of the process again. Returns false if it has started another program.
    /// If the process has ended, the mappings stay.
    pub fn refresh(&mut self) -> bool {
        match executable(&self.process) {
            Ok(Some((file, program, mappings))) if file.is_same_file(&self.file) => {
                (self.program, self.mappings) = (program, mappings);
                true
            }
            Ok(_) => false,
            Err(_) => true,
        }
    }

    pub fn raw(&self) -> Result<Raw> {
        let mut raw = Raw::parse(&self.content.read(0, BYTES)?)?;
        raw.pid = self.process.pid();
        raw.program.clone_from(&self.program);
        raw.mappings.clone_from(&self.mappings);
        Ok(raw)
    }
}

/// Returns the mapping of a process's profile, the program's name, and the mappings that can hold
/// functions. Returns `None` if the process has no profile in a file.
fn executable(process: &Process) -> io::Result<Option<(Mapping, String, Vec<Mapping>)>> {
    let mut file = None;
    let maps = process.maps()?.inspect(|mapping| {
        if let Ok(mapping) = mapping
            && mapping.is_shared()
            && mapping.path == LINK
        {
            file.get_or_insert_with(|| mapping.clone());
        }
    });
    let (program, mappings) = mapped(maps)?;
    // The kernel ends the list early, without an error, if the process ends meanwhile.
    match process.maps()?.next() {
        Some(Ok(_)) => Ok(file.map(|file| (file, program, mappings))),
        _ => Err(ErrorKind::NotFound.into()),
    }
}
