//! The size classes above 32 KiB: the CPU's sheaves serve them, in bounded memory, and blocks are
//! zeroed only if they must be.

mod common;

use pinfold::internal::kmalloc;
use pinfold::slab::{Info, caches, shrink_all};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Runs one test at a time, because the classes belong to the process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(kmalloc::init());
    turn
}

/// Returns the cache of the class for `size` bytes. Makes the cache if it does not exist yet.
fn class(size: usize) -> Info {
    give(take(size), size);
    let name = format!("kmalloc-{:05}", room(size));
    caches().find(|info| info.name() == name).expect(&name)
}

/// Returns the bytes of a block that is allocated for `size` bytes.
fn room(size: usize) -> usize {
    kmalloc::size_of_class(kmalloc::class_of(size))
}

/// Returns whether the class is neither debugged nor hardened. Those classes have no sheaves, or
/// different ones.
fn is_plain(info: &Info) -> bool {
    info.debug_flags().is_none() && !info.is_hardened()
}

fn take(size: usize) -> *mut u8 {
    let block = kmalloc::alloc(size);
    assert!(!block.is_null(), "{size}");
    block
}

fn give(block: *mut u8, size: usize) {
    // SAFETY: every caller took a block of this size and gives it up.
    unsafe { kmalloc::free_class(block, kmalloc::class_of(size)) };
}

fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = status.split(' ').nth(1).unwrap().parse().unwrap();
    pages * page_size()
}

fn page_size() -> usize {
    // SAFETY: `sysconf` has no preconditions.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

#[test]
fn every_size_has_room_and_is_writable() {
    let _turn = turn();
    for size in (32_769..=kmalloc::MAX_CLASS_SIZE).step_by(3_001) {
        let blocks: Vec<_> = (0..9).map(|_| take(size)).collect();
        for (nth, &block) in blocks.iter().enumerate() {
            // SAFETY: the test owns the block, which has `size` bytes.
            unsafe { block.write_bytes(nth as u8, size) };
        }
        for (nth, &block) in blocks.iter().enumerate() {
            // SAFETY: the test owns the block, and wrote its `size` bytes above.
            let bytes = unsafe { std::slice::from_raw_parts(block, size) };
            assert!(bytes.iter().all(|&byte| byte == nth as u8), "{size}");
            give(block, size);
        }
    }
}

#[test]
fn sheaves_serve_large_blocks() {
    let _turn = turn();
    for size in [40_960, 65_536, 131_072, 262_144, 524_288] {
        let info = class(size);
        if !is_plain(&info) {
            return;
        }
        give(take(size), size);
        let before = info.statistics();
        // The bound allows for a few moves of the thread to another CPU.
        (0..1000).for_each(|_| give(take(size), size));
        let after = info.statistics();
        let slow = after.alloc_slowpath - before.alloc_slowpath;
        assert!(slow < 50, "{size}: {slow} of 1000 allocations");
    }
}

/// The caches of processors choose a place by the address, and hold few lines of one place. So
/// arrays that begin at the same line of a page would compete when a program walks them in step.
#[test]
fn blocks_of_a_size_begin_at_many_lines() {
    const LINES: usize = 64;
    let _turn = turn();
    for bits in 12..=19 {
        for size in [1 << bits, (1 << bits) + 16, 3 << (bits - 1)] {
            let info = class(size.min(kmalloc::MAX_CLASS_SIZE));
            if !is_plain(&info) || size > kmalloc::MAX_CLASS_SIZE {
                continue;
            }
            let blocks: Vec<_> = (0..16).map(|_| take(size)).collect();
            let mut at = [0; LINES];
            blocks
                .iter()
                .for_each(|&block| at[block as usize / 64 % LINES] += 1);
            blocks.into_iter().for_each(|block| give(block, size));
            // Processors of today have 8 ways or more in each set of the first cache.
            assert!(at.iter().all(|&blocks| blocks <= 6), "{size}: {at:?}");
        }
    }
}

#[test]
fn free_large_blocks_take_bounded_memory() {
    let _turn = turn();
    for size in [120_000, 131_072, 262_144, 524_288] {
        let info = class(size);
        let blocks: Vec<_> = (0..200).map(|_| take(size)).collect();
        blocks.into_iter().for_each(|block| give(block, size));
        let usage = info.usage();
        // At most 1 MiB on each CPU that this thread was on, and as much at the node.
        let cpus = usage.cpu_sheaves.div_ceil(2).max(1);
        let bytes = usage.slabs * room(size).next_multiple_of(64 << 10);
        assert!(bytes <= (cpus + 2) << 20, "{size}: {usage:?}");
    }
}

#[test]
fn zeroed_blocks_are_zeroed_and_fresh_ones_are_not_touched() {
    let _turn = turn();
    const SIZE: usize = 524_288;
    const COUNT: usize = 64;
    let class_of = kmalloc::class_of(SIZE);
    // Gives used memory back, so that it reads as zeroes when it is mapped again.
    let plain = is_plain(&class(SIZE)) && shrink_all().is_ok();
    let before = resident();
    let fresh = || (0..COUNT).map(|_| kmalloc::alloc_zeroed(class_of, SIZE));
    let blocks: Vec<_> = fresh().collect();
    let grown = resident().saturating_sub(before);
    assert!(!plain || grown < COUNT * SIZE / 4, "{grown} bytes");
    for &block in &blocks {
        // SAFETY: the test owns the block, which has `SIZE` bytes.
        unsafe { block.write_bytes(0xa5, SIZE) };
    }
    blocks.into_iter().for_each(|block| give(block, SIZE));
    let blocks: Vec<_> = fresh().collect();
    for &block in &blocks {
        // SAFETY: the test owns the block, which has `SIZE` bytes.
        let bytes = unsafe { std::slice::from_raw_parts(block, SIZE) };
        assert!(bytes.iter().all(|&byte| byte == 0));
    }
    blocks.into_iter().for_each(|block| give(block, SIZE));
    // A block that was allocated without zeroes is not fresh any more.
    let block = take(SIZE);
    // SAFETY: the test owns the block, which has `SIZE` bytes.
    unsafe { block.write_bytes(0xa5, SIZE) };
    give(block, SIZE);
    let blocks: Vec<_> = fresh().collect();
    for &block in &blocks {
        // SAFETY: the test owns the block, and `at` is within its `SIZE` bytes.
        assert!((0..SIZE).all(|at| unsafe { block.add(at).read() } == 0));
    }
    blocks.into_iter().for_each(|block| give(block, SIZE));
}

/// A barn holds what a program frees and allocates again and again, beyond its usual bound.
#[test]
fn objects_that_come_back_stay_in_the_barn() {
    let _turn = turn();
    let info = class(256);
    if !is_plain(&info) {
        return;
    }
    common::stay_on_one_cpu();
    // Takes and gives back 1.2 MiB. Returns how many objects went to slabs.
    let pass = || {
        let before = info.statistics().flushed;
        let blocks: Vec<_> = (0..5000).map(|_| take(256)).collect();
        blocks.into_iter().for_each(|block| give(block, 256));
        info.statistics().flushed - before
    };
    let mut flushed = pass();
    assert!(flushed > 2000);
    for _ in 0..10 {
        flushed = pass();
    }
    assert_eq!(flushed, 0);
}
