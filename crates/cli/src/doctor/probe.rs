//! Facts that only a system call tells. Each probe asks and changes nothing.
#![allow(unsafe_code, reason = "asks the kernel and the C library directly")]

use pinfold_rseq::abi;
use std::io::Error;

/// Checks that the kernel offers `rseq`: an `Err` is the error number.
pub fn rseq_call() -> Result<(), i32> {
    // SAFETY: the kernel refuses an area of size 0 at address 0 before it registers anything.
    let answer = unsafe { libc::syscall(libc::SYS_rseq, 0usize, 0, 0, 0) };
    match Error::last_os_error().raw_os_error() {
        // The arguments are wrong on purpose: EINVAL means that the kernel has the call.
        Some(libc::EINVAL) if answer < 0 => Ok(()),
        Some(errno) if answer < 0 => Err(errno),
        _ => Ok(()),
    }
}

/// Checks that the kernel offers the fence of restartable sequences: an `Err` is the error number,
/// or 0 if `membarrier` exists without this fence.
pub fn fence() -> Result<(), i32> {
    const NEEDED: libc::c_long = (abi::MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ
        | abi::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_RSEQ)
        as libc::c_long;
    // SAFETY: the query takes three integers and touches no memory of this process.
    let commands = unsafe { libc::syscall(libc::SYS_membarrier, abi::MEMBARRIER_CMD_QUERY, 0, 0) };
    if commands < 0 {
        return Err(Error::last_os_error().raw_os_error().unwrap_or(0));
    }
    if commands & NEEDED == NEEDED {
        Ok(())
    } else {
        Err(0)
    }
}

/// Returns the bytes of the rseq area that the kernel maintains, or 0 before Linux 6.3.
pub fn feature_size() -> usize {
    // SAFETY: `getauxval` only reads the auxiliary vector.
    let size = unsafe { libc::getauxval(abi::AT_RSEQ_FEATURE_SIZE) };
    usize::try_from(size).unwrap_or(0)
}
