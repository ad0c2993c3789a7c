//! Which process is meant, in what the command prints for programs.

use super::{Process, system_fields};
use rustix::param::clock_ticks_per_second;
use serde::Serialize;
use std::path::Path;

/// The bytes of a command line that are read.
const COMMAND: usize = 256;

/// A process. docs/json.md says what the fields mean.
#[derive(Clone, Debug, Serialize)]
pub struct Identity {
    pub pid: u32,
    /// The name of the program.
    pub name: String,
    /// The beginning of the command line. `None` if it is not shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// When the process was started, since the epoch. `None` if that is not known. A number and
    /// this time together belong to one process only.
    pub started_seconds: Option<f64>,
}

impl Identity {
    /// Returns what is known of a process by its number and name alone.
    pub fn named(pid: u32, name: String) -> Identity {
        Identity {
            pid,
            name,
            command: None,
            started_seconds: None,
        }
    }

    /// Returns whether both are the same process, and not two that had the number one after the
    /// other.
    pub fn is(&self, other: &Identity) -> bool {
        (self.pid, self.started_seconds) == (other.pid, other.started_seconds)
    }

    /// Reads what a process calls itself. What cannot be read is empty.
    pub fn of(process: &Process) -> Identity {
        Identity {
            command: Some(process.command(COMMAND)),
            started_seconds: process.start_seconds(),
            ..Identity::named(process.pid(), process.name().unwrap_or_default())
        }
    }

    /// Reads what the process with this number calls itself.
    pub fn of_pid(pid: u32) -> Identity {
        match Process::open(pid) {
            Ok(process) => Identity::of(&process),
            Err(_) => Identity::named(pid, String::new()),
        }
    }
}

impl Process {
    /// Returns the first `most` bytes of the process's command line, with spaces between the words
    /// and instead of control characters.
    pub fn command(&self, most: usize) -> String {
        let bytes = self.read_start("cmdline", most).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes).replace(char::is_control, " ");
        text.trim_end().to_owned()
    }

    /// Returns when the process was started, in seconds since the epoch. Returns `None` if the
    /// kernel does not say when it was started itself.
    pub fn start_seconds(&self) -> Option<f64> {
        let boot = system_fields(Path::new("/proc/stat"))
            .ok()?
            .number("btime ")?;
        let started = match self.started() {
            0 => self.stat().ok()?.started().ok()?,
            started => started,
        };
        Some(boot as f64 + started as f64 / clock_ticks_per_second() as f64)
    }
}
