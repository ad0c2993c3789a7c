//! A thread allocates a million objects and frees nine in ten, at random. Measures how much memory
//! stays resident around the rest.

use anyhow::{Result, ensure};
use core::ptr::null_mut;
use pinfold_lab::MallocApi;
use std::thread;
use std::time::Duration;

use super::Sizes;
use super::child::{random_below, resident};

const OBJECTS: usize = 1_000_000;
/// Twenty sizes, equally frequent.
const SIZES: [usize; 20] = [
    16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 400, 512, 640, 768, 1024, 1536, 2048,
];

/// The objects' addresses, in memory that does not come from an allocator.
struct Table(*mut *mut u8);

impl Table {
    fn new() -> Result<Table> {
        let size = OBJECTS * size_of::<*mut u8>();
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: maps new memory at an address that the kernel chooses, so no existing memory
        // changes.
        let at = unsafe { libc::mmap(null_mut(), size, protection, flags, -1, 0) };
        ensure!(at != libc::MAP_FAILED, "no memory for the table of objects");
        Ok(Table(at.cast()))
    }

    fn objects(&mut self) -> &mut [*mut u8] {
        // SAFETY: the mapping holds `OBJECTS` zeroed pointers, and `&mut self` is the only
        // reference to it.
        unsafe { std::slice::from_raw_parts_mut(self.0, OBJECTS) }
    }
}

/// Allocates, frees and waits. Returns the resident memory beyond the baseline right after the
/// frees, and after the wait.
pub fn measure<A: MallocApi>(settle: Duration) -> Result<Sizes> {
    let mut table = Table::new()?;
    let mut random = 0x9e37_79b9_7f4a_7c15;
    A::enter_thread();
    let baseline = resident()?;
    for object in table.objects() {
        let size = SIZES[random_below(&mut random, SIZES.len())];
        *object = A::malloc(size).cast();
        assert!(!object.is_null(), "the subject has no memory");
        // SAFETY: `malloc` returned the object just now, with at least `size` bytes.
        unsafe { object.write_bytes(0xa5, size) };
    }
    for object in table.objects() {
        if random_below(&mut random, 10) != 0 {
            // SAFETY: the object came from `A`, nothing uses it, and the loop visits it once.
            unsafe { A::free(object.cast()) };
        }
    }
    let after = resident()?;
    thread::sleep(settle);
    let settled = resident()?;
    Ok(Sizes {
        rss_bytes: after.saturating_sub(baseline),
        baseline_bytes: baseline,
        settled_rss_bytes: settled.saturating_sub(baseline),
    })
}
