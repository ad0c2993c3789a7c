//! The CPUs that a thread may run on. For Pinfold's own command and tests too.

use super::CpuSet;

/// Returns the CPUs that the calling thread may run on; `None` if the kernel does not say. `errno`
/// then has the reason.
pub fn affinity() -> Option<CpuSet> {
    affinity_of(0)
}

/// Returns the CPUs that the thread with this id may run on, as [`affinity`] does. 0 is the calling
/// thread.
pub(crate) fn affinity_of(thread: libc::pid_t) -> Option<CpuSet> {
    let mut set = CpuSet::default();
    let size = size_of_val(&set.words);
    // SAFETY: the kernel writes at most `size` bytes, which is the size of the mask.
    let got = unsafe {
        libc::syscall(
            libc::SYS_sched_getaffinity,
            thread,
            size,
            set.words.as_mut_ptr(),
        )
    };
    (got > 0).then_some(set)
}

/// Makes the calling thread, and threads that it starts afterwards, run on `cpus` only. Returns
/// false if the kernel refuses, for example because none of these CPUs is online and allowed.
/// `errno` then has the reason.
pub fn set_affinity(cpus: &CpuSet) -> bool {
    let size = size_of_val(&cpus.words);
    // SAFETY: the kernel reads at most `size` bytes, which is the size of the mask.
    unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size, cpus.words.as_ptr()) == 0 }
}
