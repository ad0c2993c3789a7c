//! Runs of granules, in a process whose arena no other test uses.

use pinfold::internal::arena::{LARGE, alloc_run, free_run};
use std::process::Command;
use std::ptr::NonNull;

/// Runs the test's body in a process of its own, so that no other test uses its arena. Returns true
/// in that process.
pub fn alone(test: &str) -> bool {
    if std::env::var_os("ARENA_ALONE").is_some() {
        return true;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env("ARENA_ALONE", "1")
        .env_remove("PINFOLD_THP")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    eprint!("{said}");
    assert!(output.status.success(), "{}: {said}", output.status);
    false
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
