//! Freed memory stays with the process for a while, within a bound.

use pinfold::internal::arena::{self, LARGE, Run};
use std::thread::sleep;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn alloc(granules: usize) -> Run {
    arena::alloc_run(granules, 0, LARGE, false).unwrap()
}

fn free(run: Run) {
    // SAFETY: the run comes from `alloc`, and is not used afterwards.
    unsafe { arena::free_run(run.start) };
}

/// Allocates and frees 100 MiB. Returns how many bytes went back to the system meanwhile.
fn round() -> usize {
    let before = arena::returned();
    let runs: Vec<Run> = (0..100).map(|_| alloc(16)).collect();
    runs.into_iter().for_each(free);
    (arena::returned() - before) as usize
}

/// Makes calls that tick, until at most `bytes` are held.
fn wait_until_held(bytes: usize) {
    let begun = Instant::now();
    while arena::held() as usize > bytes {
        let held = arena::held();
        assert!(begun.elapsed().as_secs() < 20, "{held} bytes are held");
        sleep(Duration::from_millis(50));
        (0..20).for_each(|_| free(alloc(1)));
    }
}

/// A program that needs its memory again within half a second pays no page fault for it. The whole
/// file is one test, because the figures are those of the process.
#[test]
fn free_memory_stays_for_a_while_and_is_bounded_by_the_use() {
    for _ in 0..3 {
        let bytes = round();
        assert!(bytes < 4 * MIB, "{bytes} bytes went back");
    }
    wait_until_held(16 * MIB);

    // Runs of all lengths come and go. Free memory in pieces does not fit each request.
    let mut runs: Vec<Run> = Vec::new();
    let (mut random, mut used, mut most) = (1usize, 0, 0);
    for step in 0..20_000 {
        random = random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let granules = 1 + (random >> 33) % 300;
        // The use rises to some 200 MiB and falls, and the sizes change with each wave.
        let is_rising = (step / 500) % 2 == 0;
        if is_rising && used < 200 * MIB || runs.is_empty() {
            runs.push(alloc((granules >> (step / 1000 % 6)).max(1)));
        } else {
            free(runs.swap_remove((random >> 40) % runs.len()));
            // A free that finds more than may be kept gives it back.
            let held = arena::held() as usize;
            assert!(
                held <= most + most / 4 + 4 * MIB,
                "{held} held, at most {most} used"
            );
        }
        // SAFETY: the runs are in use.
        let size = |run: &Run| unsafe { arena::run_size(run.start) };
        used = runs.iter().map(size).sum();
        most = used.max(most);
    }
    runs.into_iter().for_each(free);
    wait_until_held(16 * MIB);
}
