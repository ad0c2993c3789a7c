//! Runs of granules, in a process whose arena no other test uses.

use pinfold::internal::arena::{LARGE, alloc_run, free_run};
use std::ptr::NonNull;

/// Runs the test's body in a process of its own, so that no other test uses its arena. Returns true
/// in that process.
#[track_caller]
pub fn alone(test: &str) -> bool {
    super::again::alone(test, |command| {
        command.env_remove("PINFOLD_THP");
    })
}

/// Takes a run that is one large block.
pub fn take(granules: usize) -> NonNull<u8> {
    alloc_run(granules, 0, LARGE, false).unwrap().start
}

/// Frees a run.
pub fn give(run: NonNull<u8>) {
    // SAFETY: the caller took the run and gives it up.
    unsafe { free_run(run) };
}
