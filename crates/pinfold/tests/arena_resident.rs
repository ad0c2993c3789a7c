//! What the kernel backs: sparse blocks take the pages that were touched, small objects may have
//! huge pages, moved blocks leave no mappings behind, and locked memory goes back.

mod common;

use common::runs::{alone, give, take};
use pinfold::internal::arena::{self, GRANULE, LARGE, alloc_run, free_run, move_run};
use pinfold::shepherd::Shepherd;
use pinfold::slab::KmemCache;
use std::alloc::Layout;
use std::fs;
use std::ptr::NonNull;
use std::thread::sleep;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

/// Returns the process's resident private memory in bytes.
fn resident() -> usize {
    common::status("RssAnon:")
}

fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .count()
}

/// Returns whether the mapping at `address` asks for huge pages (`Some(true)`), refuses them
/// (`Some(false)`), or follows the system's setting, as on a kernel without huge pages.
fn asks_for_huge_pages(address: usize) -> Option<bool> {
    let flags = smaps(address, "VmFlags:")?;
    let has = |flag| flags.split_ascii_whitespace().any(|word| word == flag);
    has("hg").then_some(true).or(has("nh").then_some(false))
}

/// Returns what the kernel says in `field` of the mapping at `address`.
fn smaps(address: usize, field: &str) -> Option<String> {
    let text = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut within = false;
    for line in text.lines() {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        if let Some((from, to)) = first.split_once('-') {
            let number = |text| usize::from_str_radix(text, 16);
            if let (Ok(from), Ok(to)) = (number(from), number(to)) {
                within = (from..to).contains(&address);
            }
        } else if within && first == field {
            return Some(rest.trim().to_owned());
        }
    }
    None
}

/// Returns whether the kernel has huge pages at all.
fn has_huge_pages() -> bool {
    let has = fs::metadata("/sys/kernel/mm/transparent_hugepage/enabled").is_ok();
    if !has {
        eprintln!("left out: the kernel has no huge pages");
    }
    has
}

/// Allocates `bytes` in objects of `size` bytes. Returns the last object.
fn fill(cache: &KmemCache, size: usize, bytes: usize) -> NonNull<u8> {
    let mut last = None;
    for _ in 0..bytes / size {
        let object = cache.alloc().unwrap();
        // SAFETY: the object is new, and has at least one byte.
        unsafe { object.as_ptr().write(1) };
        last = Some(object);
    }
    last.unwrap()
}

/// Coroutines' stacks and sparse arrays: a byte is written in each block.
#[test]
fn sparse_blocks_take_only_the_pages_that_were_touched() {
    if !alone("sparse_blocks_take_only_the_pages_that_were_touched") {
        return;
    }
    let before = resident();
    for granules in [2, 40, 130] {
        for _ in 0..200 * MIB / (granules * GRANULE) {
            // SAFETY: the run is new.
            unsafe { take(granules).as_ptr().write(1) };
        }
    }
    let more = (resident() - before) / MIB;
    assert!(more < 40, "600 MiB in sparse blocks take {more} MiB");
}

/// Sparse blocks and slabs of small objects that come and go in turn, in changing order: each
/// round finds the pages of the last one, although all freed memory is kept.
#[test]
fn sparse_blocks_that_come_back_take_no_more_pages() {
    if !alone("sparse_blocks_that_come_back_take_no_more_pages") {
        return;
    }
    // The arena keeps up to an eighth of what is in use: all memory of a round.
    let used: Vec<_> = (0..4).map(|_| take(900)).collect();
    let round = |nth: usize| {
        let mut runs = Vec::new();
        for block in 0..200 {
            let granules = if (block + 3 * nth).is_multiple_of(10) {
                1
            } else {
                2
            };
            let run = take(granules);
            let pages = if granules == 1 { 16 } else { 1 };
            for page in 0..pages {
                // SAFETY: the run is new, and has 16 pages of 4 KiB at least.
                unsafe { run.as_ptr().add(page * 4096).write(1) };
            }
            runs.push(run);
        }
        let most = resident();
        runs.into_iter().for_each(give);
        most
    };
    let rounds: Vec<_> = (0..8).map(round).collect();
    let (first, last) = (rounds[0], rounds[7]);
    used.into_iter().for_each(give);
    let more = last.saturating_sub(first) / 1024;
    assert!(more < 3072, "{more} KiB more than in the first round");
}

