//! What Rust programs ask of the allocator besides allocating and freeing: growing and shrinking in
//! place, and zeroed blocks.

#[path = "../../pinfold/tests/common/again.rs"]
mod again;

use again::passes;
use std::alloc::{GlobalAlloc, Layout};
use std::os::unix::process::CommandExt;

#[global_allocator]
static ALLOCATOR: pinfold_malloc::Pinfold = pinfold_malloc::Pinfold;

#[test]
fn debugged_blocks_grow_in_place() {
    for setting in ["FZP", "FZPU"] {
        passes("grows_exactly", |command| {
            command.env("PINFOLD_SLAB_DEBUG", setting);
        });
    }
}

#[test]
#[ignore = "a program for the test above"]
fn grows_exactly() {
    for first in [20usize, 100, 1000, 20_000] {
        let mut bytes: Vec<u8> = Vec::with_capacity(first);
        for more in 1..200 {
            bytes.resize(bytes.capacity(), 1);
            bytes.reserve_exact(more % 9);
        }
        assert!(bytes.iter().all(|&byte| byte == 1));
        while bytes.len() > 1 {
            bytes.truncate(bytes.len() * 7 / 8);
            bytes.shrink_to_fit();
            assert!(bytes.iter().all(|&byte| byte == 1));
        }
    }
}

#[test]
fn shrinking_never_fails() {
    passes("shrinks_when_nothing_is_left", |command| {
        let limit = libc::rlimit {
            rlim_cur: 400 << 20,
            rlim_max: 400 << 20,
        };
        let limited = move || {
            // SAFETY: `setrlimit` is a bare system call, which may be made between fork and exec.
            unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) };
            Ok(())
        };
        // SAFETY: the closure makes one system call.
        unsafe { command.env("PINFOLD_STATS", "").pre_exec(limited) };
    });
}

/// Takes all memory, in blocks of each kind (object, run, huge), and then shrinks a block of each
/// kind.
#[test]
#[ignore = "a program for the test above"]
fn shrinks_when_nothing_is_left() {
    // SAFETY: each block is written within its size, and freed once with its last layout.
    unsafe {
        let sizes = [1000, 30_000, 200_000, 5 << 20];
        let layouts = sizes.map(|size| Layout::from_size_align(size, 64).unwrap());
        let plain = sizes.map(|size| Layout::from_size_align(size, 8).unwrap());
        let blocks = [layouts, plain].map(|layouts| {
            layouts.map(|layout| {
                let block = ALLOCATOR.alloc(layout);
                assert!(!block.is_null());
                block.write_bytes(7, layout.size());
                (block, layout)
            })
        });
        let mut kept: *mut *mut u8 = std::ptr::null_mut();
        for size in [1 << 20, 30_000, 3_000, 300, 96, 64, 48, 32, 16] {
            let layout = Layout::from_size_align(size, 8).unwrap();
            loop {
                let block: *mut *mut u8 = ALLOCATOR.alloc(layout).cast();
                if block.is_null() {
                    break;
                }
                block.write(kept.cast());
                kept = block.cast();
            }
        }
        for (block, layout) in blocks.into_iter().flatten() {
            *libc::__errno_location() = 4711;
            let small = ALLOCATOR.realloc(block, layout, 40);
            assert!(!small.is_null(), "{layout:?}");
            assert_eq!(*libc::__errno_location(), 4711);
            assert!((0..40).all(|at| small.add(at).read() == 7));
            ALLOCATOR.dealloc(small, Layout::from_size_align(40, layout.align()).unwrap());
        }
        // The process has no memory left for the harness to report with.
        libc::write(1, c"1 passed\n".as_ptr().cast(), 9);
        libc::_exit(0);
    }
}

/// Returns how many bytes of this process are resident.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

#[test]
fn zeroes_of_fresh_memory_are_not_written() {
    for align in [8, 64, 4096, 1 << 16, 1 << 21] {
        let layout = Layout::from_size_align(256 << 20, align).unwrap();
        let before = resident();
        // SAFETY: the reads lie in the block, which is freed with its layout.
        unsafe {
            let block = ALLOCATOR.alloc_zeroed(layout);
            assert!(!block.is_null() && (block as usize).is_multiple_of(align));
            let more = resident().saturating_sub(before);
            assert!(more < 64 << 20, "{align}: {more}");
            assert!(
                [0, 4096, (256 << 20) - 1]
                    .iter()
                    .all(|&at| block.add(at).read() == 0)
            );
            ALLOCATOR.dealloc(block, layout);
        }
        let small = Layout::from_size_align(3000, align).unwrap();
        // SAFETY: each byte lies in the block, which is freed with its layout.
        unsafe {
            for _ in 0..3 {
                let block = ALLOCATOR.alloc_zeroed(small);
                assert!((0..3000).all(|at| block.add(at).read() == 0));
                block.write_bytes(9, 3000);
                ALLOCATOR.dealloc(block, small);
            }
        }
    }
}
