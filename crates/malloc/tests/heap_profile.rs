//! Heap profiles of a Rust program: the estimates against exact sums, and what happens to a sampled
//! block.

use pinfold_malloc::Pinfold;
use pinfold_malloc::heap_profile::{self, Totals};
use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

// Only the tests' own calls are sampled: the harness's allocator is another one.
static ONE: Mutex<()> = Mutex::new(());

/// A profile that is on, and what it said before.
struct Profile {
    before: Totals,
    _one: MutexGuard<'static, ()>,
}

impl Profile {
    fn start(interval: u64) -> Profile {
        let one = ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        assert!(heap_profile::start(interval));
        Profile {
            before: heap_profile::totals(),
            _one: one,
        }
    }

    /// Returns what was counted since the start.
    fn totals(&self) -> Totals {
        let (now, before) = (heap_profile::totals(), self.before);
        Totals {
            samples: now.samples - before.samples,
            freed_samples: now.freed_samples - before.freed_samples,
            bytes: now.bytes - before.bytes,
            freed_bytes: now.freed_bytes - before.freed_bytes,
            dropped: now.dropped - before.dropped,
        }
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        heap_profile::stop();
    }
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 16).unwrap()
}

fn alloc(size: usize) -> *mut u8 {
    // SAFETY: the callers pass a size above 0.
    let block = unsafe { Pinfold.alloc(layout(size)) };
    assert!(!block.is_null());
    // SAFETY: the block has `size` bytes.
    unsafe { block.write_bytes(size as u8, size) };
    block
}

/// # Safety
///
/// The block was allocated for `size` bytes, and is not used any more.
unsafe fn free(block: *mut u8, size: usize) {
    // SAFETY: the block has `size` bytes, and the caller gives it up.
    unsafe {
        assert_eq!(*block, size as u8);
        Pinfold.dealloc(block, layout(size));
    }
}

/// Asserts that an estimate from samples is within six standard deviations. `interval` bytes a
/// sample give a variance of at most `exact * interval`, for blocks smaller than the interval.
#[track_caller]
fn assert_near(estimate: u64, exact: u64, interval: u64) {
    let deviation = (exact as f64 * interval as f64).sqrt();
    let off = estimate.abs_diff(exact) as f64;
    assert!(
        off < 6.0 * deviation,
        "{estimate} for {exact}, deviation {deviation}"
    );
}

#[track_caller]
fn assert_all_freed(totals: Totals) {
    let freed = (totals.freed_samples, totals.freed_bytes);
    assert_eq!(freed, (totals.samples, totals.bytes));
}

#[test]
fn estimates_agree_with_exact_sums_for_mixed_sizes() {
    const INTERVAL: u64 = 16 << 10;
    for size in [16, 100, 1000, 5000, 40_000, 200_000, 1 << 20] {
        let profile = Profile::start(INTERVAL);
        let count = (16 << 20) / size;
        let blocks: Vec<_> = (0..count).map(|_| alloc(size)).collect();
        for (nth, &block) in blocks.iter().enumerate() {
            if nth % 4 != 0 {
                // SAFETY: the block is one of the above, and is used no more.
                unsafe { free(block, size) };
            }
        }
        let totals = profile.totals();
        let (all, freed) = (
            (count * size) as u64,
            ((count - count.div_ceil(4)) * size) as u64,
        );
        let deviation = INTERVAL.max(size as u64 / 8);
        assert_near(totals.bytes, all, deviation);
        assert_near(totals.freed_bytes, freed, deviation);
        assert_eq!(totals.dropped, 0);
        for &block in blocks.iter().step_by(4) {
            // SAFETY: these blocks were not freed above.
            unsafe { free(block, size) };
        }
        assert_all_freed(profile.totals());
    }
}

