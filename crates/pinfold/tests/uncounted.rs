//! Programs that allocate and count nothing. The one test has the process to itself, since any
//! counter maps the counters' units.

use pinfold::counter::EventCounter;
use pinfold::page;
use pinfold::slab::{KmemCache, kmalloc};
use std::alloc::Layout;

/// Bytes of address space that the process has mapped.
fn mapped() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("VmSize:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<usize>().unwrap() << 10
}

#[test]
fn allocating_maps_no_counters() {
    assert!(kmalloc::init());
    let cache = KmemCache::new("uncounted", Layout::new::<[u64; 64]>()).unwrap();
    for _ in 0..2 {
        let objects: Vec<_> = (0..10_000).map(|_| cache.alloc().unwrap()).collect();
        let blocks: Vec<_> = (0..10_000).map(|n| kmalloc::alloc(n % 2000 + 1)).collect();
        let huge = page::alloc_huge(8 << 20, 4096).unwrap();
        // SAFETY: each came from where it goes to, and is not used afterwards.
        unsafe {
            objects.into_iter().for_each(|object| cache.free(object));
            for (n, block) in blocks.into_iter().enumerate() {
                kmalloc::free_class(block, kmalloc::class_of(n % 2000 + 1));
            }
            assert!(page::free_huge(huge.as_ptr()));
        }
        assert!(cache.statistics().alloc_slowpath > 0);
        assert!(page::held() > 0 && page::held_peak() >= page::held() + (8 << 20));
        cache.shrink().unwrap_or(0);
    }

    let before = mapped();
    let counter = EventCounter::new();
    counter.inc();
    assert_eq!(counter.sum(), 1);
    // The units are at least 256 KiB for each of one CPU and what all CPUs share.
    assert!(mapped() >= before + (512 << 10), "the units were there");
}
