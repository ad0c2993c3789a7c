//! A million objects of which nine in ten go, at random: what stays resident around the rest.

use crate::subjects::MallocApi;
use anyhow::{Result, ensure};
use core::ptr::null_mut;
use std::thread;
use std::time::Duration;

use super::Sizes;
use super::child::{random_below, resident};

const OBJECTS: usize = 1_000_000;
/// Twenty sizes, as many objects of each.
const SIZES: [usize; 20] = [
    16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 400, 512, 640, 768, 1024, 1536, 2048,
];

/// The objects' addresses, in memory that is no allocator's.
struct Table(*mut *mut u8);

impl Table {
    fn new() -> Result<Table> {
        let size = OBJECTS * size_of::<*mut u8>();
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: a new mapping, of which nobody knows.
        let at = unsafe { libc::mmap(null_mut(), size, protection, flags, -1, 0) };
        ensure!(at != libc::MAP_FAILED, "no memory for the table");
        Ok(Table(at.cast()))
    }

    fn objects(&mut self) -> &mut [*mut u8] {
        // SAFETY: the mapping has that many, zeroed, and is this table's.
        unsafe { std::slice::from_raw_parts_mut(self.0, OBJECTS) }
    }
}

/// Allocates, frees, waits; what is resident beyond the baseline right after the frees, and when it has settled.
pub fn measure<A: MallocApi>(settle: Duration) -> Result<Sizes> {
    let mut table = Table::new()?;
    let mut random = 0x9e37_79b9_7f4a_7c15;
    A::enter_thread();
    let baseline = resident()?;
    for object in table.objects() {
        let size = SIZES[random_below(&mut random, SIZES.len())];
        *object = A::malloc(size).cast();
        assert!(!object.is_null(), "no memory");
        // SAFETY: the object is ours, and that large.
        unsafe { object.write_bytes(0xa5, size) };
    }
    for object in table.objects() {
        if random_below(&mut random, 10) != 0 {
            // SAFETY: it came from `A`, and nobody uses it.
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
