//! What the figures were measured on. Nothing that names the machine itself.

use super::cycles;
use pinfold_rseq::{Backend, Index};
use serde::Serialize;
use std::fs;

/// What a reader needs to judge the figures.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The CPU's model name.
    pub cpu: String,
    /// CPUs that the calling thread may run on.
    pub cpus: usize,
    /// The processor architecture.
    pub architecture: &'static str,
    /// The kernel's release.
    pub kernel: String,
    /// The C library and its version.
    pub libc: String,
    /// Millions of ticks a second of the counter that cycles are read from.
    pub tsc_mhz: u64,
    /// How Pinfold reaches its per-CPU memory.
    pub backend: &'static str,
}

impl Machine {
    /// Looks around. Takes 50 ms where the counter does not say its rate.
    pub fn read() -> Machine {
        Machine {
            cpu: cpu_model().unwrap_or_else(|| "unknown".to_owned()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            architecture: std::env::consts::ARCH,
            kernel: line("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned()),
            libc: libc_version(),
            tsc_mhz: cycles::hertz() / 1_000_000,
            backend: backend(),
        }
    }

    /// A line for people.
    pub fn describe(&self) -> String {
        format!(
            "{}, {} CPUs, Linux {}, {}, counter {} MHz, Pinfold on {}",
            self.cpu, self.cpus, self.kernel, self.libc, self.tsc_mhz, self.backend
        )
    }
}

fn line(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn cpu_model() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let value = |key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    // aarch64 kernels give the implementer's and the part's number instead of a name.
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
    // SAFETY: glibc returns a string that lives as long as the process.
    let version = unsafe { core::ffi::CStr::from_ptr(libc::gnu_get_libc_version()) };
    format!("glibc {}", version.to_string_lossy())
}

#[cfg(not(target_env = "gnu"))]
fn libc_version() -> String {
    "not glibc".to_owned()
}

fn backend() -> &'static str {
    // What a measurement has chosen stays; without one, what the library would choose.
    match pinfold_rseq::init(Index::Cid) {
        Backend::Rseq(Index::Cpu) => "rseq by CPU number",
        Backend::Rseq(Index::Cid) => "rseq by concurrency id",
        Backend::Atomic => "atomics",
    }
}
