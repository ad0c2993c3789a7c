//! A tracer that is attached to the probes sees sampled allocations and their frees.

mod probe;

use pinfold_malloc::{Pinfold, heap_profile};
use probe::{Probe, find, loaded};
use std::alloc::{GlobalAlloc, Layout};
use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;
use std::time::{Duration, Instant};

/// Attaches a counter to a probe of this process. Returns `None` if the system does not let it.
fn attach(probe: &Probe) -> Option<File> {
    let kind = std::fs::read_to_string("/sys/bus/event_source/devices/uprobe/type").ok()?;
    let path = std::ffi::CString::new("/proc/self/exe").unwrap();
    // The first words of `perf_event_attr`: type and size, config, config1 and config2.
    let mut attributes = [0_u64; 16];
    attributes[0] = kind.trim().parse::<u64>().unwrap() | 128 << 32;
    attributes[1] = probe.semaphore_at << 32;
    attributes[7] = path.as_ptr() as u64;
    attributes[8] = probe.at;
    // SAFETY: the attributes have the size that they say, and the path lives during the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            0,
            -1,
            -1,
            0,
        )
    };
    // SAFETY: the call has returned a new descriptor.
    (fd >= 0).then(|| unsafe { File::from_raw_fd(fd as i32) })
}

fn count(counter: &mut File) -> u64 {
    let mut bytes = [0; 8];
    counter.read_exact(&mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

/// Allocates and frees as many bytes as some samples need, partly on slow paths, which tick.
fn allocate() {
    for (size, count) in [(1000, 3000), (40_000, 40), (900_000, 4)] {
        let layout = Layout::from_size_align(size, 16).unwrap();
        // SAFETY: the layout has a size.
        let blocks: Vec<_> = (0..count)
            .map(|_| unsafe { Pinfold.alloc(layout) })
            .collect();
        for block in blocks {
            assert!(!block.is_null());
            // SAFETY: the block was allocated above with this layout, and is used no more.
            unsafe { Pinfold.dealloc(block, layout) };
        }
    }
}

/// Allocates until `is_done` returns true.
#[track_caller]
fn allocate_until(mut is_done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_done() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "nothing happened for a minute"
        );
        allocate();
    }
}

#[test]
fn a_tracer_sees_samples_while_it_is_attached() {
    allocate();
    let file = std::fs::read("/proc/self/exe").unwrap();
    let (alloc, free) = (find(&file, "alloc"), find(&file, "free"));
    let (Some(mut allocs), Some(mut frees)) = (attach(&alloc), attach(&free)) else {
        println!("skipped: this system does not let a process attach to its own probes");
        return;
    };
    allocate_until(|| count(&mut allocs) > 20 && count(&mut frees) > 20);
    assert!(count(&mut frees) <= count(&mut allocs));
    // Call stacks are not recorded for a tracer.
    assert!(!heap_profile::is_on());
    assert_eq!(heap_profile::totals().samples, 0);
    assert!(heap_profile::is_sampling());
    drop((allocs, frees));
    allocate_until(|| !heap_profile::is_sampling());

    // The next tracer gets the default interval, not that of a profile that has ended.
    assert!(heap_profile::start(1) && heap_profile::stop());
    let mut allocs = attach(&alloc).unwrap();
    allocate_until(heap_profile::is_sampling);
    let before = count(&mut allocs);
    allocate();
    let samples = count(&mut allocs) - before;
    assert!(samples < 1000, "{samples} of 3044 allocations");
}

// A tracer unwinds the stack from the probe.
#[test]
fn the_probes_have_unwind_information() {
    unsafe extern "C-unwind" {
        /// Returns the beginning of the function that the unwind information has for the
        /// instruction before `behind`, or null.
        fn _Unwind_FindEnclosingFunction(behind: *const u8) -> *const u8;
    }
    let file = std::fs::read("/proc/self/exe").unwrap();
    for name in ["alloc", "free"] {
        let probe = (loaded(&file) + find(&file, name).address) as *const u8;
        // SAFETY: the function only looks the address up.
        let found = unsafe { _Unwind_FindEnclosingFunction(probe.wrapping_add(1)) };
        // The function saves the frame pointer before the probe.
        let before = (probe as usize).wrapping_sub(found as usize);
        assert!(before < 16, "{name}: {probe:?}, not {found:?}");
    }
}
