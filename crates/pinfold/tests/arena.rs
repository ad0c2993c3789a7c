//! Runs of granules: they do not overlap, join when they are free, grow and shrink in place, and go
//! back to the system.

mod common;

use common::runs::{alone, give, take};
use common::status;
use pinfold::internal::arena::{
    self, COLOURED, GRANULE, HUGE, LARGE, Run, alloc_aligned_run, alloc_growing_run, alloc_run,
    block_of_run, entry, free_run, move_run, offset_in_run, resize_run, run_size,
};
use std::collections::HashMap;
use std::ptr::NonNull;

fn size(run: NonNull<u8>) -> usize {
    // SAFETY: the caller owns the run, which is in use.
    unsafe { run_size(run) }
}

/// Returns the address of the first word of a run's granule.
fn word(run: NonNull<u8>, granule: usize) -> *mut usize {
    // SAFETY: the callers pass granules that lie in the run.
    unsafe { run.as_ptr().add(granule * GRANULE).cast() }
}

fn write(run: NonNull<u8>, granules: usize) {
    // SAFETY: the caller owns the run, which has `granules` granules.
    (0..granules).for_each(|nth| unsafe { *word(run, nth) = run.as_ptr() as usize + nth });
}

fn check(run: NonNull<u8>, at: usize, granules: usize) {
    // SAFETY: the caller owns the run, which has `granules` granules.
    (0..granules).for_each(|nth| assert_eq!(unsafe { *word(run, nth) }, at + nth));
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % bound
    }
}

#[test]
fn runs_in_use_never_overlap() {
    if !alone("runs_in_use_never_overlap") {
        return;
    }
    let mut random = Random(7);
    let mut runs: HashMap<NonNull<u8>, usize> = HashMap::new();
    let mut total = 0;
    for round in 0..40_000 {
        let full = total > 4000;
        if full || random.below(5) < 2 {
            if let Some((&run, &granules)) = runs.iter().nth(random.below(runs.len().max(1))) {
                check(run, run.as_ptr() as usize, granules);
                runs.remove(&run);
                total -= granules;
                give(run);
            }
        } else if random.below(10) == 0 && !runs.is_empty() {
            let (&run, &granules) = runs.iter().nth(random.below(runs.len())).unwrap();
            let wanted = 1 + random.below(2 * granules);
            // SAFETY: the test owns the run.
            if unsafe { resize_run(run, wanted) } {
                assert_eq!(size(run), wanted * GRANULE);
                check(run, run.as_ptr() as usize, granules.min(wanted));
                write(run, wanted);
                total = total + wanted - granules;
                runs.insert(run, wanted);
            } else {
                assert!(wanted > granules);
                check(run, run.as_ptr() as usize, granules);
            }
        } else {
            let most = [2, 8, 40, 300][random.below(4)];
            let granules = 1 + random.below(most);
            let Run { start, zeroed } = alloc_run(granules, 0, LARGE, false).unwrap();
            for nth in 0..granules {
                // SAFETY: the test owns the run, and `nth` is one of its granules.
                let there = unsafe { *word(start, nth) };
                assert!(
                    !zeroed || there == 0,
                    "a run that should read as zeroes holds {there:x}"
                );
            }
            write(start, granules);
            assert!(runs.insert(start, granules).is_none());
            total += granules;
        }
        if round % 5000 == 0 {
            arena::trim();
        }
        if round % 7000 == 0 {
            arena::unmap_free();
        }
    }
    for (run, granules) in runs {
        check(run, run.as_ptr() as usize, granules);
        give(run);
    }
}

#[test]
fn free_neighbours_join() {
    if !alone("free_neighbours_join") {
        return;
    }
    let long = take(54);
    give(long);
    let held = arena::held();
    // Nine parts of the same memory, freed in an order in which runs join on both sides.
    let parts: Vec<_> = (0..9).map(|_| take(6)).collect();
    for nth in [1, 3, 5, 7, 0, 2, 4, 6, 8] {
        give(parts[nth]);
    }
    let again = take(54);
    assert_eq!(again, long);
    assert!(arena::held() <= held.max(54 * GRANULE as u64) + (4 << 20));
    give(again);
}

