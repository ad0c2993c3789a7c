//! The C API of guarded blocks.

use super::heap::{answer, started};
use crate::guard;
use core::ffi::c_int;

/// Guards some blocks from now on. Returns 0, or -1 with EINVAL, ENOMEM or EBUSY.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_guard_start(interval: u64) -> c_int {
    started(interval, guard::start)
}

/// Guards no further blocks. Returns 0, or -1 with EBUSY.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_guard_stop() -> c_int {
    answer(guard::stop(), libc::EBUSY)
}
