//! Freed memory that the process needs again soon stays with the process.

use pinfold::page::{self, LARGE, Run};
use std::thread::sleep;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const RUNS: usize = 100;

/// Allocates and frees 100 MiB, and returns how many bytes went back to the system by that.
fn round() -> u64 {
    let before = page::returned();
    let runs: Vec<Run> = (0..RUNS)
        .map(|_| page::alloc_run(16, 0, LARGE, false).unwrap())
        .collect();
    for run in runs {
        // SAFETY: allocated above, and not used any more.
        unsafe { page::free_run(run.start) };
    }
    page::returned() - before
}

#[test]
fn memory_that_is_missed_is_kept_for_a_while() {
    assert!(round() > 70 * MIB, "memory that nobody needed stays");
    // The second round takes back what the first one gave.
    let second = round();
    assert!(second < 30 * MIB, "{second} bytes went back");
    // After seconds without use, the arenas have forgotten.
    for _ in 0..12 {
        sleep(Duration::from_millis(460));
        for _ in 0..20 {
            let run = page::alloc_run(1, 0, LARGE, false).unwrap();
            // SAFETY: allocated above, and not used any more.
            unsafe { page::free_run(run.start) };
        }
    }
    assert!(page::held() < 32 * MIB, "{} bytes are held", page::held());
    let later = round();
    assert!(later > 70 * MIB, "only {later} bytes went back");
}
