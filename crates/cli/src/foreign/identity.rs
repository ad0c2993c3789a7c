//! Which process is meant, in what the command prints for programs.

use super::{Process, system_fields};
use rustix::param::clock_ticks_per_second;
use serde::Serialize;
use std::ffi::{OsStr, OsString};
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
    /// When the process was started, since the epoch. `None` if that is not known.
    pub started_seconds: Option<f64>,
    /// The same in the kernel's ticks since the machine's start, which do not change when the clock
    /// is set. A PID and these ticks together belong to one process only.
    pub started_ticks: Option<u64>,
}

impl Identity {
    /// Returns what is known of a child that was just started by these words.
    pub fn of_child(pid: u32, words: &[OsString]) -> Identity {
        let name = words.first().map_or(OsStr::new(""), OsString::as_os_str);
        let name = Path::new(name).file_name().unwrap_or(name);
        let words = words.iter().map(|word| word.to_string_lossy());
        let command = words.collect::<Vec<_>>().join(" ");
        let command = &command.as_bytes()[..command.len().min(COMMAND)];
        let process = Process::open(pid).ok();
        Identity {
            command: Some(String::from_utf8_lossy(command).into_owned()),
            started_seconds: process.as_ref().and_then(Process::start_seconds),
            started_ticks: process.as_ref().and_then(Process::start_ticks),
            ..Identity::named(pid, name.to_string_lossy().into_owned())
        }
    }

    /// Returns what is known of a process by its number and name alone.
    pub fn named(pid: u32, name: String) -> Identity {
        Identity {
            pid,
            name,
            command: None,
            started_seconds: None,
            started_ticks: None,
        }
    }

    /// Returns whether both are the same process, and not two that had the number one after the
    /// other.
    pub fn is(&self, other: &Identity) -> bool {
        (self.pid, self.started_ticks) == (other.pid, other.started_ticks)
    }

    /// Reads what a process calls itself. What cannot be read is empty.
    pub fn of(process: &Process) -> Identity {
        Identity {
            command: Some(process.command(COMMAND)),
            started_seconds: process.start_seconds(),
            started_ticks: process.start_ticks(),
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
        Some(boot as f64 + self.start_ticks()? as f64 / clock_ticks_per_second() as f64)
    }

    /// Returns when the process was started, in the kernel's ticks.
    pub fn start_ticks(&self) -> Option<u64> {
        match self.started() {
            0 => self.stat().ok()?.started().ok(),
            started => Some(started),
        }
    }
}
