//! A CPU keeps a few freed large blocks for its next allocations. No block is served twice, and the
//! memory serves other sizes and goes back to the system as other free memory does.

use pinfold::internal::arena::{self, COLOURED, GRANULE, LARGE, Run};
use pinfold::memory;
use pinfold::shepherd::Shepherd;
use pinfold::slab::KmemCache;
use std::alloc::Layout;
use std::hint::spin_loop;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Barrier, Mutex, MutexGuard};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Waits until no other test of this file runs, because they read the figures of the process. Then
/// gives all free memory back.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(|lock| lock.into_inner());
    memory::trim();
    alone
}

fn alloc(granules: usize) -> Run {
    arena::alloc_block_run(granules, 0, LARGE, false).unwrap()
}

fn free(run: Run) {
    // SAFETY: the run comes from `alloc`, and is not used afterwards.
    unsafe { arena::free_block_run(run.start) };
}

fn length(run: &Run) -> usize {
    // SAFETY: the run is in use.
    unsafe { arena::run_size(run.start) / GRANULE }
}

/// Keeps the calling thread on its CPU.
fn stay_here() {
    // SAFETY: zeroes are a valid set of CPUs, and the kernel reads one.
    unsafe {
        let mut here: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu() as usize, &mut here);
        let result = libc::sched_setaffinity(0, size_of_val(&here), &here);
        assert_eq!(result, 0);
    }
}

/// Allocates blocks of `granules`, and frees them.
fn alloc_and_free(blocks: usize, granules: usize) {
    let runs: Vec<Run> = (0..blocks).map(|_| alloc(granules)).collect();
    runs.into_iter().for_each(free);
}

#[test]
fn a_freed_block_is_free_memory() {
    let _alone = alone();
    let (used, dirty) = (memory::large_in_use(), memory::dirty());
    let run = alloc(30);
    assert_eq!(memory::large_in_use(), used + 30 * GRANULE);
    free(run);
    assert_eq!(memory::large_in_use(), used);
    assert_eq!(memory::dirty(), dirty + 30 * GRANULE as u64);
    assert_eq!(arena::entry(run.start.as_ptr() as usize), 0);
    assert!(arena::run_at(run.start.as_ptr()).is_none());
}

/// The arena would serve the free run at the lowest address.
#[test]
fn a_freed_block_serves_the_next_of_its_length() {
    let _alone = alone();
    stay_here();
    let mut runs = [alloc(20), alloc(1), alloc(20), alloc(1)];
    runs.sort_by_key(|run| run.start);
    let large: Vec<Run> = runs
        .iter()
        .copied()
        .filter(|run| length(run) == 20)
        .collect();
    // SAFETY: the run is this test's, and is not used afterwards.
    unsafe { arena::free_run(large[0].start) };
    free(large[1]);
    let held = memory::held();
    let mut next = arena::alloc_block_run(20, 0, COLOURED, false).unwrap();
    if next.start == large[0].start {
        // Some calls give the block to the arena. Now only that block is free.
        let other = alloc(20);
        assert_eq!(other.start, large[1].start);
        // SAFETY: as above.
        unsafe { arena::free_run(next.start) };
        free(other);
        next = arena::alloc_block_run(20, 0, COLOURED, false).unwrap();
    }
    assert_eq!(next.start, large[1].start);
    assert_eq!(arena::entry(next.start.as_ptr() as usize), COLOURED);
    assert!(!next.zeroed);
    assert_eq!(memory::held(), held);
    free(next);
    runs.into_iter()
        .filter(|run| length(run) == 1)
        .for_each(free);
}

#[test]
fn freed_blocks_serve_other_lengths() {
    let _alone = alone();
    alloc_and_free(3, 20);
    let held = memory::held();
    // The three runs lie side by side.
    let run = alloc(60);
    assert_eq!(memory::held(), held);
    let slab = arena::alloc_run(1, 0, LARGE, false).unwrap();
    free(run);
    free(slab);
}

#[test]
fn a_block_grows_into_a_freed_one() {
    let _alone = alone();
    let (first, second) = (alloc(20), alloc(20));
    let (low, high) = match first.start < second.start {
        true => (first, second),
        false => (second, first),
    };
    free(high);
    let held = memory::held();
    // SAFETY: the run is this test's.
    assert!(unsafe { arena::resize_run(low.start, 40) });
    assert_eq!(memory::held(), held);
    free(low);
}

#[test]
fn freed_blocks_go_back_when_they_are_trimmed_and_when_they_are_old() {
    let _alone = alone();
    let before = memory::held();
    alloc_and_free(4, 16);
    assert!(memory::held() >= before + 4 * MIB);
    memory::trim();
    assert_eq!((memory::held(), memory::dirty()), (before, 0));

    alloc_and_free(4, 16);
    // A shepherd's ticks reach the arenas once there is a cache.
    let _cache = KmemCache::new("any", Layout::new::<u64>()).unwrap();
    let shepherd = Shepherd::new();
    let begun = Instant::now();
    while memory::held() > before {
        let (held, dirty) = (memory::held(), memory::dirty());
        assert!(
            begun.elapsed().as_secs() < 20,
            "{held} bytes, {dirty} dirty, stay"
        );
        shepherd.tick();
        sleep(Duration::from_millis(20));
    }
}

