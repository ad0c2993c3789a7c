//! What the figures were measured on. Nothing that names the machine itself.

use crate::cycles;
use pinfold_rseq::{Backend, Index};
use serde::Serialize;
use std::fs;

/// What a reader needs to judge the figures.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The CPU's model name.
    pub cpu: String,
    /// CPUs that this process may run on.
    pub cpus: usize,
    /// The processor architecture.
    pub architecture: &'static str,
    /// The kernel's release.
    pub kernel: String,
    /// The C library's version.
    pub libc: String,
    /// Ticks a second of the counter that cycles are read from.
    pub tsc_hz: u64,
    /// How the CPU's frequency is governed, where that can be seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub governor: Option<String>,
    /// When the kernel uses transparent huge pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transparent_huge_pages: Option<String>,
    /// How Pinfold reached its per-CPU memory in this process.
    pub pinfold_backend: &'static str,
    /// The compilers whose objects are in this program.
    pub compilers: Vec<String>,
}

impl Machine {
    /// Looks around; last in a run, when Pinfold's backend has been chosen.
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
            compilers: compilers().unwrap_or_default(),
        }
    }

    /// Whether no part was compiled by clang, which snmalloc needs for its speed.
    pub fn lacks_clang(&self) -> bool {
        !self.compilers.iter().any(|name| name.contains("clang"))
    }

    /// A line for people.
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
    // aarch64 kernels give the implementer's and the part's number instead of a name.
    value("model name").or_else(|| {
        Some(format!(
            "implementer {} part {}",
            value("CPU implementer")?,
            value("CPU part")?
        ))
    })
}

fn libc_version() -> String {
    // SAFETY: glibc returns a string that lives as long as the process.
    let version = unsafe { core::ffi::CStr::from_ptr(libc::gnu_get_libc_version()) };
    format!("glibc {}", version.to_string_lossy())
}

fn backend() -> &'static str {
    match pinfold_rseq::backend() {
        _ if !pinfold_rseq::decided() => "nothing yet",
        Backend::Rseq(Index::Cpu) => "rseq by CPU number",
        Backend::Rseq(Index::Cid) => "rseq by concurrency id",
        Backend::Atomic => "atomics",
    }
}

/// The lines that compilers leave in a program's `.comment` section: what the peers were really built with, whatever
/// the environment says now.
fn compilers() -> Option<Vec<String>> {
    let program = fs::read("/proc/self/exe").ok()?;
    let section = comment_section(&program)?;
    let mut names: Vec<_> = section
        .split(|&byte| byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .filter(|name| !name.starts_with("Linker"))
        .collect();
    names.sort_unstable();
    names.dedup();
    Some(names)
}

/// Finds `.comment` in a little-endian 64-bit ELF file: section headers at e_shoff (40), their size, number and the one
/// with the names at 58, 60 and 62; in a header the name's offset at 0, the contents' offset and size at 24 and 32.
fn comment_section(elf: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| Some(usize::from(u16::from_le_bytes(bytes(elf, at)?)));
    let long = |at: usize| usize::try_from(u64::from_le_bytes(bytes(elf, at)?)).ok();
    let (table, size, count, names) = (long(40)?, word(58)?, word(60)?, word(62)?);
    let header = |index: usize| table.checked_add(index * size);
    let names = elf.get(long(header(names)? + 24)?..)?;
    for index in 0..count {
        let header = header(index)?;
        let name = u32::from_le_bytes(bytes(elf, header)?) as usize;
        if names.get(name..)?.starts_with(b".comment\0") {
            let (at, length) = (long(header + 24)?, long(header + 32)?);
            return elf.get(at..)?.get(..length);
        }
    }
    None
}

fn bytes<const N: usize>(from: &[u8], at: usize) -> Option<[u8; N]> {
    from.get(at..)?.get(..N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_says_its_compiler() {
        let compilers = compilers().expect("an ELF file with section headers");
        assert!(
            compilers.iter().any(|name| name.contains("rustc")),
            "{compilers:?}"
        );
    }

    #[test]
    fn no_elf_file_is_no_trouble() {
        assert_eq!(comment_section(b""), None);
        assert_eq!(comment_section(&[0xff; 100]), None);
    }
}