/// A zeroed block of which a page is used, again and again.
#[test]
fn a_sparse_zeroed_block_gives_its_pages_back() {
    if !alone("a_sparse_zeroed_block_gives_its_pages_back") {
        return;
    }
    const SIZE: usize = 30_000_000;
    let run = take(SIZE.div_ceil(GRANULE));
    let all = |byte: u8| {
        // SAFETY: the test owns the run, which has `SIZE` bytes.
        unsafe { std::slice::from_raw_parts(run.as_ptr(), SIZE) }
            .iter()
            .all(|&each| each == byte)
    };
    // SAFETY: the test owns the run, which has `SIZE` bytes.
    unsafe {
        run.as_ptr().write_bytes(7, SIZE);
        arena::zero_run(run, SIZE);
    }
    assert!(all(0), "a full block is zeroed");
    let full = resident();
    // SAFETY: the test owns the run, which has `SIZE` bytes.
    unsafe {
        // Byte 0 of each MiB, as programs do that reserve more than they use.
        (0..SIZE)
            .step_by(MIB)
            .for_each(|at| run.as_ptr().add(at).write(1));
        assert!(arena::is_sparse(run, SIZE));
        run.as_ptr().write_bytes(7, SIZE / 2);
        assert!(!arena::is_sparse(run, SIZE), "a half-full block");
        run.as_ptr().write_bytes(0, SIZE);
        run.as_ptr().add(5).write(1);
        arena::zero_run(run, SIZE);
    }
    let less = full.saturating_sub(resident()) / MIB;
    assert!(
        less > 20,
        "a block with one byte in use gave {less} MiB back"
    );
    assert!(all(0), "a sparse block is zeroed");
    give(run);
}

#[test]
fn many_small_objects_get_huge_pages_and_nothing_else_does() {
    if !alone("many_small_objects_get_huge_pages_and_nothing_else_does") || !has_huge_pages() {
        return;
    }
    let layout = |size| Layout::from_size_align(size, 8).unwrap();
    let small = KmemCache::new("small", layout(256)).unwrap();
    let larger = KmemCache::new("larger", layout(8192)).unwrap();
    let first = fill(&small, 256, MIB);
    fill(&small, 256, 80 * MIB);
    let later = fill(&small, 256, 20 * MIB);
    let asks = |object: NonNull<u8>| asks_for_huge_pages(object.as_ptr() as usize);
    assert_eq!(asks(first), Some(false));
    assert_eq!(asks(later), Some(true));
    assert_eq!(asks(fill(&larger, 8192, 20 * MIB)), Some(false));
    for granules in [1, 100, 800] {
        assert_eq!(asks(take(granules)), Some(false));
    }
}

#[test]
fn small_objects_near_a_limit_get_no_huge_pages() {
    if !alone("small_objects_near_a_limit_get_no_huge_pages") || !has_huge_pages() {
        return;
    }
    arena::set_memory_limit(Some(300 * MIB));
    let small = KmemCache::new("small", Layout::from_size_align(256, 8).unwrap()).unwrap();
    let last = fill(&small, 256, 120 * MIB);
    assert_eq!(asks_for_huge_pages(last.as_ptr() as usize), Some(false));
}

/// Returns a block of 10 MiB, and an address in the middle of one of its whole huge pages.
fn long_block(zeroed: bool) -> (NonNull<u8>, usize) {
    let block = arena::alloc_block_run(LONG / GRANULE, 0, LARGE, zeroed).unwrap();
    let first = block.start.as_ptr() as usize;
    (block.start, first.next_multiple_of(2 * MIB) + MIB)
}

const LONG: usize = 10 * MIB;

/// Writes a byte to each of the first `pages` pages of a long block, and frees it. Gives all free
/// memory back, so that the next block is made of fresh memory.
fn use_and_free(block: NonNull<u8>, pages: usize) {
    for page in 0..pages {
        // SAFETY: the test owns the block, which has more pages.
        unsafe { block.as_ptr().add(page * 4096).write(1) };
    }
    // SAFETY: the test owns the block, and does not use it afterwards.
    unsafe { arena::free_block_run(block) };
    arena::trim();
}

/// Returns a long block that asks for huge pages, filled with the byte 7, and an address as
/// [`long_block`] does.
fn block_in_huge_pages() -> (NonNull<u8>, usize) {
    use_and_free(long_block(false).0, LONG / 4096);
    let (block, middle) = long_block(false);
    assert_eq!(asks_for_huge_pages(middle), Some(true));
    // SAFETY: the test owns the block.
    unsafe { block.as_ptr().write_bytes(7, LONG) };
    (block, middle)
}

