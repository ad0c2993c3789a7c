//! The CPUs that threads run on.

use anyhow::{Context, Result, bail};
use std::io;

/// A set of CPUs as the kernel takes it. An array, because `cpu_set_t` ends at 1024 CPUs.
type Set = [u64; pinfold_rseq::MAX_INDEX / 64];

/// Returns the CPU that this thread runs on.
pub fn current() -> Result<usize> {
    // SAFETY: the call takes no arguments and touches no memory.
    let cpu = unsafe { libc::sched_getcpu() };
    usize::try_from(cpu).context("sched_getcpu failed; allow getcpu in the sandbox")
}

/// Returns the CPUs that this thread may run on, in ascending order.
pub fn allowed() -> Result<Vec<usize>> {
    let mut set: Set = [0; pinfold_rseq::MAX_INDEX / 64];
    // SAFETY: the kernel writes at most `size_of::<Set>()` bytes, all of them inside `set`.
    if unsafe { libc::sched_getaffinity(0, size_of::<Set>(), set.as_mut_ptr().cast()) } != 0 {
        let error = io::Error::last_os_error();
        bail!("cannot read which CPUs this process may use: {error}; allow sched_getaffinity");
    }
    let is_in = |cpu: &usize| set[cpu / 64] >> (cpu % 64) & 1 == 1;
    Ok((0..pinfold_rseq::MAX_INDEX).filter(is_in).collect())
}

/// Keeps the calling thread, and threads that it starts afterwards, on `cpu`.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set: Set = [0; pinfold_rseq::MAX_INDEX / 64];
    set[cpu / 64] |= 1 << (cpu % 64);
    // SAFETY: the kernel reads `size_of::<Set>()` bytes, all of them inside `set`.
    if unsafe { libc::sched_setaffinity(0, size_of::<Set>(), set.as_ptr().cast()) } != 0 {
        let error = io::Error::last_os_error();
        bail!("cannot keep this thread on CPU {cpu}: {error}; allow sched_setaffinity");
    }
    Ok(())
}
