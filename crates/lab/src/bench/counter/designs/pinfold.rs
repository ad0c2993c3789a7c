//! `pinfold`, `pinfold-batch` and `pinfold-shared`: Pinfold's counter with a large drift, with the
//! same batch as the other designs, and in shared memory.

use super::Design;
use crate::bench::counter::workers::PAGES;
use anyhow::{Context, Result, ensure};
use pinfold::counter::{PerCpuCounter, SharedCounters};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

impl Design for PerCpuCounter {
    #[inline(always)]
    fn add(&self, n: i64) {
        PerCpuCounter::add(self, n);
    }

    fn sum(&self) -> i64 {
        PerCpuCounter::sum(self)
    }

    fn error_bound(&self) -> Option<u64> {
        Some(PerCpuCounter::error_bound(self))
    }
}

impl Design for SharedCounters {
    #[inline(always)]
    fn add(&self, n: i64) {
        SharedCounters::add(self, 0, n);
    }

    fn sum(&self) -> i64 {
        // Counter 0 always exists.
        SharedCounters::sum(self, 0).unwrap_or(0)
    }

    fn error_bound(&self) -> Option<u64> {
        // A read is off by what is added during the read.
        Some(0)
    }
}

/// Makes a counter in a file in memory.
pub fn in_shared() -> Result<SharedCounters> {
    // SAFETY: the name ends with a zero byte.
    let fd = unsafe { libc::memfd_create(c"pinfold-bench".as_ptr(), libc::MFD_CLOEXEC) };
    ensure!(
        fd >= 0,
        "making a file in memory: {}",
        std::io::Error::last_os_error()
    );
    // SAFETY: the descriptor is new, so this value alone owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    SharedCounters::in_shared(fd.as_raw_fd(), 1).context("cannot make a counter in shared memory")
}

/// Returns how far `pinfold`'s cheap reads may be off, in pages: 64 mappings of the loop for each
/// possible CPU.
///
/// With this drift a CPU folds after some mappings.
pub fn max_drift() -> u64 {
    64 * PAGES as u64 * pinfold_rseq::possible() as u64
}

/// Returns the largest batch that `pinfold` may choose: a read is off by at most four batches for
/// each CPU.
pub fn largest_batch() -> i64 {
    (max_drift() / 4 / pinfold_rseq::possible() as u64) as i64
}

pub fn with_max_drift() -> PerCpuCounter {
    PerCpuCounter::new().with_max_drift(max_drift())
}
