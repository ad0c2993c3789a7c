//! Programs that allocate and count nothing. There is one test, because any counter in the process
//! would map the counters' units.

use pinfold::counter::EventCounter;
use pinfold::internal::arena;
use pinfold::internal::kmalloc;
use pinfold::slab::KmemCache;
use std::alloc::Layout;

/// Returns the bytes of address space that the process has mapped.
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
        let huge = arena::alloc_huge(8 << 20, 4096).unwrap();
        // SAFETY: the objects came from this cache, the blocks from `kmalloc` with these sizes, and
        // the huge block from `alloc_huge`. None is used after this.
        unsafe {
            objects.into_iter().for_each(|object| cache.free(object));
            for (n, block) in blocks.into_iter().enumerate() {
                kmalloc::free_class(block, kmalloc::class_of(n % 2000 + 1));
            }
            assert!(arena::free_huge(huge.as_ptr()));
        }
        assert!(cache.statistics().alloc_slowpath > 0);
        assert!(arena::held() > 0 && arena::held_peak() >= arena::held() + (8 << 20));
        cache.shrink().unwrap_or(0);
    }

    let before = mapped();
    let counter = EventCounter::new();
    counter.inc();
    assert_eq!(counter.sum(), 1);
    // A unit is at least 256 KiB. There is one for each CPU, at least one, and the shared unit.
    assert!(mapped() >= before + (512 << 10), "units were mapped before");
}