#[test]
fn long_blocks_get_huge_pages_while_the_program_fills_them() {
    if !alone("long_blocks_get_huge_pages_while_the_program_fills_them") || !has_huge_pages() {
        return;
    }
    let asks = asks_for_huge_pages;
    let (block, _) = long_block(false);
    // SAFETY: the test owns the block.
    assert!(unsafe { arena::resize_run(block, 8) });
    use_and_free(block, 8 * GRANULE / 4096);
    let (block, middle) = long_block(false);
    assert_eq!(
        asks(middle),
        Some(false),
        "a block that was cut says nothing"
    );
    use_and_free(block, LONG / 4096);

    let (block, middle) = long_block(false);
    assert_eq!(asks(middle), Some(true), "a block was filled");
    let shorter = take(60);
    assert_eq!(asks(shorter.as_ptr() as usize), Some(false));
    give(shorter);
    use_and_free(block, LONG / 4096);
    assert_eq!(asks(middle), Some(false), "its memory went back");
    let (block, middle) = long_block(true);
    assert_eq!(asks(middle), Some(false), "a zeroed block");
    use_and_free(block, 0);

    // Each block that stays empty counts, until the next ones have small pages.
    let is_refused = (0..20).any(|_| {
        let (block, middle) = long_block(false);
        let is_refused = asks(middle) == Some(false);
        use_and_free(block, 1);
        is_refused
    });
    assert!(is_refused, "blocks stay empty");
}

/// A block that grew into memory which others had filled does not show what its program fills.
#[test]
fn a_block_that_grew_into_used_memory_says_nothing() {
    if !alone("a_block_that_grew_into_used_memory_says_nothing") || !has_huge_pages() {
        return;
    }
    const REST: usize = 800 * GRANULE;
    let (block, _) = long_block(false);
    let next = take(REST / GRANULE);
    assert_eq!(next.as_ptr() as usize, block.as_ptr() as usize + LONG);
    // SAFETY: the run is new, and has `REST` bytes.
    unsafe { next.as_ptr().write_bytes(7, REST) };
    give(next);
    // SAFETY: the test owns the block.
    assert!(unsafe { arena::resize_run(block, (LONG + REST) / GRANULE) });
    use_and_free(block, LONG / 4096);
    assert_eq!(asks_for_huge_pages(long_block(false).1), Some(false));
}

/// Slabs in memory that a long block has left give their empty pages back.
#[test]
fn a_slab_in_a_huge_page_gives_pages_back() {
    if !alone("a_slab_in_a_huge_page_gives_pages_back") || !has_huge_pages() {
        return;
    }
    let (block, middle) = block_in_huge_pages();
    let end = block.as_ptr() as usize + LONG;
    // SAFETY: the test owns the block, and does not use it afterwards.
    unsafe { free_run(block) };
    let cache = KmemCache::new("in a block", Layout::from_size_align(256, 8).unwrap()).unwrap();
    let mut objects: Vec<_> = (0..LONG / 256).map(|_| cache.alloc().unwrap()).collect();
    let inside = objects
        .iter()
        .filter(|object| (middle - MIB..end).contains(&(object.as_ptr() as usize)));
    assert!(inside.count() > LONG / 512);
    assert_eq!(asks_for_huge_pages(middle), Some(true));
    let before = resident();
    // One object of each slab stays, so that no slab goes back whole.
    for (nth, object) in objects.drain(..).enumerate() {
        if !nth.is_multiple_of(256) {
            // SAFETY: the object is of this cache, and is not used afterwards.
            unsafe { cache.free(object) };
        }
    }
    let shepherd = Shepherd::new();
    let begun = Instant::now();
    while before.saturating_sub(resident()) < 4 * MIB {
        assert!(begun.elapsed().as_secs() < 20, "the pages stay");
        shepherd.tick();
        sleep(Duration::from_millis(100));
    }
    assert_eq!(asks_for_huge_pages(middle), Some(false));
}

/// The pages of a block that has huge pages move, and what is mapped where they were has small
/// ones.
#[test]
fn a_long_block_with_huge_pages_moves() {
    if !alone("a_long_block_with_huge_pages_moves") || !has_huge_pages() {
        return;
    }
    let (block, middle) = block_in_huge_pages();
    // SAFETY: the test owns the block, and does not use its old address afterwards.
    let moved = unsafe { move_run(block, 2 * LONG) }.expect("a moved block");
    // SAFETY: the test owns the block, which has `LONG` bytes and more.
    let bytes = unsafe { std::slice::from_raw_parts(moved.as_ptr(), LONG) };
    assert!(bytes.iter().all(|&byte| byte == 7));
    assert_eq!(asks_for_huge_pages(middle), Some(false));
    // SAFETY: the test gives the block up.
    assert!(unsafe { arena::free_huge(moved.as_ptr()) });
}

