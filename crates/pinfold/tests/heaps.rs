//! Heaps: blocks of all sizes, the limit, and that all blocks go back at once.

#[path = "common/again.rs"]
mod again;

use pinfold::heaps::{Heap, HeapError};
use pinfold::memory;
use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::thread;

/// Sizes of each kind of block: small, a run, and a mapping.
const SIZES: [usize; 12] = [
    0,
    1,
    16,
    100,
    1000,
    1024,
    5000,
    40_000,
    65_536,
    70_000,
    3 << 20,
    63 << 20,
];

/// Writes a block's size into each of its first and last bytes.
fn mark(block: NonNull<u8>, size: usize) {
    // SAFETY: the caller owns the block of `size` bytes.
    unsafe {
        block.write_bytes(size as u8, size.min(4096));
        if size > 0 {
            block.add(size - 1).write(size as u8);
        }
    }
}

fn is_marked(block: NonNull<u8>, size: usize) -> bool {
    // SAFETY: the caller owns the block of `size` bytes, which `mark` wrote.
    let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), size) };
    let first = bytes.iter().take(4096).all(|&byte| byte == size as u8);
    first && bytes.last().is_none_or(|&last| last == size as u8)
}

#[test]
fn blocks_of_each_kind_are_aligned_apart_and_go_back() {
    let heap = Heap::new("kinds").unwrap();
    for _ in 0..3 {
        let blocks: Vec<_> = SIZES
            .iter()
            .map(|&size| (heap.alloc(size).unwrap(), size))
            .collect();
        for &(block, size) in &blocks {
            assert_eq!(block.as_ptr() as usize % 16, 0, "{size}");
            // SAFETY: the test owns the block.
            assert!(unsafe { heap.usable_size(block) } >= size);
            mark(block, size);
        }
        for &(block, size) in &blocks {
            assert!(is_marked(block, size), "{size}");
            // SAFETY: the test gives the block up.
            unsafe { heap.free(block) };
        }
    }
    heap.shrink().unwrap();
    assert_eq!(heap.held(), 0);
    assert!(heap.statistics().peak >= 66 << 20);
}

#[test]
fn zeroed_and_aligned_blocks() {
    let heap = Heap::new("zeroed").unwrap();
    for size in SIZES {
        let dirty = heap.alloc(size).unwrap();
        mark(dirty, size);
        // SAFETY: the test gives the block up.
        unsafe { heap.free(dirty) };
        let block = heap.alloc_zeroed(size).unwrap();
        // SAFETY: the test owns the block of `size` bytes.
        let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), size) };
        assert!(bytes.iter().all(|&byte| byte == 0), "{size}");
        // SAFETY: the test gives the block up.
        unsafe { heap.free(block) };
        for align in (0..21).map(|bit| 1usize << bit) {
            let block = heap.alloc_aligned(size, align).unwrap();
            assert_eq!(block.as_ptr() as usize % align, 0, "{size} at {align}");
            // SAFETY: the test gives the block up.
            unsafe { heap.free(block) };
        }
    }
    assert_eq!(heap.alloc_aligned(8, 3), None);
    let peak = heap.statistics().peak;
    for size in [1 << 46, isize::MAX as usize, usize::MAX] {
        assert_eq!(heap.alloc(size), None);
    }
    assert_eq!(heap.statistics().peak, peak);
    assert_eq!(heap.alloc_aligned(8, 1 << 63), None);
}

#[test]
fn a_resized_block_keeps_its_content_in_each_kind() {
    let heap = Heap::new("resized").unwrap();
    for from in SIZES {
        for to in SIZES {
            let block = heap.alloc(from).unwrap();
            mark(block, from);
            // SAFETY: the test owns the block, and uses the new address only.
            let block = unsafe { heap.realloc(block, to) }.unwrap();
            // SAFETY: the test owns the block.
            assert!(unsafe { heap.usable_size(block) } >= to);
            // SAFETY: the test owns the block of `to` bytes.
            unsafe { block.add(from.min(to)).write_bytes(1, to - from.min(to)) };
            let kept = from.min(to).min(4096);
            // SAFETY: the test owns the block of `to` bytes.
            let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), kept) };
            assert!(
                bytes.iter().all(|&byte| byte == from as u8),
                "{from} to {to}"
            );
            // SAFETY: the test gives the block up.
            unsafe { heap.free(block) };
        }
    }
}

/// What a heap holds never exceeds its limit, and memory that the heap keeps free serves before an
/// allocation fails.
#[test]
fn a_limit_holds_and_free_memory_serves_other_sizes() {
    let heap = Heap::builder("limited").limit(2 << 20).build().unwrap();
    for size in [64, 3000, 100_000] {
        let mut blocks = Vec::new();
        while let Some(block) = heap.alloc(size) {
            assert!(heap.held() <= 2 << 20);
            blocks.push(block);
        }
        // The rest is in sheaves of other CPUs, and around the blocks of a debugged heap.
        assert!(
            blocks.len() * size > 1 << 18,
            "{} blocks of {size}",
            blocks.len()
        );
        // SAFETY: the test gives the blocks up.
        blocks
            .into_iter()
            .for_each(|block| unsafe { heap.free(block) });
    }
    assert!(heap.statistics().refusals > 0);
    assert_eq!(heap.alloc(3 << 20), None);
    heap.set_limit(None);
    assert_eq!(heap.limit(), None);
    assert!(heap.alloc(3 << 20).is_some());
}

