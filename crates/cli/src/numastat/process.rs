//! Reads a process's pages, and makes sure that they belong to one process and one program.
//!
//! The kernel ends the file early, without an error, if the process ends or executes another
//! program meanwhile. So the process's identity is read before and after.

use super::maps::Usage;
use anyhow::{Context, Result, bail};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// How often to read again if the process executes another program meanwhile.
const TRIES: usize = 3;

pub struct Process {
    pub pid: u32,
    pub name: String,
    pub usage: Usage,
}

/// What changes when another process gets the number, or when the process executes a program.
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
        bail!("process {pid} executed another program on each of {TRIES} reads; try again");
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

/// Reads the process's name and identity from `stat`: `number (name) state …`. The name may hold
/// any characters.
fn identify(folder: &Path, pid: u32) -> Result<(String, Identity)> {
    let stat = match fs::read(folder.join("stat")) {
        Ok(stat) => String::from_utf8_lossy(&stat).into_owned(),
        Err(error) if is_gone(&error) => {
            bail!("there is no process {pid}, or it is hidden from this user")
        }
        Err(error) => {
            return Err(error).with_context(|| format!("reading the stat of process {pid}"));
        }
    };
    let parts = stat
        .split_once('(')
        .and_then(|(_, rest)| rest.rsplit_once(')'));
    let (name, rest) =
        parts.with_context(|| format!("process {pid}: its stat has no name in brackets"))?;
    let words: Vec<&str> = rest.split_ascii_whitespace().collect();
    // Fields are numbered from 1, which is the process id. The state is field 3.
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
            "process {pid} ({}) has ended, but its parent has not waited for it",
            printable(name)
        );
    }
    Ok((name.to_owned(), identity))
}

/// Escapes a process's name for a terminal.
pub fn printable(name: &str) -> String {
    name.escape_debug().to_string()
}

fn numa_maps(folder: &Path, pid: u32) -> Result<String> {
    match fs::read(folder.join("numa_maps")) {
        Ok(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            bail!(
                "this user may not look at process {pid}: run this as its owner, or as root (with CAP_SYS_PTRACE)"
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

/// Returns whether the process is gone. `ESRCH` means that it ended while its file was open.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Explains an empty file: the process has ended or is a kernel thread. Returns `Ok` if it has
/// memory.
fn explain_empty(folder: &Path, pid: u32) -> Result<()> {
    let status = fs::read_to_string(folder.join("status")).unwrap_or_default();
    if status.lines().any(|line| line.starts_with("VmSize:")) {
        return Ok(());
    }
    bail!("process {pid} has no memory: it is a kernel thread, or it is ending")
}