#[test]
fn samples_at_the_default_interval_are_limited_and_not_biased() {
    // At a pair in 3 ns, the mean would be 170 MB. It does not grow above 512 MiB.
    const SIZE: usize = 2 << 10;
    let profile = Profile::start(heap_profile::DEFAULT_INTERVAL);
    let begin = Instant::now();
    let mut exact = 0;
    while begin.elapsed() < Duration::from_millis(700) {
        for _ in 0..1000 {
            // SAFETY: the size is above 0, and the block is used no more.
            unsafe { Pinfold.dealloc(black_box(Pinfold.alloc(layout(SIZE))), layout(SIZE)) };
        }
        exact += 1000 * SIZE as u64;
    }
    let (totals, seconds) = (profile.totals(), begin.elapsed().as_secs_f64());
    // At first, each CPU takes some samples more.
    let most = 2.0 * 4000.0 * seconds + 2000.0;
    assert!((totals.samples as f64) < most, "{totals:?} in {seconds} s");
    let mean = (exact as f64 / seconds / 4000.0) as u64;
    assert_near(
        totals.bytes,
        exact,
        mean.max(heap_profile::DEFAULT_INTERVAL),
    );
    assert_eq!(totals.bytes, totals.freed_bytes);
}

#[test]
fn one_block_kept_of_a_hundred_that_are_freed_at_once_is_seen() {
    const INTERVAL: u64 = 8 << 10;
    let profile = Profile::start(INTERVAL);
    let mut kept = Vec::new();
    for _ in 0..20_000 {
        for _ in 0..99 {
            let block = black_box(alloc(64));
            // SAFETY: the block is used no more.
            unsafe { free(block, 64) };
        }
        kept.push(alloc(64));
    }
    let totals = profile.totals();
    let in_use = totals.bytes - totals.freed_bytes;
    assert_near(in_use, kept.len() as u64 * 64, INTERVAL);
    for block in kept {
        // SAFETY: the block was kept.
        unsafe { free(block, 64) };
    }
}

#[test]
fn a_sampled_block_is_a_block_like_any_other() {
    // At this interval, practically every block of more than 30 bytes is sampled.
    let profile = Profile::start(1);
    for align in [1, 16, 64, 4096, 65536, 1 << 21] {
        for size in [40, 64, 100, 4000, 33_000, 300_000, 700_000, 70 << 20] {
            let layout = Layout::from_size_align(size, align).unwrap();
            // SAFETY: each block is used within its size, and freed once.
            unsafe {
                let block = Pinfold.alloc(layout);
                assert!(!block.is_null() && (block as usize).is_multiple_of(align));
                *block.add(size - 1) = 7;
                Pinfold.dealloc(block, layout);
                let zeroed = Pinfold.alloc_zeroed(layout);
                assert!((0..size).step_by(997).all(|at| *zeroed.add(at) == 0));
                Pinfold.dealloc(zeroed, layout);
            }
        }
    }
    let totals = profile.totals();
    assert_eq!(totals.samples, 2 * 6 * 8);
    assert_all_freed(totals);
}

#[test]
fn a_resized_block_keeps_its_content_and_its_bytes() {
    let profile = Profile::start(1);
    let mut size = 30;
    let mut block = alloc(size);
    // SAFETY: the block has these bytes.
    unsafe { block.write(42) };
    for next in [
        12,
        16,
        40,
        1000,
        990,
        70_000,
        200_000,
        1 << 20,
        5 << 20,
        70 << 20,
        90 << 20,
        200 << 20,
        70 << 20,
        100,
    ] {
        // SAFETY: the block was allocated for `size` bytes.
        block = unsafe { Pinfold.realloc(block, layout(size), next) };
        size = next;
        // SAFETY: the block has at least one byte.
        assert!(!block.is_null() && unsafe { *block } == 42);
        let totals = profile.totals();
        assert_eq!(
            totals.bytes - totals.freed_bytes,
            size as u64,
            "after {next}"
        );
        assert_eq!(totals.samples - totals.freed_samples, 1, "after {next}");
    }
    // SAFETY: the block is used no more.
    unsafe { Pinfold.dealloc(block, layout(size)) };
    assert_all_freed(profile.totals());
}

/// Grows one block from `size` by `step` until it has `end` bytes. Returns the block, and how often
/// it stayed in its place.
fn grow(mut size: usize, step: usize, end: usize) -> (*mut u8, usize) {
    let mut in_place = 0;
    // SAFETY: the layout has a size, and each call gets the block of the last one with its size.
    unsafe {
        let mut block = Pinfold.alloc(layout(size));
        while size < end {
            let next = Pinfold.realloc(block, layout(size), size + step);
            assert!(!next.is_null());
            in_place += usize::from(next == block);
            (block, size) = (next, size + step);
        }
        (block, in_place)
    }
}