#[test]
fn the_lowest_of_the_shortest_runs_that_fit_is_taken() {
    if !alone("the_lowest_of_the_shortest_runs_that_fit_is_taken") {
        return;
    }
    arena::unmap_free();
    let runs: Vec<_> = [5, 1, 3, 1, 3, 1, 9, 1].map(take).to_vec();
    let mut sorted = runs.clone();
    sorted.sort();
    assert_eq!(runs, sorted, "a region is used from its beginning");
    for nth in [0, 4, 2, 6] {
        give(runs[nth]);
    }
    assert_eq!(take(3), runs[2]);
    assert_eq!(take(3), runs[4]);
    assert_eq!(take(4), runs[0]);
    for nth in [1, 3, 5, 7, 0, 2, 4] {
        give(runs[nth]);
    }
}

#[test]
fn a_run_grows_into_what_is_free_behind_it() {
    if !alone("a_run_grows_into_what_is_free_behind_it") {
        return;
    }
    let (run, behind) = (take(20), take(30));
    if behind.as_ptr() as usize != run.as_ptr() as usize + 20 * GRANULE {
        panic!("two runs of a fresh region are not neighbours");
    }
    write(run, 20);
    // SAFETY: the test owns both runs, and does not use `behind` after its free.
    unsafe {
        assert!(!resize_run(run, 21), "the neighbour is in use");
        assert_eq!(size(run), 20 * GRANULE);
        free_run(behind);
        assert!(resize_run(run, 50));
        assert_eq!(size(run), 50 * GRANULE);
        // Grows beyond the memory that was ever used.
        assert!(resize_run(run, 60));
        check(run, run.as_ptr() as usize, 20);
        write(run, 60);
        assert!(resize_run(run, 3));
        check(run, run.as_ptr() as usize, 3);
        assert_eq!(size(run), 3 * GRANULE);
        assert!(!resize_run(run, HUGE), "no run is that long");
    }
    let next = take(40);
    assert_eq!(next.as_ptr() as usize, run.as_ptr() as usize + 3 * GRANULE);
    give(next);
    give(run);
}

/// A long block takes the memory that is resident, and only the rest from what is not.
#[test]
fn a_long_run_begins_with_memory_that_was_used() {
    if !alone("a_long_run_begins_with_memory_that_was_used") {
        return;
    }
    let (run, behind) = (take(30), take(10));
    write(run, 30);
    // SAFETY: the test owns both runs, and does not use them any more.
    unsafe {
        free_run(behind);
        arena::trim();
        free_run(run);
    }
    let dirty = arena::dirty();
    assert_eq!(dirty, 30 * GRANULE as u64);
    let held = arena::held();
    let long = alloc_run(35, 0, LARGE, false).unwrap();
    assert_eq!(long.start, run);
    assert!(!long.zeroed);
    assert_eq!(
        (arena::dirty(), arena::held()),
        (0, held + 5 * GRANULE as u64)
    );
    write(long.start, 35);
    check(long.start, run.as_ptr() as usize, 35);
    give(long.start);
    assert_eq!(arena::dirty(), 35 * GRANULE as u64);
}

/// A run with free memory of several states behind it grows over all of them.
#[test]
fn a_run_grows_over_used_and_unused_memory() {
    if !alone("a_run_grows_over_used_and_unused_memory") {
        return;
    }
    let (run, first, second) = (take(20), take(5), take(5));
    write(run, 20);
    give(second);
    arena::trim();
    give(first);
    // SAFETY: the test owns the run, and no other thread takes memory.
    unsafe {
        assert!(
            resize_run(run, 50),
            "over a dirty, a clean and an absent part"
        );
        check(run, run.as_ptr() as usize, 20);
        write(run, 50);
    }
    give(run);
    assert_eq!(arena::dirty(), 50 * GRANULE as u64);
}

/// A block that grows is copied to resident memory if there is some.
#[test]
fn a_growing_block_gets_memory_that_was_used() {
    if !alone("a_growing_block_gets_memory_that_was_used") {
        return;
    }
    assert_eq!(alloc_growing_run(40, 0, LARGE, false), None);
    let (run, behind) = (take(40), take(1));
    give(run);
    assert_eq!(alloc_growing_run(40, 0, LARGE, false), Some(run));
    let fresh = alloc_growing_run(40, 0, LARGE, true).unwrap();
    assert!(fresh != run && entry(fresh.as_ptr() as usize) == LARGE);
    give(fresh);
    assert_eq!(
        alloc_growing_run(120, 0, LARGE, false),
        None,
        "a third is dirty"
    );
    let (dirty, held) = (arena::dirty(), arena::held());
    assert_eq!(dirty, 40 * GRANULE as u64);
    assert_eq!(alloc_growing_run(80, 0, LARGE, false), Some(fresh));
    assert_eq!((arena::dirty(), arena::held()), (0, held + dirty));
    [run, behind, fresh].into_iter().for_each(give);
}