#[test]
fn a_refused_realloc_leaves_the_block() {
    let heap = Heap::builder("refused").limit(1 << 20).build().unwrap();
    let block = heap.alloc(1000).unwrap();
    mark(block, 1000);
    // SAFETY: the test owns the block.
    assert_eq!(unsafe { heap.realloc(block, 4 << 20) }, None);
    assert!(is_marked(block, 1000));
}

/// After the end of a heap, its memory serves others, and no block of another heap is touched.
#[test]
fn the_end_of_a_heap_frees_its_blocks_and_no_others() {
    if !again::alone("the_end_of_a_heap_frees_its_blocks_and_no_others", |_| {}) {
        return;
    }
    let other = Heap::new("other").unwrap();
    let kept: Vec<_> = SIZES
        .iter()
        .map(|&size| (other.alloc(size).unwrap(), size))
        .collect();
    kept.iter().for_each(|&(block, size)| mark(block, size));
    memory::trim();
    let before = memory::held();
    for round in 0..50 {
        let heap = Heap::new("ends").unwrap();
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for nth in 0..2000 {
                        let size = SIZES[nth % 10];
                        let block = heap.alloc(size).unwrap();
                        mark(block, size);
                        if nth % 3 == 0 {
                            // SAFETY: the test gives the block up.
                            unsafe { heap.free(block) };
                        }
                    }
                    heap.alloc(SIZES[11]).unwrap();
                });
            }
        });
        match round % 2 {
            0 => drop(heap),
            // SAFETY: no thread uses the heap or its blocks any more.
            _ => unsafe { heap.destroy() }.unwrap(),
        }
    }
    kept.iter()
        .for_each(|&(block, size)| assert!(is_marked(block, size), "{size}"));
    memory::trim();
    let after = memory::held();
    assert!(
        after <= before + (8 << 20),
        "{before} before, {after} after"
    );
}

/// Making and ending heaps uses numbers again.
#[test]
fn ten_thousand_heaps_one_after_the_other() {
    for _ in 0..10_000 {
        let heap = Heap::new("short").unwrap();
        heap.alloc(24).unwrap();
    }
}

#[test]
fn too_many_heaps_are_an_error() {
    if !again::alone("too_many_heaps_are_an_error", |_| {}) {
        return;
    }
    let mut heaps = Vec::new();
    let error = loop {
        match Heap::new("one of many") {
            Ok(heap) => heaps.push(heap),
            Err(error) => break error,
        }
    };
    assert_eq!(error, HeapError::TooMany);
    assert!(heaps.len() > 3000);
    // A heap without a number for a cache serves small blocks as runs.
    assert!(heaps[0].alloc(8).is_some() && heaps[0].held() == 64 << 10);
    assert!(heaps[0].alloc(100_000).is_some());
    heaps.truncate(100);
    assert!(heaps[0].alloc(8).is_some());
}

/// Blocks move between threads, and every block has one owner.
#[test]
fn threads_allocate_and_free_each_others_blocks() {
    let heap = Heap::new("shared").unwrap();
    let (send, receive) = std::sync::mpsc::sync_channel::<Vec<usize>>(4);
    let receive = Mutex::new(receive);
    thread::scope(|scope| {
        for _ in 0..2 {
            let send = send.clone();
            scope.spawn({
                let heap = &heap;
                move || {
                    for round in 0..200 {
                        let size = SIZES[round % 10];
                        let blocks: Vec<_> = (0..100).map(|_| heap.alloc(size).unwrap()).collect();
                        blocks.iter().for_each(|&block| mark(block, size));
                        let blocks = blocks.iter().map(|block| block.as_ptr() as usize);
                        send.send([size].into_iter().chain(blocks).collect())
                            .unwrap();
                    }
                }
            });
        }
        drop(send);
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Ok(blocks) = receive.lock().unwrap().recv() else {
                        return;
                    };
                    let distinct: BTreeSet<_> = blocks[1..].iter().collect();
                    assert_eq!(distinct.len(), 100);
                    for &block in &blocks[1..] {
                        let block = NonNull::new(block as *mut u8).unwrap();
                        assert!(is_marked(block, blocks[0]));
                        // SAFETY: the sender passed the block on.
                        unsafe { heap.free(block) };
                    }
                }
            });
        }
    });
    heap.shrink().unwrap();
    assert_eq!(heap.held(), 0);
}

/// The child of a fork uses and ends its copy of a heap.
#[test]
fn a_forked_child_has_the_heap() {
    let heap = Heap::new("forked").unwrap();
    let block = heap.alloc(500).unwrap();
    mark(block, 500);
    // SAFETY: the child makes only calls that malloc makes, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut good = is_marked(block, 500) && heap.alloc(70_000).is_some();
        // SAFETY: the child's copy of the block is not used any more.
        unsafe { heap.free(block) };
        good &= heap.shrink().is_ok() && heap.held() > 0;
        drop(heap);
        // SAFETY: ends the child without running the test harness's handlers.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = -1;
    // SAFETY: `status` is writable.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert!(is_marked(block, 500));
}
