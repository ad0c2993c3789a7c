//! A long run that is allocated and freed over and over stays with the process.

use pinfold::internal::arena::{self, LARGE, Run};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Allocates and frees one run. Returns how many bytes went back to the system meanwhile.
fn one(granules: usize) -> u64 {
    let before = arena::returned();
    let run = arena::alloc_run(granules, 0, LARGE, false).unwrap();
    // SAFETY: the run was allocated above, and is not used afterwards.
    unsafe { arena::free_run(run.start) };
    arena::returned() - before
}

#[test]
fn a_long_run_that_comes_and_goes_stays_and_lets_no_other_memory_stay() {
    for granules in [80, 320, 800] {
        for _ in 0..4 {
            one(granules);
        }
        // Some periods, at whose ends the arenas' figures decay.
        let (begun, mut bytes) = (Instant::now(), 0);
        while begun.elapsed() < Duration::from_millis(1500) {
            bytes += one(granules);
        }
        // What is left of the first runs goes back.
        assert!(
            bytes < granules as u64 * arena::GRANULE as u64,
            "{bytes} bytes went back"
        );
    }
    // 320 MiB of other memory is freed once, and goes back while the program goes on.
    let runs: Vec<Run> = (0..320)
        .map(|_| arena::alloc_run(16, 0, LARGE, false).unwrap())
        .collect();
    for run in runs {
        // SAFETY: the run was allocated above, and is not used afterwards.
        unsafe { arena::free_run(run.start) };
    }
    let begun = Instant::now();
    while arena::held() >= 80 * MIB {
        let held = arena::held();
        assert!(begun.elapsed().as_secs() < 20, "{held} bytes are held");
        one(800);
    }
}
