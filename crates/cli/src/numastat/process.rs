//! Reads a process's pages, and makes sure that they belong to one process and one program.
//!
//! The kernel ends the file early, without an error, if the process ends or executes another
//! program meanwhile. So the process's identity is read before and after.

use super::maps::Usage;
use crate::foreign::{self, Identity, has_ended};
use crate::output::escaped;
use anyhow::{Context, Result, bail};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// How often to read again if the process executes another program meanwhile.
const TRIES: usize = 3;

/// A process whose pages are read. Another process that gets its number is never read instead.
pub struct Process {
    files: foreign::Process,
    folder: PathBuf,
}

/// What was read of one program of one process.
pub struct Maps {
    pub name: String,
    /// The content of `numa_maps`. Bytes that are no UTF-8 are replaced.
    pub text: String,
}

/// More bytes than the list of a process has that has as many mappings as Linux allows by default.
const MAX_BYTES: usize = 64 << 20;

/// What changes when the process executes a program: where its stack begins.
type Program = Option<u64>;

impl Process {
    /// Opens `proc/PID` below `root`.
    pub fn open(root: &Path, pid: u32) -> Result<Process> {
        let folder = root.join("proc").join(pid.to_string());
        let files = match foreign::Process::in_any_state(&folder, pid) {
            Err(error) if has_ended(&error) && !foreign::is_proc_there() => {
                bail!(foreign::NO_PROC)
            }
            Err(error) if has_ended(&error) => {
                bail!("there is no process {pid}, or it is hidden from this user")
            }
            other => other.with_context(|| format!("process {pid}"))?,
        };
        Ok(Process { files, folder })
    }

    /// Returns the process's files.
    pub fn files(&self) -> &foreign::Process {
        &self.files
    }

    /// Returns which process this is. Its name was read with its pages.
    pub fn identity(&self, name: String) -> Identity {
        Identity {
            name,
            ..Identity::of(&self.files)
        }
    }

    /// Reads where the process's pages lie.
    pub fn maps(&self) -> Result<Maps> {
        let pid = self.files.pid();
        for _ in 0..TRIES {
            let (name, before) = identify(&self.files)?;
            let text = numa_maps(&self.files, &self.folder)?;
            let (_, after) = identify(&self.files)?;
            if before == after {
                if text.is_empty() {
                    explain_empty(&self.files)?;
                }
                return Ok(Maps { name, text });
            }
        }
        bail!("process {pid} executed another program on each of {TRIES} reads; try again");
    }

    /// Returns the process's name, and its bytes by node.
    pub fn usage(&self) -> Result<(String, Usage)> {
        let maps = self.maps()?;
        let usage = Usage::parse(&maps.text);
        let usage = usage.with_context(|| format!("process {}", self.files.pid()))?;
        Ok((maps.name, usage))
    }
}

/// Reads the process's name, and which program it executes.
fn identify(process: &foreign::Process) -> Result<(String, Program)> {
    let pid = process.pid();
    let stat = match process.stat() {
        Err(error) if has_ended(&error) => bail!("process {pid} has ended"),
        other => other.with_context(|| format!("reading the stat of process {pid}"))?,
    };
    let name = stat
        .name()
        .with_context(|| format!("process {pid}: its stat has no name in brackets"))?;
    let name = String::from_utf8_lossy(name).into_owned();
    if stat.is_ended() {
        bail!(
            "process {pid} ({}) has ended, but its parent has not waited for it",
            escaped(&name)
        );
    }
    Ok((name, stat.number(28)))
}

fn numa_maps(process: &foreign::Process, folder: &Path) -> Result<String> {
    let pid = process.pid();
    match process.read("numa_maps", MAX_BYTES) {
        Ok(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            bail!(
                "this user may not look at process {pid}: run this as its owner, or as root (with CAP_SYS_PTRACE)"
            )
        }
        Err(error) if has_ended(&error) && process.stat().is_ok() => {
            bail!(
                "there is no {}: this kernel is built without NUMA",
                path(folder).display()
            )
        }
        Err(error) if has_ended(&error) => bail!("process {pid} has ended"),
        Err(error) => Err(error).with_context(|| path(folder).display().to_string()),
    }
}

fn path(folder: &Path) -> PathBuf {
    folder.join("numa_maps")
}

/// Explains an empty file: the process has ended or is a kernel thread. Returns `Ok` if it has
/// memory.
fn explain_empty(process: &foreign::Process) -> Result<()> {
    if process
        .status()
        .is_ok_and(|status| status.field("VmSize:").is_some())
    {
        return Ok(());
    }
    let pid = process.pid();
    bail!("process {pid} has no memory: it is a kernel thread, or it is ending")
}
