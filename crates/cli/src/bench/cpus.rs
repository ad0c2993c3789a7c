//! Where threads run.

use anyhow::{Context, Result, bail};
use std::io;

/// A set of CPUs as the kernel takes it; an array instead of `cpu_set_t`, which ends at 1024 CPUs.
type Set = [u64; pinfold_rseq::MAX_INDEX / 64];

/// The CPU that this thread runs on.
pub fn current() -> Result<usize> {
    // SAFETY: no preconditions.
    let cpu = unsafe { libc::sched_getcpu() };
    usize::try_from(cpu).context("the kernel does not say which CPU this is")
}

/// The CPUs that this thread may run on, in ascending order.
pub fn allowed() -> Result<Vec<usize>> {
    let mut set: Set = [0; pinfold_rseq::MAX_INDEX / 64];
    // SAFETY: `set` is writable for its size.
    if unsafe { libc::sched_getaffinity(0, size_of::<Set>(), set.as_mut_ptr().cast()) } != 0 {
        let error = io::Error::last_os_error();
        bail!("cannot see on which CPUs this may run: {error}; allow sched_getaffinity");
    }
    let is_in = |cpu: &usize| set[cpu / 64] >> (cpu % 64) & 1 == 1;
    Ok((0..pinfold_rseq::MAX_INDEX).filter(is_in).collect())
}

/// Keeps the calling thread, and threads that it starts from now on, on `cpu`.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set: Set = [0; pinfold_rseq::MAX_INDEX / 64];
    set[cpu / 64] |= 1 << (cpu % 64);
    // SAFETY: `set` is readable for its size.
    if unsafe { libc::sched_setaffinity(0, size_of::<Set>(), set.as_ptr().cast()) } != 0 {
        let error = io::Error::last_os_error();
        bail!("cannot keep the thread on CPU {cpu}: {error}; allow sched_setaffinity");
    }
    Ok(())
}