/// A part of a block goes back, and then a part of the free memory.
#[test]
fn a_purge_splits_no_huge_page_of_free_memory() {
    if !alone("a_purge_splits_no_huge_page_of_free_memory") || !has_huge_pages() {
        return;
    }
    let (block, middle) = block_in_huge_pages();
    let whole = |field| smaps(middle, field).unwrap();
    if whole("AnonHugePages:") != whole("Rss:") {
        eprintln!("left out: the kernel has no free huge pages");
        return;
    }
    // The rest of the third huge page stays in use.
    let cut = middle + 4 * MIB - block.as_ptr() as usize;
    // SAFETY: the test owns the block.
    assert!(unsafe { arena::resize_run(block, cut / GRANULE) });
    arena::trim();
    assert_eq!(asks_for_huge_pages(middle), Some(true));
    assert_eq!(asks_for_huge_pages(middle + 4 * MIB), Some(false));
    let before = resident();
    // More has to go back than the half that has small pages.
    arena::set_dirty_limit(Some(cut - 3 * MIB / 2));
    // SAFETY: as above.
    unsafe { arena::free_block_run(block) };
    let less = before - resident();
    assert!((2 * MIB..5 * MIB).contains(&less), "{less} bytes went back");
    assert_eq!(whole("AnonHugePages:"), whole("Rss:"));
}

/// Blocks that grow by moving their pages take a mapping while they live, and leave none behind.
#[test]
fn moved_blocks_leave_no_mappings_behind() {
    if !alone("moved_blocks_leave_no_mappings_behind") {
        return;
    }
    const BLOCKS: usize = 60;
    let mut most = 0;
    for round in 0..6 {
        let runs: Vec<_> = (0..BLOCKS)
            .map(|nth| take(32 + (nth + round) % 9))
            .collect();
        for &run in &runs {
            // SAFETY: the run is new.
            unsafe { run.as_ptr().write(7) };
        }
        let moved: Vec<_> = runs
            .iter()
            // SAFETY: the test owns the run, and does not use its old address afterwards.
            .map(|&run| unsafe { move_run(run, 64 * GRANULE) }.expect("a moved block"))
            .collect();
        // Other blocks use the addresses that the moved ones left.
        let others: Vec<_> = (0..BLOCKS).map(|nth| take(9 + nth % 7)).collect();
        for &run in &others {
            // SAFETY: the run is new.
            unsafe { run.as_ptr().write(7) };
        }
        most = most.max(mappings());
        for (nth, block) in moved.into_iter().enumerate() {
            // SAFETY: the test owns the block, which has a first byte.
            assert_eq!(unsafe { block.as_ptr().read() }, 7, "{nth}");
            // SAFETY: the test gives the block up.
            unsafe {
                if !arena::free_huge(block.as_ptr()) {
                    free_run(block);
                }
            }
        }
        others.into_iter().for_each(give);
    }
    let left = mappings();
    assert!(left < 50, "{left} mappings are left, and there were {most}");
    assert!(most < 50 + BLOCKS, "{most} mappings");
}

/// Real-time programs lock their memory. What they free must go back all the same.
#[test]
fn locked_memory_goes_back() {
    if !alone("locked_memory_goes_back") {
        return;
    }
    // SAFETY: locks this process's memory, and changes no content.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) } != 0 {
        eprintln!("left out: the process may not lock its memory");
        return;
    }
    let own = vec![1u8; 2 * MIB];
    let page = own.as_ptr().wrapping_add(MIB) as usize / 4096 * 4096;
    // `MADV_DONTNEED_LOCKED`, since Linux 5.18.
    // SAFETY: the page lies within the vector, which is not read afterwards.
    if unsafe { libc::madvise(page as *mut libc::c_void, 4096, 24) } != 0 {
        eprintln!("left out: the kernel gives locked memory back only with its addresses");
        return;
    }
    let before = resident();
    let runs: Vec<_> = (0..10).map(|_| take(160)).collect();
    for &run in &runs {
        // SAFETY: the test owns the run, which has 160 granules.
        unsafe { run.as_ptr().write_bytes(1, 160 * GRANULE) };
    }
    assert!(resident() > before + 90 * MIB);
    runs.into_iter().for_each(give);
    arena::trim();
    let left = resident().saturating_sub(before) / MIB;
    assert!(left < 20, "{left} MiB stay");
    let again = alloc_run(160, 0, LARGE, false).unwrap();
    // SAFETY: the test owns the run, which has 160 granules.
    let bytes = unsafe { std::slice::from_raw_parts(again.start.as_ptr(), 160 * GRANULE) };
    assert!(!again.zeroed || bytes.iter().all(|&byte| byte == 0));
}
