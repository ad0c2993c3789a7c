//! A process's pages, read so that they are one process's, and of one program.
//!
//! The kernel ends the file early, without an error, when the process ends or executes another program meanwhile. So what it is is looked at
//! before and after.

use super::maps::Usage;
use anyhow::{Context, Result, bail};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// How often a process may execute another program while it is read.
const TRIES: usize = 3;

pub struct Process {
    pub pid: u32,
    pub name: String,
    pub usage: Usage,
}

/// What changes when a number is another process's, or the process another program.
#[derive(PartialEq, Eq)]
struct Identity {
    state: String,
    started: String,
    stack: String,
}

impl Process {
    /// Reads `proc/PID` below `root`.
    pub fn read(root: &Path, pid: u32) -> Result<Process> {
        let folder = root.join("proc").join(pid.to_string());
        for _ in 0..TRIES {
            let (name, before) = identify(&folder, pid)?;
            let text = numa_maps(&folder, pid)?;
            let (_, after) = identify(&folder, pid)?;
            if before.same_program(&after) {
                if text.is_empty() {
                    explain_empty(&folder, pid)?;
                }
                let usage = Usage::parse(&text).with_context(|| format!("process {pid}"))?;
                return Ok(Process { pid, name, usage });
            }
            if before.started != after.started {
                bail!("process {pid} has ended");
            }
        }
        bail!("process {pid} executes one program after the other; try again");
    }
}

impl Identity {
    fn same_program(&self, other: &Identity) -> bool {
        self.started == other.started && self.stack == other.stack
    }

    fn has_ended(&self) -> bool {
        ["Z", "X", "x"].contains(&self.state.as_str())
    }
}

/// The process's name and what it is, from `stat`: `number (name) state …`, with whatever characters in the name.
fn identify(folder: &Path, pid: u32) -> Result<(String, Identity)> {
    let stat = match fs::read(folder.join("stat")) {
        Ok(stat) => String::from_utf8_lossy(&stat).into_owned(),
        Err(error) if is_gone(&error) => {
            bail!("there is no process {pid}, or it is hidden from this user")
        }
        Err(error) => return Err(error).with_context(|| format!("process {pid}")),
    };
    let parts = stat
        .split_once('(')
        .and_then(|(_, rest)| rest.rsplit_once(')'));
    let (name, rest) = parts.with_context(|| format!("process {pid}: stat makes no sense"))?;
    let words: Vec<&str> = rest.split_ascii_whitespace().collect();
    // Numbered from 1 for the process's number; the state is the third.
    let word = |number: usize| {
        words
            .get(number - 3)
            .copied()
            .unwrap_or_default()
            .to_owned()
    };
    let identity = Identity {
        state: word(3),
        started: word(22),
        stack: word(28),
    };
    if identity.has_ended() {
        bail!(
            "process {pid} ({}) has ended; its parent has not looked yet",
            printable(name)
        );
    }
    Ok((name.to_owned(), identity))
}

/// A process's name as a terminal may see it.
pub fn printable(name: &str) -> String {
    name.escape_debug().to_string()
}

fn numa_maps(folder: &Path, pid: u32) -> Result<String> {
    match fs::read(folder.join("numa_maps")) {
        Ok(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            bail!(
                "process {pid} is not this user's to look at: run this as its owner, or as root (with CAP_SYS_PTRACE)"
            )
        }
        Err(error) if is_gone(&error) && folder.exists() => {
            bail!(
                "there is no {}: this kernel is built without NUMA",
                path(folder).display()
            )
        }
        Err(error) if is_gone(&error) => bail!("process {pid} has ended"),
        Err(error) => Err(error).with_context(|| path(folder).display().to_string()),
    }
}

fn path(folder: &Path) -> PathBuf {
    folder.join("numa_maps")
}

/// `ESRCH` is for a process that ended with its file open.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// A process without mappings has ended, or is a thread of the kernel's.
fn explain_empty(folder: &Path, pid: u32) -> Result<()> {
    let status = fs::read_to_string(folder.join("status")).unwrap_or_default();
    if status.lines().any(|line| line.starts_with("VmSize:")) {
        return Ok(());
    }
    bail!("process {pid} has no memory of its own: a thread of the kernel's, or one that is ending")
}
