//! The callers that debugging records in a process's first allocations, when many threads make them
//! at once.

use pinfold::slab::{DebugFlags, KmemCache};
use std::alloc::Layout;
use std::sync::Barrier;
use std::thread;

#[test]
#[cfg_attr(
    target_env = "musl",
    ignore = "the loader names no addresses of a static program"
)]
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
                // So that no thread is given an object that another thread wrote to below.
                start.wait();
                // SAFETY: the object came from this cache, and only this thread has it.
                unsafe {
                    cache.free(object);
                    // The cache's memory stays mapped. The report of this write names the callers.
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
