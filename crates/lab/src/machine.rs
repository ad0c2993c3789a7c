//! The machine that a measurement ran on, without anything that identifies it.

mod host;
mod primitives;

pub use host::Host;
pub use primitives::Primitives;

use crate::cycles;
use pinfold::counter::EventCounter;
use pinfold_rseq::{Backend, Index};
use serde::Serialize;
use std::{fmt, fs};

/// The facts that a reader needs to judge the results.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The CPU's model name.
    pub cpu: String,
    /// Number of CPUs that the calling thread may run on.
    pub cpus: usize,
    /// The processor architecture.
    pub architecture: &'static str,
    /// The kernel's release.
    pub kernel: String,
    /// The C library and its version.
    pub libc: String,
    /// Millions of ticks per second of the counter that measures cycles.
    pub tsc_mhz: u64,
    /// Ticks per second of that counter.
    #[serde(skip)]
    pub tsc_hz: u64,
    /// How Pinfold reaches its per-CPU memory.
    pub backend: &'static str,
    /// What the machine's primitives cost.
    pub primitives: Primitives,
}

impl Machine {
    /// Reads the facts and measures the primitives. Takes about 0.2 s.
    pub fn read() -> Machine {
        let tsc_hz = cycles::hertz();
        Machine {
            cpu: cpu_model().unwrap_or_else(|| "unknown".to_owned()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            architecture: std::env::consts::ARCH,
            kernel: line("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned()),
            libc: libc_version(),
            tsc_mhz: tsc_hz / 1_000_000,
            tsc_hz,
            backend: backend(),
            primitives: Primitives::measure(),
        }
    }

    /// Returns the facts with their names, for people.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        vec![
            ("CPU", format!("{} ({})", self.cpu, self.architecture)),
            ("CPUs that may be used", self.cpus.to_string()),
            ("kernel", format!("Linux {}", self.kernel)),
            ("C library", self.libc.clone()),
            ("counter", format!("{} MHz", self.tsc_mhz)),
            ("per-CPU memory by", self.backend.to_owned()),
            ("primitives", self.primitives.to_string()),
        ]
    }
}

/// A line for people, without the primitives.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, {} CPUs, Linux {}, ",
            self.cpu, self.cpus, self.kernel
        )?;
        write!(f, "{}, counter {} MHz, ", self.libc, self.tsc_mhz)?;
        write!(f, "Pinfold on {}", self.backend)
    }
}

/// Makes the library choose how this process numbers its CPUs' units, as the library does when it
/// first counts. Has no effect if the choice was made before. Other designs of a counter then use
/// the same numbers.
pub fn settle_index() {
    static FIRST: EventCounter = EventCounter::new();
    FIRST.inc();
    pinfold_rseq::init(Index::Cid);
}

/// Reads a file of one line.
pub fn line(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn cpu_model() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let value = |key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    // aarch64 kernels give the numbers of the implementer and the part instead of a name.
    value("model name").or_else(|| {
        Some(format!(
            "implementer {} part {}",
            value("CPU implementer")?,
            value("CPU part")?
        ))
    })
}

#[cfg(target_env = "gnu")]
fn libc_version() -> String {
    // SAFETY: glibc returns a NUL-terminated string that lives as long as the process.
    let version = unsafe { core::ffi::CStr::from_ptr(libc::gnu_get_libc_version()) };
    format!("glibc {}", version.to_string_lossy())
}

#[cfg(not(target_env = "gnu"))]
fn libc_version() -> String {
    "not glibc".to_owned()
}

fn backend() -> &'static str {
    settle_index();
    match pinfold_rseq::backend() {
        Backend::Rseq(Index::Cpu) => "rseq by CPU number",
        Backend::Rseq(Index::Cid) => "rseq by concurrency id",
        Backend::Atomic => "atomics",
    }
}
