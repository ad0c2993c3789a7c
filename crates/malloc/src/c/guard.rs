//! The C API of guarded blocks.

use super::heap::answer;
use crate::guard::{self, MAX_INTERVAL};
use core::ffi::c_int;
use pinfold::internal::heap;

/// Guards some blocks from now on. Returns 0, or -1 with EINVAL, ENOMEM or EBUSY.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_guard_start(interval: u64) -> c_int {
    if !(1..=MAX_INTERVAL).contains(&interval) {
        return answer(false, libc::EINVAL);
    }
    let done = guard::start(interval);
    let busy = heap::is_changing();
    answer(done, if busy { libc::EBUSY } else { libc::ENOMEM })
}

/// Guards no further blocks. Returns 0, or -1 with EBUSY.
#[unsafe(no_mangle)]
pub extern "C" fn pinfold_guard_stop() -> c_int {
    answer(guard::stop(), libc::EBUSY)
}
