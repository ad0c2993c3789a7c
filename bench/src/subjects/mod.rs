//! Who is measured: one trait with static dispatch, so that each loop is compiled for its subject.

mod c;
mod pinfold;

pub use c::{
    CMalloc, Glibc, Jemalloc, MallocApi, Mimalloc, PinfoldMalloc, Rpmalloc, Snmalloc, Tcmalloc,
};
pub use pinfold::PinfoldCache;

use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;

/// Something that gives and takes objects of one size, from any thread.
pub trait Subject: Send + Sync + Sized + 'static {
    /// Makes ready for objects of `size` bytes, before any round.
    fn new(size: usize) -> Result<Self>;

    /// Called by a thread before it uses the subject, any number of times, never timed.
    fn enter_thread() {}

    /// An object, or null when there is no memory.
    fn alloc(&self) -> *mut u8;

    /// Takes an object back.
    ///
    /// # Safety
    ///
    /// The object came from this subject's `alloc` and nobody uses it any more.
    unsafe fn free(&self, object: *mut u8);
}

/// The subjects by name, as the command line and the rows spell them.
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
    /// tcmalloc as it comes: glibc has the thread's rseq area, so it keeps caches per thread.
    Tcmalloc,
    /// tcmalloc in a process where glibc leaves rseq to it, so it keeps caches per CPU.
    TcmallocPercpu,
}

impl SubjectName {
    /// The name as it is printed.
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

    /// Whether it is one of Pinfold's own.
    pub fn is_pinfold(self) -> bool {
        matches!(self, SubjectName::PinfoldCache | SubjectName::PinfoldMalloc)
    }

    /// What its process has to be started with: a name and a value for the environment.
    pub fn environment(self) -> Option<(&'static str, &'static str)> {
        (self == SubjectName::TcmallocPercpu).then_some(("GLIBC_TUNABLES", "glibc.pthread.rseq=0"))
    }
}

impl std::fmt::Display for SubjectName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Whether tcmalloc keeps its caches per CPU in this process.
pub fn tcmalloc_is_percpu() -> bool {
    c::tcmalloc_is_percpu()
}
