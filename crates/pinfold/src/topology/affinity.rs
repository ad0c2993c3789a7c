//! The CPUs that a thread may run on. For Pinfold's own command and tests too.

use super::CpuSet;
use pinfold_rseq::syscall;

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
    let arguments = [thread as usize, size, set.words.as_mut_ptr() as usize];
    // SAFETY: the kernel writes at most `size` bytes, which is the size of the mask.
    let got = unsafe { syscall(libc::SYS_sched_getaffinity, arguments) };
    got.map_err(set_errno).ok().map(|_| set)
}

/// Makes the calling thread, and threads that it starts afterwards, run on `cpus` only. Returns
/// false if the kernel refuses, for example because none of these CPUs is online and allowed.
/// `errno` then has the reason.
pub fn set_affinity(cpus: &CpuSet) -> bool {
    let size = size_of_val(&cpus.words);
    let arguments = [0, size, cpus.words.as_ptr() as usize];
    // SAFETY: the kernel reads at most `size` bytes, which is the size of the mask.
    let done = unsafe { syscall(libc::SYS_sched_setaffinity, arguments) };
    done.map_err(set_errno).is_ok()
}

fn set_errno(errno: libc::c_int) {
    // SAFETY: the C library returns the address of the calling thread's errno.
    unsafe { *libc::__errno_location() = errno };
}