/// A buffer that grows in place far beyond the interval is shown with its size: the profile may be
/// off by what it counted before the first sample of the buffer. That is more than k intervals with
/// probability e^(−k), so the bounds below fail by chance once in 10^9 runs or less.
#[test]
fn a_growing_buffer_is_shown_with_its_size() {
    const INTERVAL: u64 = 1 << 20;
    const STEP: usize = 64 << 10;
    const END: usize = 48 << 20;
    const BUFFERS: u64 = 12;
    let profile = Profile::start(INTERVAL);
    let (mut sum, mut in_place) = (0, 0);
    for _ in 0..BUFFERS {
        let before = profile.totals();
        let (block, stayed) = grow(STEP, STEP, END);
        let after = profile.totals();
        let shown = (after.bytes - after.freed_bytes) - (before.bytes - before.freed_bytes);
        let off = shown.abs_diff(END as u64);
        assert!(
            off < 24 * INTERVAL,
            "a buffer of {END} bytes is shown with {shown}"
        );
        sum += shown;
        in_place += stayed;
        // SAFETY: the block is used no more.
        unsafe { Pinfold.dealloc(block, layout(END)) };
    }
    // Blocks that the kernel has moved are counted as new ones, which tells nothing about growth.
    assert!(in_place > 100, "{in_place} of the steps were in place");
    let deviation = INTERVAL as f64 * (BUFFERS as f64).sqrt();
    let off = sum as f64 - (BUFFERS * END as u64) as f64;
    assert!(
        off.abs() < 20.0 * deviation,
        "off by {off}, deviation {deviation}"
    );
    let totals = profile.totals();
    assert_eq!(totals.bytes, totals.freed_bytes);
}

/// Growth in place, moves and shrinking, in steps of any size: the mean over many buffers is the
/// truth, and no buffer is shown with many times its size.
#[test]
fn estimates_of_resized_buffers_are_not_biased() {
    const INTERVAL: u64 = 4 << 20;
    const ROUNDS: u64 = 1500;
    let profile = Profile::start(INTERVAL);
    let in_use = || {
        let totals = profile.totals();
        totals.bytes - totals.freed_bytes
    };
    for (step, end, last) in [
        (64 << 10, 1_900_000, 1_900_000),
        (20_000, 1_200_000, 1_200_000),
        (100_000, 1_900_000, 1_000_000),
    ] {
        let (mut shown, mut exact, mut squares) = (0, 0, 0.0);
        for _ in 0..ROUNDS {
            let before = in_use();
            let (mut block, _) = grow(600_000, step, end);
            let mut size = 600_000 + (end - 600_000).next_multiple_of(step);
            if last < size {
                // SAFETY: the block was allocated with this size.
                block = unsafe { Pinfold.realloc(block, layout(size), last) };
                assert!(!block.is_null());
                size = last;
            }
            let estimate = in_use() - before;
            (shown, exact) = (shown + estimate, exact + size as u64);
            squares += (estimate as f64 - size as f64).powi(2);
            // SAFETY: the block is used no more.
            unsafe { Pinfold.dealloc(block, layout(size)) };
        }
        assert_near(shown, exact, INTERVAL);
        // The variance of an estimate is at most size × interval. An error is at most about two
        // intervals, so the mean square of 1500 errors is close to the variance. A sample that
        // keeps its weight while its block grows has more than twice this variance.
        let most = exact as f64 * INTERVAL as f64;
        println!(
            "steps of {step}: {shown} for {exact}, variance {}",
            squares / most
        );
        assert!(
            squares < 1.5 * most,
            "steps of {step}: variance {}",
            squares / most
        );
    }
    let totals = profile.totals();
    assert_eq!(totals.bytes, totals.freed_bytes);
}

