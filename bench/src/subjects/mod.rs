//! The subjects: their names, and the C functions of the peers.

mod c;

pub use c::{Glibc, Jemalloc, Mimalloc, Rpmalloc, Snmalloc, Tcmalloc};

use clap::ValueEnum;
use serde::Serialize;

/// The subjects. The command line and the rows use these names.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SubjectName {
    /// `KmemCache`, inlined.
    PinfoldCache,
    /// `pinfold_malloc` and `pinfold_free`.
    PinfoldMalloc,
    /// `mi_malloc` and `mi_free`.
    Mimalloc,
    /// jemalloc's `malloc` and `free`, prefixed.
    Jemalloc,
    /// `sn_malloc` and `sn_free`.
    Snmalloc,
    /// `rpmalloc` and `rpfree`.
    Rpmalloc,
    /// `__libc_malloc` and `__libc_free`.
    Glibc,
    /// tcmalloc by default: glibc owns the thread's rseq area, so tcmalloc keeps caches per thread.
    Tcmalloc,
    /// tcmalloc in a process where glibc leaves rseq to it, so that tcmalloc keeps caches per CPU.
    TcmallocPercpu,
}

impl SubjectName {
    /// Returns the printed name.
    pub fn name(self) -> &'static str {
        match self {
            SubjectName::PinfoldCache => "pinfold-cache",
            SubjectName::PinfoldMalloc => "pinfold-malloc",
            SubjectName::Mimalloc => "mimalloc",
            SubjectName::Jemalloc => "jemalloc",
            SubjectName::Snmalloc => "snmalloc",
            SubjectName::Rpmalloc => "rpmalloc",
            SubjectName::Glibc => "glibc",
            SubjectName::Tcmalloc => "tcmalloc",
            SubjectName::TcmallocPercpu => "tcmalloc-percpu",
        }
    }

    /// Returns whether the subject is one of Pinfold's own.
    pub fn is_pinfold(self) -> bool {
        matches!(self, SubjectName::PinfoldCache | SubjectName::PinfoldMalloc)
    }

    /// Returns the environment variable that the subject's process must be started with, and its
    /// value.
    pub fn environment(self) -> Option<(&'static str, &'static str)> {
        (self == SubjectName::TcmallocPercpu).then_some(("GLIBC_TUNABLES", "glibc.pthread.rseq=0"))
    }
}

impl std::fmt::Display for SubjectName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Returns whether tcmalloc keeps its caches per CPU in this process.
pub fn tcmalloc_is_percpu() -> bool {
    c::tcmalloc_is_percpu()
}