/// Pages move only if the run has no room for the block, which begins behind the run's beginning.
#[test]
fn pages_stay_if_the_run_has_room_for_the_block() {
    let run = alloc_run(48, 0, COLOURED, false).unwrap().start;
    // SAFETY: the test owns the run.
    let block = unsafe { block_of_run(run) };
    let offset = offset_in_run(block.as_ptr());
    let room = 48 * GRANULE - offset;
    // SAFETY: the test owns the run, which stays.
    assert_eq!(unsafe { move_run(run, room) }, None);
    // SAFETY: the test owns the run, and does not use it after the move.
    match unsafe { move_run(run, room + 1) } {
        // SAFETY: the test owns the moved block.
        Some(moved) => assert!(unsafe { arena::free_huge(moved.as_ptr()) }),
        None => give(run),
    }
}

/// What is cut off a fresh run for its alignment was never used, so it is not kept as used memory.
#[test]
fn the_rest_of_an_aligned_run_stays_clean() {
    if !alone("the_rest_of_an_aligned_run_stays_clean") {
        return;
    }
    arena::trim();
    let run = alloc_aligned_run(GRANULE, 64 * GRANULE, 0).unwrap();
    assert_eq!(arena::dirty(), 0);
    give(run.start);
}

#[test]
fn a_run_moves_with_its_pages() {
    if !alone("a_run_moves_with_its_pages") {
        return;
    }
    let (run, other) = (take(64), take(100));
    write(run, 64);
    write(other, 100);
    let at = run.as_ptr() as usize;
    // SAFETY: the test owns the run, and does not use its old address afterwards.
    let moved = unsafe { move_run(run, 100 * GRANULE) }.unwrap();
    assert_ne!(moved, run);
    assert_eq!(entry(at), 0);
    assert_eq!(arena::huge_size(moved.as_ptr()), Some(100 * GRANULE));
    check(moved, at, 64);
    write(moved, 100);
    // SAFETY: the test owns the block, and does not use its old address afterwards.
    let grown = unsafe { arena::resize_huge(moved.as_ptr(), 200 * GRANULE) }.unwrap();
    check(grown, moved.as_ptr() as usize, 100);
    // SAFETY: the test owns the block and gives it up.
    assert!(unsafe { arena::free_huge(grown.as_ptr()) });
    // SAFETY: the test owns the run, and does not use its old address afterwards.
    let huge = unsafe { move_run(other, HUGE + 1) }.unwrap();
    check(huge, other.as_ptr() as usize, 100);
    assert!(arena::huge_size(huge.as_ptr()).is_some_and(|size| size > HUGE));
    // SAFETY: the test owns the huge block, which has more than `HUGE` bytes, and gives it up.
    unsafe {
        *huge.as_ptr().add(HUGE) = 1;
        assert!(arena::free_huge(huge.as_ptr()));
    }
    // The addresses that both runs left are used again.
    let again = take(64);
    write(again, 64);
    give(again);
}

#[test]
fn aligned_runs_are_aligned() {
    if !alone("aligned_runs_are_aligned") {
        return;
    }
    // The second time, in memory that was used.
    for _ in 0..2 {
        let mut runs = Vec::new();
        for shift in 17..25 {
            for size in [1, GRANULE, 5 * GRANULE + 1] {
                let run = alloc_aligned_run(size, 1 << shift, 0).unwrap();
                let at = run.start.as_ptr() as usize;
                assert!(at.is_multiple_of(1 << shift));
                assert_eq!(self::size(run.start), size.next_multiple_of(GRANULE));
                assert_eq!(entry(at), LARGE);
                write(run.start, size.div_ceil(GRANULE));
                runs.push((run.start, size.div_ceil(GRANULE)));
            }
        }
        for (run, granules) in runs {
            check(run, run.as_ptr() as usize, granules);
            give(run);
        }
    }
    assert!(alloc_aligned_run(HUGE - GRANULE, HUGE / 2, 0).is_none());
    assert!(alloc_aligned_run(1, HUGE, 0).is_none());
    assert!(alloc_aligned_run(HUGE, 2 * GRANULE, 0).is_none());
}

