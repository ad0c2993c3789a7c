//! The callers that debugging records in the first allocations of a process, made by many threads
//! at once.

use pinfold::slab::{DebugFlags, KmemCache};
use std::alloc::Layout;
use std::sync::Barrier;
use std::thread;

#[test]
fn every_thread_records_its_callers_from_its_first_allocation_on() {
    const THREADS: usize = 8;
    let cache = KmemCache::builder("first_callers", Layout::from_size_align(64, 8).unwrap())
        .debug(DebugFlags::POISON | DebugFlags::USER)
        .build()
        .unwrap();
    let start = Barrier::new(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                start.wait();
                let object = cache.alloc().unwrap();
                // No thread allocates what another wrote over.
                start.wait();
                // SAFETY: the object is of this cache, and nobody else has it.
                unsafe {
                    cache.free(object);
                    // The free object is the cache's memory; the report of this write names callers.
                    object.as_ptr().write_volatile(1);
                }
            });
        }
    });
    let mut reports = Vec::new();
    cache
        .validate_with(|report| reports.push(report.to_string()))
        .unwrap_err();
    for report in &reports {
        let (allocated, freed) = report.split_once("freed by thread").unwrap();
        let named = |part: &str| part.contains("slab_debug_first");
        assert!(
            named(allocated) && named(freed),
            "a caller is missing:\n{report}"
        );
    }
}
