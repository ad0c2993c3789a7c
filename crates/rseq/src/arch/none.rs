//! Architectures without critical sections. The atomic backend does all the work.
//!
//! No thread is registered, so no code calls `own_area`, `read_index` or `spin_until_aborted`.

use crate::registration::Registration;

pub(crate) const SUPPORTED: bool = false;

pub(crate) fn registration() -> Option<Registration> {
    None
}

/// Returns the address of the calling thread's `errno`. Each thread has its own, so the address
/// identifies the thread.
pub(crate) fn thread_pointer() -> usize {
    // SAFETY: `__errno_location` has no preconditions.
    unsafe { libc::__errno_location() as usize }
}

/// Returns false: the program cannot know here whether a debugger steps through it.
#[inline(always)]
pub(crate) fn is_stepped() -> bool {
    false
}

/// Stands for the instructions of a section, none of which is ever run.
macro_rules! body {
    ($($section:tt)*) => {
        unreachable!("no registration on this architecture")
    };
}

pub(crate) fn own_area() -> isize {
    body!()
}

pub(crate) unsafe fn read_index(_: isize) -> u32 {
    body!()
}

pub(crate) unsafe fn spin_until_aborted(_: isize, _: u64) -> bool {
    body!()
}
