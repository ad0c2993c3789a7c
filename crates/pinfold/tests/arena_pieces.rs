//! A call that frees memory gives little more back than it frees, and the calls together give back
//! everything.

use pinfold::internal::arena::{self, GRANULE, LARGE, Run};
use std::thread::sleep;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// What a call may give back beyond what it frees.
const PIECE: u64 = 256 << 10;

fn alloc(granules: usize) -> Run {
    arena::alloc_run(granules, 0, LARGE, false).unwrap()
}

/// Frees a run. Returns how many bytes went back to the system meanwhile.
fn free(run: Run) -> u64 {
    let before = arena::returned();
    // SAFETY: the run comes from `alloc`, and is not used afterwards.
    unsafe { arena::free_run(run.start) };
    arena::returned() - before
}

/// Uses and frees 200 MiB, so that the process keeps them.
fn free_much() {
    let runs: Vec<Run> = (0..200).map(|_| alloc(16)).collect();
    let returned: u64 = runs.into_iter().map(free).sum();
    assert!(returned < 4 * MIB, "{returned} bytes went back");
}

/// Frees a granule, and checks how much goes back.
fn check_call() {
    let returned = free(alloc(1));
    let most = PIECE + 2 * GRANULE as u64;
    assert!(returned <= most, "a call gave {returned} bytes back");
}

/// Makes calls until at most 8 MiB are held.
fn check_calls() {
    for call in 0u64.. {
        let held = arena::held();
        if held <= 8 * MIB {
            return;
        }
        assert!(call < 2 * 200 * MIB / PIECE, "{held} bytes are held");
        check_call();
    }
}

/// The whole file is one test, because the figures are those of the process.
#[test]
fn a_call_gives_back_little_more_than_it_frees() {
    // Memory that was free for long.
    free_much();
    sleep(Duration::from_millis(600));
    check_calls();
    // Memory beyond what may be kept, because its use is a while ago.
    arena::set_dirty_time(Duration::from_secs(60));
    free_much();
    for _ in 0..2 {
        sleep(Duration::from_millis(600));
        (0..16).for_each(|_| check_call());
    }
    check_calls();
    // If free memory does not stay at all, all of it goes back at once.
    arena::set_dirty_time(Duration::ZERO);
    assert!(free(alloc(64)) >= 4 * MIB);
}
