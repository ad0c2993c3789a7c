//! The machine that a measurement ran on, without anything that identifies it.

use crate::built::Built;
use crate::cycles;
use crate::subjects::{MallocApi, PinfoldMalloc};
use pinfold_rseq::{Backend, Index};
use serde::Serialize;
use std::fs;

/// What a reader needs to judge the results.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The CPU's model name.
    pub cpu: String,
    /// Number of CPUs that this process may use.
    pub cpus: usize,
    /// The processor architecture.
    pub architecture: &'static str,
    /// The kernel's release.
    pub kernel: String,
    /// The C library's version.
    pub libc: String,
    /// Ticks per second of the counter that measures cycles.
    pub tsc_hz: u64,
    /// The governor of the CPU's frequency, if the system shows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub governor: Option<String>,
    /// When the kernel uses transparent huge pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transparent_huge_pages: Option<String>,
    /// How Pinfold reaches its per-CPU memory.
    pub pinfold_backend: &'static str,
    /// How the peers were built.
    #[serde(flatten)]
    pub built: Built,
}

impl Machine {
    /// Reads the facts. Takes 50 ms where the counter does not state its rate.
    pub fn read() -> Machine {
        Machine {
            cpu: cpu_model().unwrap_or_else(|| "unknown".to_owned()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            architecture: std::env::consts::ARCH,
            kernel: line("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned()),
            libc: libc_version(),
            tsc_hz: cycles::hertz(),
            governor: line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            transparent_huge_pages: line("/sys/kernel/mm/transparent_hugepage/enabled")
                .and_then(|modes| Some(modes.split_once('[')?.1.split_once(']')?.0.to_owned())),
            pinfold_backend: backend(),
            built: Built::read(),
        }
    }

    /// Warns on standard error about whatever makes the figures unfair.
    pub fn warn(&self) {
        for warning in self.built.warnings() {
            eprintln!("{warning}");
        }
    }

    /// Formats a line for people.
    pub fn describe(&self) -> String {
        format!(
            "{}, {} CPUs, Linux {}, {}, counter {:.0} MHz, governor {}, Pinfold on {}",
            self.cpu,
            self.cpus,
            self.kernel,
            self.libc,
            self.tsc_hz as f64 / 1e6,
            self.governor.as_deref().unwrap_or("unknown"),
            self.pinfold_backend
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
    // aarch64 kernels give the numbers of the implementer and the part instead of a name.
    value("model name").or_else(|| {
        Some(format!(
            "implementer {} part {}",
            value("CPU implementer")?,
            value("CPU part")?
        ))
    })
}

fn libc_version() -> String {
    // SAFETY: glibc returns a NUL-terminated string that lives as long as the process.
    let version = unsafe { core::ffi::CStr::from_ptr(libc::gnu_get_libc_version()) };
    format!("glibc {}", version.to_string_lossy())
}

fn backend() -> &'static str {
    // The first allocation chooses the backend for the whole process.
    // SAFETY: the block came from this allocator just now, and this is its only free.
    unsafe { PinfoldMalloc::free(PinfoldMalloc::malloc(8)) };
    match pinfold_rseq::backend() {
        Backend::Rseq(Index::Cpu) => "rseq by CPU number",
        Backend::Rseq(Index::Cid) => "rseq by concurrency id",
        Backend::Atomic => "atomics",
    }
}