#[test]
fn free_memory_goes_back_with_its_addresses() {
    if !alone("free_memory_goes_back_with_its_addresses") {
        return;
    }
    let data = status("VmData:");
    let runs: Vec<_> = (0..6).map(|_| take(500)).collect();
    for &run in &runs {
        // SAFETY: the test owns the run, which has 500 granules.
        unsafe { run.as_ptr().write_bytes(1, 500 * GRANULE) };
    }
    let used = status("VmData:");
    assert!(used >= data + 3000 * GRANULE);
    runs.iter().for_each(|&run| give(run));
    let unmapped = arena::unmap_free();
    assert!(unmapped >= 2900 * GRANULE, "{unmapped}");
    assert!(status("VmData:") <= used - unmapped + (1 << 20));
    // The addresses are used again, and read as zeroes.
    let again = alloc_run(500, 0, LARGE, false).unwrap();
    assert!(again.zeroed && runs.contains(&again.start));
    give(again.start);
}

#[test]
fn regions_leave_foreign_mappings_alone() {
    if !alone("regions_leave_foreign_mappings_alone") {
        return;
    }
    // Maps foreign pages in the places of the next ten regions.
    let run = take(900);
    let region = (run.as_ptr() as usize & !((64 << 20) - 1)) + (64 << 20);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let foreign: Vec<*mut u8> = (0..40)
        .map(|nth| (region + nth * (16 << 20) + (8 << 20)) as *mut libc::c_void)
        // SAFETY: `MAP_FIXED_NOREPLACE` makes a new mapping, which replaces nothing.
        .map(|at| unsafe { libc::mmap(at, 4096, libc::PROT_READ, flags, -1, 0) }.cast())
        .collect();
    let runs: Vec<_> = (0..20)
        .map(|nth| (take(100 + 20 * nth), 100 + 20 * nth))
        .collect();
    runs.iter()
        .for_each(|&(run, granules)| write(run, granules));
    for (run, granules) in runs {
        check(run, run.as_ptr() as usize, granules);
        let within = run.as_ptr() as usize..run.as_ptr() as usize + granules * GRANULE;
        assert!(!foreign.iter().any(|at| within.contains(&(*at as usize))));
        give(run);
    }
    give(run);
    for at in foreign {
        // SAFETY: `at` was mapped above, or is `MAP_FAILED`, which the kernel refuses.
        unsafe { libc::munmap(at.cast(), 4096) };
    }
}

#[test]
fn a_huge_block_leaves_the_arenas_addresses() {
    if !alone("a_huge_block_leaves_the_arenas_addresses") {
        return;
    }
    for _ in 0..3 {
        // Nothing is mapped behind this run.
        let run = take(300);
        write(run, 300);
        // SAFETY: the test owns the run, and does not use its old address afterwards.
        let block = unsafe { move_run(run, HUGE) }.unwrap();
        check(block, run.as_ptr() as usize, 300);
        assert_ne!(block, run);
        // The addresses are used again while the block exists.
        let again = take(300);
        assert_eq!(again, run);
        give(again);
        arena::trim();
        // SAFETY: the test owns the huge block and gives it up.
        assert!(unsafe { arena::free_huge(block.as_ptr()) });
    }
}

#[test]
fn a_clean_run_before_the_unmapped_rest_may_be_long_enough() {
    if !alone("a_clean_run_before_the_unmapped_rest_may_be_long_enough") {
        return;
    }
    // More runs in one bin than a search looks at.
    let runs: Vec<_> = (0..18).map(|_| [take(40), take(1)]).collect();
    // The last of the 43 granules ends at a multiple of 2 MiB, where the mapping ends.
    while take(1).as_ptr() as usize / GRANULE % 32 != 20 {}
    let last = take(43);
    give(last);
    runs.iter().for_each(|pair| give(pair[0]));
    arena::trim();
    for _ in 0..4 {
        take(42);
    }
}

#[test]
fn memory_that_was_free_for_long_goes_back_on_any_call() {
    if !alone("memory_that_was_free_for_long_goes_back_on_any_call") {
        return;
    }
    for before in 0..4 {
        let runs: Vec<_> = (0..30).map(|_| [take(2), take(9)]).collect();
        runs.iter().for_each(|pair| give(pair[0]));
        (0..before).for_each(|_| _ = take(9));
        let returned = arena::returned();
        for _ in 0..30 {
            std::thread::sleep(std::time::Duration::from_millis(50));
            for _ in 0..32 {
                give(take(9));
            }
        }
        let granules = (arena::returned() - returned) / GRANULE as u64;
        assert!(granules >= 50, "{before}: {granules}");
    }
}
