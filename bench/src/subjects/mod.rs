//! The subjects: their names, and the C functions of the peers.

mod c;

pub use c::{Glibc, Jemalloc, Mimalloc, Rpmalloc, Snmalloc, Tcmalloc, tcmalloc_is_percpu};

pinfold_lab::names! {
    /// The subjects. The command line and the rows use these names.
    pub enum SubjectName {
        /// `KmemCache`, inlined.
        PinfoldCache = "pinfold-cache",
        /// `pinfold_malloc` and `pinfold_free`.
        PinfoldMalloc = "pinfold-malloc",
        /// `mi_malloc` and `mi_free`.
        Mimalloc = "mimalloc",
        /// jemalloc's `malloc` and `free`, prefixed.
        Jemalloc = "jemalloc",
        /// `sn_malloc` and `sn_free`.
        Snmalloc = "snmalloc",
        /// `rpmalloc` and `rpfree`.
        Rpmalloc = "rpmalloc",
        /// `__libc_malloc` and `__libc_free`.
        Glibc = "glibc",
        /// tcmalloc by default: glibc owns the thread's rseq area, so tcmalloc keeps caches per
        /// thread.
        Tcmalloc = "tcmalloc",
        /// tcmalloc in a process where glibc leaves rseq to it, so that tcmalloc keeps caches per
        /// CPU.
        TcmallocPercpu = "tcmalloc-percpu",
    }
}

impl SubjectName {
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
