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

fn class(size: usize) -> Info {
    let name = format!("kmalloc-{size:05}");
    caches().find(|info| info.name() == name).expect(&name)
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
    for size in (32_769..=512 << 10).step_by(3_001) {
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

#[test]
fn free_large_blocks_take_bounded_memory() {
    let _turn = turn();
    for size in [65_536, 131_072, 262_144, 524_288] {
        let info = class(size);
        let blocks: Vec<_> = (0..200).map(|_| take(size)).collect();
        blocks.into_iter().for_each(|block| give(block, size));
        let usage = info.usage();
        // At most 1 MiB on each CPU that this thread was on, and as much at the node.
        let cpus = usage.cpu_sheaves.div_ceil(2).max(1);
        let bytes = usage.slabs * size;
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
