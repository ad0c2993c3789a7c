//! The anonymous files by which a process shows its statistics, and takes requests (`mailbox`).

use crate::sys;
use core::ffi::CStr;

/// The name of the segment's file, as `/proc/PID/fd` shows it behind `/memfd:`.
pub const FILE: &CStr = c"pinfold";
/// The name of the mark's file. The mailbox's page follows the mark's page, and the segment follows
/// the mailbox's page.
pub const MARK_FILE: &CStr = c"pinfold-mark";
/// The name of the mailbox's file.
pub const MAILBOX_FILE: &CStr = c"pinfold-mailbox";
/// The name of the file with the records of a heap profile.
pub const PROFILE_FILE: &CStr = c"pinfold-heap";
/// The seal that forbids `write` and new writable mappings, from Linux 5.1 on. The mapping that the
/// process already has stays writable.
pub const F_SEAL_FUTURE_WRITE: i32 = 0x10;
/// The seals of a segment: its size stays, and no process gets a new way to write to it.
pub const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | F_SEAL_FUTURE_WRITE;

/// Returns the time of `CLOCK_REALTIME` in milliseconds. Makes no system call where the kernel
/// offers a vDSO.
pub fn now_ms() -> u64 {
    now_ns() / 1_000_000
}

pub(super) fn now_ns() -> u64 {
    let now = pinfold_rseq::kernel::clock(libc::CLOCK_REALTIME);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns whether `vm.overcommit_memory` is 2. The kernel then enforces its commit limit, and
/// untouched pages count too.
#[doc(hidden)]
pub fn commits_strictly() -> bool {
    sys::commits_strictly()
}