#[test]
fn frees_after_the_end_of_a_profile_count() {
    let profile = Profile::start(1);
    let blocks: Vec<_> = [30, 3000, 900_000].map(|size| (alloc(size), size)).into();
    assert!(heap_profile::stop() && !heap_profile::is_on());
    let samples = profile.totals().samples;
    let unseen = alloc(30);
    // SAFETY: the blocks are used no more.
    unsafe { free(unseen, 30) };
    for (block, size) in blocks {
        // SAFETY: the blocks are used no more.
        unsafe { free(block, size) };
    }
    let totals = profile.totals();
    assert_eq!((samples, totals.samples, totals.freed_samples), (3, 3, 3));
}

#[test]
fn blocks_survive_while_profiles_start_and_stop() {
    let profile = Profile::start(4096);
    thread::scope(|scope| {
        for seed in 1..5_usize {
            scope.spawn(move || {
                let mut random = seed;
                let mut blocks: Vec<(*mut u8, usize)> = Vec::new();
                for _ in 0..30_000 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    let size = 1 + (random >> 33) % (1 << (4 + (random >> 20) % 14));
                    if blocks.len() > 200 {
                        let (block, size) = blocks.swap_remove((random >> 40) % 200);
                        // SAFETY: the block was removed from the list.
                        unsafe { free(block, size) };
                    }
                    blocks.push((alloc(size), size));
                }
                for (block, size) in blocks {
                    // SAFETY: the block was in the list.
                    unsafe { free(block, size) };
                }
            });
        }
        for turn in 0..300 {
            heap_profile::stop();
            assert!(heap_profile::start(1000 + turn));
        }
    });
    let totals = profile.totals();
    assert!(totals.samples > 0);
    assert_all_freed(totals);
}

/// What `the_environment_starts_a_profile_and_names_its_file` runs in another process.
#[test]
#[ignore = "needs variables of the environment"]
fn is_profiled_from_the_start() {
    assert!(heap_profile::is_on());
    let before = heap_profile::totals();
    let blocks: Vec<_> = (0..1000).map(|_| alloc(1000)).collect();
    assert!(heap_profile::totals().samples > before.samples + 50);
    for block in blocks {
        // SAFETY: the block is one of the above, and is used no more.
        unsafe { free(block, 1000) };
    }
}

#[test]
fn the_environment_starts_a_profile_and_names_its_file() {
    let folder = std::env::temp_dir().join(format!("pinfold-heap-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "is_profiled_from_the_start", "--ignored"])
        .env("PINFOLD_HEAP", "4096")
        .env("PINFOLD_HEAP_FILE", folder.join("heap"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let file = folder.join(format!("heap.{}", child.id()));
    let output = child.wait_with_output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && out.contains("1 passed"), "{out}");
    assert!(std::fs::metadata(file).unwrap().len() > 4096);
    std::fs::remove_dir_all(folder).unwrap();
}

/// Other users may put links and FIFOs where a profile is written: their targets stay as they are,
/// and no write waits for a reader.
#[test]
fn planted_files_are_refused_and_stay_as_they_are() {
    use std::os::unix::ffi::OsStrExt;
    let _profile = Profile::start(1 << 20);
    let folder = std::env::temp_dir().join(format!("planted-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let c = |path: &std::path::Path| std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    let errno = || std::io::Error::last_os_error().raw_os_error();
    let (victim, link, fifo) = (
        folder.join("victim"),
        folder.join("link"),
        folder.join("fifo"),
    );
    std::fs::write(&victim, "precious").unwrap();
    std::os::unix::fs::symlink(&victim, &link).unwrap();
    // SAFETY: the path is a C string.
    assert_eq!(unsafe { libc::mkfifo(c(&fifo).as_ptr(), 0o600) }, 0);
    assert!(!heap_profile::write(&c(&link)));
    assert_eq!(errno(), Some(libc::ELOOP));
    assert!(!heap_profile::write(&c(&fifo)));
    assert_eq!(errno(), Some(libc::EINVAL));
    // What lies where the new file is written is removed, not followed.
    std::os::unix::fs::symlink(&victim, folder.join("own.new")).unwrap();
    let own = folder.join("own");
    assert!(heap_profile::write(&c(&own)) && heap_profile::write(&c(&own)));
    assert!(std::fs::metadata(&own).unwrap().len() > 4096);
    assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 4);
    std::fs::remove_dir_all(&folder).unwrap();
}