/// A tick gives back what nobody has used for a while, and no block that was used just now.
#[test]
fn a_block_that_was_used_lately_stays() {
    let _alone = alone();
    stay_here();
    let _cache = KmemCache::new("any", Layout::new::<u64>()).unwrap();
    alloc_and_free(1, 1);
    sleep(memory::dirty_time() + Duration::from_millis(200));
    alloc_and_free(1, 20);
    let dirty = memory::dirty();
    Shepherd::new().tick();
    assert!(memory::dirty() >= 20 * GRANULE as u64, "of {dirty} bytes");
}

#[test]
fn the_limit_on_dirty_memory_binds() {
    let _alone = alone();
    stay_here();
    memory::set_dirty_limit(Some(8 << 20));
    let run = alloc(1);
    alloc_and_free(4, 20);
    assert_eq!(memory::dirty(), 5 * MIB);
    memory::set_dirty_limit(Some(1 << 20));
    // SAFETY: the run is this test's, and is not used afterwards.
    unsafe { arena::free_run(run.start) };
    let dirty = memory::dirty();
    memory::set_dirty_limit(None);
    assert!(dirty <= MIB, "{dirty}");
}

/// A CPU that was allowed to park a block does not park it again beyond a limit that is set later.
#[test]
fn a_limit_that_is_set_later_binds() {
    let _alone = alone();
    stay_here();
    // Near a memory limit, less is kept than this block.
    let near = |more: Option<usize>| {
        memory::set_memory_limit(more.map(|more| memory::held() as usize + more));
    };
    for set in [&memory::set_dirty_limit as &dyn Fn(_), &near] {
        alloc_and_free(1, 20);
        assert_eq!(memory::dirty(), 20 * GRANULE as u64);
        let run = alloc(20);
        set(Some(MIB as usize));
        free(run);
        let dirty = memory::dirty();
        set(None);
        assert!(dirty <= MIB, "{dirty}");
        memory::trim();
    }
}

/// No allocation asks for a short run, so it would only take the place of another one.
#[test]
fn short_runs_take_no_place() {
    let _alone = alone();
    stay_here();
    let serves_again = |_| {
        let mut runs = [alloc(20), alloc(1), alloc(20), alloc(1)];
        runs.sort_by_key(|run| run.start);
        let long = |run: &&Run| length(run) == 20;
        let [low, high] = [runs.iter().find(long), runs.iter().rfind(long)].map(Option::unwrap);
        let short: Vec<Run> = (0..8).map(|_| alloc(4)).collect();
        // SAFETY: the run is this test's, and is not used afterwards.
        unsafe { arena::free_run(low.start) };
        free(*high);
        short.into_iter().for_each(free);
        let next = alloc(20);
        let is_same = next.start == high.start;
        free(next);
        runs.into_iter()
            .filter(|run| length(run) == 1)
            .for_each(free);
        memory::trim();
        is_same
    };
    // Some calls give a block to the arena in any case, and the thread's index may change.
    assert!((0..10).any(serves_again));
}

/// Two CPUs keep blocks, each less than the limit. On a backend that does not tell CPUs apart,
/// they keep them together.
#[test]
fn the_limit_on_dirty_memory_binds_all_cpus_together() {
    let _alone = alone();
    memory::set_dirty_limit(Some(6 << 20));
    let (ready, over) = (Barrier::new(2), AtomicBool::new(false));
    let runs = || [20; 4].map(alloc);
    let is_freed = AtomicBool::new(false);
    scope(|scope| {
        scope.spawn(|| {
            let runs = runs();
            ready.wait();
            runs.into_iter().for_each(free);
            is_freed.store(true, Relaxed);
            // A thread that sleeps may lose its index to the other one.
            while !over.load(Relaxed) {
                spin_loop();
            }
        });
        scope.spawn(|| {
            let runs = runs();
            ready.wait();
            while !is_freed.load(Relaxed) {
                spin_loop();
            }
            runs.into_iter().for_each(free);
            over.store(true, Relaxed);
        });
    });
    let dirty = memory::dirty();
    memory::set_dirty_limit(None);
    assert!(dirty <= 6 * MIB, "{dirty}");
}

/// Threads allocate and free blocks of few lengths, and write to them, while another one trims.
#[test]
fn no_block_is_served_twice() {
    let _alone = alone();
    let over = AtomicBool::new(false);
    let work = |thread: usize| {
        let mut random = thread;
        let mut kept: Vec<(Run, usize, u64)> = Vec::new();
        for step in 0..20_000u64 {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let granules = [8, 9, 16, 47][(random >> 33) % 4];
            let (run, mark) = (alloc(granules), (thread as u64) << 32 | step);
            let words = run.start.as_ptr().cast::<u64>();
            let last = granules * GRANULE / 8 - 1;
            // SAFETY: the run is this thread's until it is freed below.
            unsafe {
                words.write_volatile(mark);
                words.add(last).write_volatile(mark);
            }
            kept.push((run, last, mark));
            if kept.len() > 1 + (random >> 40) % 4 {
                let (run, last, mark) = kept.swap_remove((random >> 45) % kept.len());
                let words = run.start.as_ptr().cast::<u64>();
                // SAFETY: as above.
                let found = unsafe { (words.read_volatile(), words.add(last).read_volatile()) };
                assert_eq!(found, (mark, mark));
                free(run);
            }
        }
        kept.into_iter().for_each(|(run, ..)| free(run));
    };
    scope(|scope| {
        scope.spawn(|| {
            while !over.load(Relaxed) {
                memory::trim();
            }
        });
        let threads: Vec<_> = (0..4).map(|nth| scope.spawn(move || work(nth))).collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        over.store(true, Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
    memory::trim();
    assert_eq!((memory::large_in_use(), memory::dirty()), (0, 0));
}
