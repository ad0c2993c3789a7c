//! The CPUs that threads run on.

use anyhow::{Context, Result, bail};
use pinfold::topology::{affinity, set_affinity};
use std::io;

/// Returns the CPU that this thread runs on.
///
/// # Errors
///
/// Fails if a sandbox forbids the call.
pub fn current() -> Result<usize> {
    // SAFETY: the call takes no arguments and touches no memory.
    let cpu = unsafe { libc::sched_getcpu() };
    usize::try_from(cpu).context("sched_getcpu failed; allow getcpu in the sandbox")
}

/// Returns the CPUs that this thread may run on, in ascending order.
///
/// # Errors
///
/// Fails if a sandbox forbids the call.
pub fn allowed() -> Result<Vec<usize>> {
    let Some(cpus) = affinity() else {
        let error = io::Error::last_os_error();
        bail!("cannot read which CPUs this process may use: {error}; allow sched_getaffinity");
    };
    Ok(cpus.iter().collect())
}

/// Keeps the calling thread, and threads that it starts afterwards, on `cpu`.
///
/// # Errors
///
/// Fails if the process may not use the CPU, or a sandbox forbids the call.
pub fn pin(cpu: usize) -> Result<()> {
    allow(&[cpu])
}

/// Keeps the calling thread, and threads that it starts afterwards, on `cpus`.
///
/// # Errors
///
/// Fails if the process may use none of the CPUs, or a sandbox forbids the call.
pub fn allow(cpus: &[usize]) -> Result<()> {
    if !set_affinity(&cpus.iter().copied().collect()) {
        let error = io::Error::last_os_error();
        let cpus = format!("{cpus:?}");
        let cpus = cpus.trim_matches(['[', ']']);
        bail!("cannot keep this thread on CPU {cpus}: {error}; allow sched_setaffinity");
    }
    Ok(())
}
