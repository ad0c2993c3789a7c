//! Guard pages of hardened slabs leave a process half of the mappings that the kernel allows.

mod common;

use common::{give, take};
use pinfold::slab::KmemCache;
use std::alloc::Layout;
use std::fs;
use std::ptr::NonNull;

/// Objects of 64 KiB, so that a slab has one object and takes few pages of memory.
const SIZE: usize = 64 << 10;
const PER_SLAB: usize = 1;
/// With a higher limit, the test would take too much memory.
const MAX_LIMIT: usize = 70_000;

fn limit() -> Option<usize> {
    let text = fs::read_to_string("/proc/sys/vm/max_map_count").ok()?;
    text.trim().parse().ok()
}

fn maps() -> Vec<(usize, String)> {
    let text = fs::read_to_string("/proc/self/maps").unwrap();
    let parse = |line: &str| {
        let start = line.split('-').next().unwrap();
        let access = line.split(' ').nth(1).unwrap();
        (
            usize::from_str_radix(start, 16).unwrap(),
            access.to_string(),
        )
    };
    text.lines().map(parse).collect()
}

/// Returns how many of `objects` have a closed page above them, within the slab's length.
fn guarded(objects: &[NonNull<u8>]) -> usize {
    let maps = maps();
    let is_guarded = |object: &&NonNull<u8>| {
        let at = object.as_ptr() as usize;
        let above = maps.iter().skip_while(|(start, _)| *start <= at);
        let mut near = above.take_while(|(start, _)| start - at < 4 * SIZE);
        near.any(|(_, access)| access == "---p")
    };
    objects.iter().filter(is_guarded).count()
}

#[test]
fn guards_take_half_of_the_mappings_at_most() {
    let Some(limit) = limit().filter(|&limit| limit <= MAX_LIMIT) else {
        println!("left out: vm.max_map_count cannot be read or is above {MAX_LIMIT}");
        return;
    };
    /// Does nothing. An object with a constructor is not zeroed when it is freed, so its pages take
    /// no memory.
    unsafe fn leave(_: *mut u8) {}
    let builder = KmemCache::builder("guards", Layout::from_size_align(SIZE, 8).unwrap());
    // SAFETY: the objects are plain bytes, for which any content is valid.
    let cache = unsafe { builder.hardened(true).constructor(leave) }
        .build()
        .unwrap();
    let first = take(&cache, 30);
    assert_eq!(guarded(&first), 30);
    // A guard page takes two mappings, so this many guard pages would exceed half of the limit.
    let objects = take(&cache, (limit / 4 + 3000) * PER_SLAB);
    let count = maps().len();
    assert!(count < limit / 2 + 2000, "{count} of {limit} mappings");
    assert!(count > limit / 3, "{count} of {limit} mappings");
    give(&cache, first.into_iter().chain(objects));
    if cache.shrink().is_err() {
        return;
    }
    // The slabs gave their guard pages' mappings back, so new slabs have guard pages again.
    let count = maps().len();
    assert!(count < 2000, "{count} mappings are left");
    let again = take(&cache, (limit / 8) * PER_SLAB);
    assert_eq!(guarded(&again), again.len());
}
