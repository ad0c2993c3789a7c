//! Freed memory that the process soon needs again stays with the process.

use pinfold::arena::{self, LARGE, Run};
use std::thread::sleep;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const RUNS: usize = 100;

/// Allocates and frees 100 MiB. Returns how many bytes went back to the system meanwhile.
fn round() -> u64 {
    let before = arena::returned();
    let runs: Vec<Run> = (0..RUNS)
        .map(|_| arena::alloc_run(16, 0, LARGE, false).unwrap())
        .collect();
    for run in runs {
        // SAFETY: the run was allocated above, and is not used afterwards.
        unsafe { arena::free_run(run.start) };
    }
    arena::returned() - before
}

#[test]
fn memory_that_is_missed_is_kept_for_a_while() {
    assert!(round() > 70 * MIB, "memory that is not needed stays");
    // The second round allocates again what the first one gave back, so that memory was missed.
    let second = round();
    assert!(second < 30 * MIB, "{second} bytes went back");
    // After some seconds without use, the arenas do not count the memory as missed any more.
    for _ in 0..12 {
        sleep(Duration::from_millis(460));
        for _ in 0..20 {
            let run = arena::alloc_run(1, 0, LARGE, false).unwrap();
            // SAFETY: the run was allocated above, and is not used afterwards.
            unsafe { arena::free_run(run.start) };
        }
    }
    assert!(arena::held() < 32 * MIB, "{} bytes are held", arena::held());
    let later = round();
    assert!(later > 70 * MIB, "only {later} bytes went back");
}
