//! Object caches as a user sees them, on the backend that `PINFOLD_RSEQ` selects.

mod common;

use common::again::alone;
use common::{give, take};
use pinfold::internal::arena::GRANULE;
use pinfold::shepherd::{self, Automatic, Shepherd};
use pinfold::slab::{Cache, CacheError, Handle, KmemCache, MAX_OBJECT_SIZE, shrink_all};
use std::alloc::Layout;
use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

#[test]
fn objects_are_aligned_disjoint_and_writable() {
    for (size, align) in [
        (1, 1),
        (8, 8),
        (24, 8),
        (40, 64),
        (100, 4),
        (4096, 4096),
        (5000, 8),
        (65536, 8),
    ] {
        let cache = KmemCache::new("disjoint", layout(size, align)).unwrap();
        let objects = take(&cache, 500);
        for (nth, object) in objects.iter().enumerate() {
            assert_eq!(object.as_ptr() as usize % align, 0);
            // SAFETY: the test owns the object, which has `size` bytes.
            unsafe { object.as_ptr().write_bytes(nth as u8, size) };
        }
        for (nth, object) in objects.iter().enumerate() {
            // SAFETY: the test owns the object, and wrote its `size` bytes above.
            let bytes = unsafe { std::slice::from_raw_parts(object.as_ptr(), size) };
            assert!(bytes.iter().all(|&byte| byte == nth as u8), "size {size}");
        }
        cache.validate().unwrap();
        give(&cache, objects);
        cache.validate().unwrap();
        cache.destroy().unwrap();
    }
}

/// Two threads that run on one CPU one after the other get such objects, and may write to them on
/// two CPUs from then on.
#[test]
fn small_objects_that_follow_each_other_share_no_cache_line() {
    for size in [8, 16, 24, 32, 40, 48, 64, 80, 112, 320] {
        let builder = KmemCache::builder("lines", layout(size, 8)).hardened(false);
        let cache = builder.build().unwrap();
        let objects = take(&cache, 8);
        for pair in objects.windows(2) {
            let [first, last] = [pair[0], pair[1]].map(|object| object.as_ptr() as usize);
            assert!(
                (first + size - 1) / 64 < last / 64,
                "{size} bytes: {first:#x} and {last:#x}"
            );
        }
        give(&cache, objects);
    }
}

#[test]
fn a_freed_object_is_given_out_again() {
    let cache = KmemCache::new("again", layout(64, 8)).unwrap();
    let first: HashSet<_> = take(&cache, 10_000).into_iter().collect();
    give(&cache, first.iter().copied());
    let slabs = cache.statistics().slabs;
    let second: HashSet<_> = take(&cache, 10_000).into_iter().collect();
    assert_eq!(first.len(), 10_000);
    assert!(second.is_subset(&first) || cache.statistics().slabs <= slabs + 2);
    give(&cache, second);
}

#[test]
fn bulk_calls_agree_with_single_ones() {
    let cache = KmemCache::new("bulk", layout(48, 8)).unwrap();
    let mut all = HashSet::new();
    for count in [0, 1, 2, 30, 126, 127, 250, 1000] {
        let mut objects = vec![std::ptr::null_mut(); count];
        assert_eq!(cache.alloc_bulk(&mut objects), count);
        assert!(
            objects
                .iter()
                .all(|&object| !object.is_null() && all.insert(object))
        );
    }
    let all: Vec<_> = all.into_iter().collect();
    // SAFETY: the objects came from this cache and are not used afterwards.
    unsafe { cache.free_bulk(&all) };
    cache.validate().unwrap();
    cache.destroy().unwrap();
}

#[test]
fn a_constructor_runs_once_per_object() {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    unsafe fn make(object: *mut u8) {
        MADE.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the cache's objects have 32 bytes.
        unsafe { object.write_bytes(0x5a, 32) };
    }
    // SAFETY: `make` writes the whole object and nothing else, and cannot unwind.
    let cache = unsafe { KmemCache::builder("made", layout(32, 8)).constructor(make) }
        .build()
        .unwrap();
    for _ in 0..3 {
        let objects = take(&cache, 1000);
        for object in &objects {
            // SAFETY: the constructor wrote the object when its slab was made.
            assert_eq!(unsafe { *object.as_ptr().add(31) }, 0x5a);
        }
        give(&cache, objects);
    }
    assert_eq!(
        MADE.load(Ordering::Relaxed),
        2048,
        "one slab of 64 KiB, made once"
    );
}

#[test]
fn destroy_reports_leaked_objects_and_keeps_them_usable() {
    let cache = KmemCache::new("leaky", layout(128, 8)).unwrap();
    let objects = take(&cache, 3);
    let leak = cache.destroy().unwrap_err();
    assert_eq!(leak.objects, 3);
    assert!(leak.to_string().contains("leaky") && leak.to_string().contains('3'));
    give(&leak.cache, objects);
    leak.cache.destroy().unwrap();
}

#[test]
fn shrink_gives_slabs_back() {
    let cache = KmemCache::new("shrinks", layout(256, 8)).unwrap();
    give(&cache, take(&cache, 5000));
    assert!(cache.statistics().slabs > 0);
    let released = cache.shrink().unwrap();
    assert!(released > 0);
    assert_eq!((cache.statistics().slabs, cache.in_use()), (0, 0));
    let used = take(&cache, 1);
    assert_eq!(cache.shrink().unwrap(), 0);
    give(&cache, used);
    assert!(shrink_all().unwrap() > 0);
}

#[test]
fn bad_layouts_are_refused() {
    let error = KmemCache::new("huge", layout(MAX_OBJECT_SIZE + 1, 8)).unwrap_err();
    assert_eq!(error, CacheError::TooLarge);
    assert!(error.to_string().contains("64 KiB"));
    assert!(KmemCache::new("steep", layout(8, 1 << 17)).is_err());
    assert!(KmemCache::new("", layout(0, 1)).is_ok());
    let long = "é".repeat(40);
    assert!(long.starts_with(KmemCache::new(&long, layout(8, 8)).unwrap().name()));
}

#[test]
fn numbers_of_destroyed_caches_are_used_again() {
    for _ in 0..10_000 {
        let cache = KmemCache::new("short-lived", layout(8, 8)).unwrap();
        drop(cache);
    }
}

#[test]
fn typed_handles_drop_their_values() {
    let counted = std::sync::Arc::new(());
    let cache = Cache::new("arcs").unwrap();
    let handle = cache.alloc(counted.clone()).unwrap();
    let other = cache.alloc(counted.clone()).unwrap();
    assert_eq!(std::sync::Arc::strong_count(&counted), 3);
    let sent = std::thread::scope(|scope| {
        scope
            .spawn(move || Handle::into_inner(handle))
            .join()
            .unwrap()
    });
    drop(sent);
    drop(other);
    assert_eq!(std::sync::Arc::strong_count(&counted), 1);
    cache.destroy().unwrap();
}

#[test]
fn alloc_node_serves_any_node_number() {
    let cache = KmemCache::new("nodes", layout(16, 8)).unwrap();
    let objects: Vec<_> = (0..9).map(|node| cache.alloc_node(node).unwrap()).collect();
    give(&cache, objects);
    cache.validate().unwrap();
}

/// Each fault ends the process, so it runs in a child: this test binary again, with the fault's
/// name.
#[test]
fn faults_end_the_process_and_are_named() {
    for (fault, words) in [
        ("double", "double free of 0x"),
        ("inside", "not the start of an object of cache faulty"),
        ("before", "not the start of an object of cache faulty"),
        ("foreign", "the address is not Pinfold's"),
        ("wrong", "the object belongs to cache other"),
        ("late", "freed before, or inside a block"),
    ] {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "commit_fault",
                "--nocapture",
                "--include-ignored",
            ])
            .env("FAULT", fault)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{fault}");
        assert!(error.contains(words), "{fault}: {error}");
        // The caller's stack, also for a fault that is found under a node's lock.
        assert!(error.contains("found by thread"), "{fault}: {error}");
    }
}

#[test]
#[ignore = "ends the process; run by faults_end_the_process_and_are_named"]
fn commit_fault() {
    let Ok(fault) = std::env::var("FAULT") else {
        return;
    };
    // A slab has 109 objects of 600 bytes, and room for three colors.
    let cache = KmemCache::new("faulty", layout(600, 8)).unwrap();
    let other = KmemCache::new("other", layout(600, 8)).unwrap();
    let object = cache.alloc().unwrap();
    let local = 0u64;
    let wrong = match fault.as_str() {
        "double" => {
            give(&cache, [object]);
            object
        }
        // SAFETY: offset 8 is within the object's 600 bytes.
        "inside" => unsafe { object.add(8) },
        // The first object of a slab with a color lies behind the slab's beginning.
        "before" => {
            let more = (0..2000).map(|_| cache.alloc().unwrap());
            let objects: Vec<_> = [object].into_iter().chain(more).collect();
            let all: HashSet<_> = objects.iter().copied().collect();
            let start = |object: &NonNull<u8>| object.as_ptr() as usize & !(GRANULE - 1);
            // All objects of the first slabs are in use.
            let mut starts = objects[..1000].iter().map(start);
            let wrong = |start: &NonNull<u8>| !all.contains(start);
            let found = starts.find_map(|at| NonNull::new(at as *mut u8).filter(wrong));
            found.unwrap()
        }
        "foreign" => NonNull::from(&local).cast(),
        // The slab goes back to the arena before the second free.
        "late" => {
            give(&cache, [object]);
            cache.shrink().unwrap();
            object
        }
        _ => other.alloc().unwrap(),
    };
    give(&cache, [wrong]);
    // Sends the sheaf's objects to the slabs, which check them.
    let _ = cache.shrink();
}

#[test]
fn sheaves_are_as_large_as_asked_for() {
    for (asked, is) in [(0, 4), (4, 4), (5, 5), (60, 60), (125, 125), (1000, 125)] {
        for size in [8, 4096] {
            let builder = KmemCache::builder("sized", layout(size, 8));
            let cache = builder.sheaf_capacity(asked).build().unwrap();
            if cache.debug_flags().is_none() {
                assert_eq!(cache.statistics().sheaf_capacity, is);
            }
            let objects = take(&cache, 1000);
            assert_eq!(objects.iter().collect::<HashSet<_>>().len(), 1000);
            give(&cache, objects);
            cache.validate().unwrap();
            cache.destroy().unwrap();
        }
    }
}

/// Returns whether idle sheaves can be taken from other CPUs: fences work, and no CPU is isolated.
fn reaches_other_cpus() -> bool {
    let fences = pinfold_rseq::init(pinfold_rseq::Index::Cid) == pinfold_rseq::Backend::Atomic
        || pinfold_rseq::fence().is_ok();
    let isolated = std::fs::read_to_string("/sys/devices/system/cpu/isolated");
    fences && isolated.map_or(true, |list| list.trim().is_empty())
}

/// A CPU's sheaves go back to the node when they were idle for some ticks, and their objects from
/// there to the system.
#[test]
fn idle_sheaves_are_drained_by_the_shepherd() {
    if !reaches_other_cpus() {
        return;
    }
    let cache = KmemCache::new("idle", layout(4096, 8)).unwrap();
    let objects = take(&cache, 64);
    give(&cache, objects);
    let before = cache.statistics();
    let shepherd = Shepherd::new();
    let deadline = Instant::now() + Duration::from_secs(20);
    while cache.statistics().barn_put == before.barn_put || cache.statistics().slab_free == 0 {
        assert!(Instant::now() < deadline, "{:?}", cache.statistics());
        shepherd.tick();
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(cache.statistics().slabs, 0);
    let again = take(&cache, 64);
    give(&cache, again);
    cache.destroy().unwrap();
}

/// The thread that a preloaded library starts also takes idle sheaves of a CPU on which it never
/// runs, until the program enters a sandbox.
#[test]
fn the_automatic_thread_drains_sheaves_of_other_cpus() {
    if !alone("the_automatic_thread_drains_sheaves_of_other_cpus", |_| ())
        || !reaches_other_cpus()
        || common::cpus() < 2
    {
        return;
    }
    let caches: [_; 6] = core::array::from_fn(|_| {
        let builder = KmemCache::builder("idle", layout(4096, 8));
        builder.sheaf_capacity(32).build().unwrap()
    });
    let use_elsewhere = || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                common::pin(1);
                caches.iter().for_each(|cache| give(cache, take(cache, 64)));
            });
        });
    };
    let slabs = || -> usize { caches.iter().map(|cache| cache.statistics().slabs).sum() };
    use_elsewhere();
    // The thread takes nothing while less than 256 KiB lie idle.
    let used = slabs();
    assert_ne!(used, 0);
    common::pin(0);
    let first: &pinfold::topology::CpuSet = Box::leak(Box::new([0].into_iter().collect()));
    // SAFETY: this process has no other automatic thread.
    let automatic = unsafe { Automatic::start(Some(first)) }.unwrap();
    let wait = |long: u64| {
        let deadline = Instant::now() + Duration::from_secs(long);
        while slabs() > used / 2 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        slabs()
    };
    assert!(wait(30) <= used / 2);
    shepherd::forbid_fences();
    use_elsewhere();
    if pinfold_rseq::backend() == pinfold_rseq::Backend::Rseq(pinfold_rseq::Index::Cpu) {
        assert!(wait(4) > used / 2);
    }
    automatic.stop();
}

/// Returns the memory of this process that belongs to no file, in bytes.
fn resident() -> usize {
    common::status("RssAnon:")
}

/// An empty cache is only a descriptor. CPUs hold nothing for it until it is used there.
#[test]
fn an_empty_cache_costs_less_than_a_page() {
    // Other tests' memory would count.
    if !alone("an_empty_cache_costs_less_than_a_page", |_| ()) {
        return;
    }
    const COUNT: usize = 1000;
    // The first cache also pays for what all caches share.
    drop(KmemCache::new("first", layout(64, 8)).unwrap());
    let before = resident();
    let caches: Vec<_> = (0..COUNT)
        .map(|_| KmemCache::new("empty", layout(64, 8)).unwrap())
        .collect();
    let each = (resident() - before) / COUNT;
    assert!(each <= 4096, "{each} bytes for an empty cache");
    assert!(caches.iter().all(|cache| cache.statistics().slabs == 0));
}

/// Pages of free objects between objects in use go back to the system too, when their slabs were
/// idle for some seconds. The objects in use keep their bytes, and the pages can be used again.
#[test]
fn pages_of_free_objects_go_back() {
    // Other tests' memory would count.
    if !alone("pages_of_free_objects_go_back", |_| ()) {
        return;
    }
    let cache = KmemCache::builder("holes", layout(1024, 8))
        .hardened(false)
        .build()
        .unwrap();
    let objects = take(&cache, 40_000);
    for (nth, object) in objects.iter().enumerate() {
        // SAFETY: the test owns the object, which has 1024 bytes.
        unsafe { object.as_ptr().write_bytes(nth as u8, 1024) };
    }
    let full = resident();
    // An object in use keeps its page, so that larger pages need objects that are farther apart.
    // SAFETY: sysconf has no preconditions.
    let stride = 50 * unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize / 4096;
    let (kept, freed): (Vec<_>, Vec<_>) = objects
        .into_iter()
        .enumerate()
        .partition(|(nth, _)| nth % stride == 0);
    give(&cache, freed.into_iter().map(|(_, object)| object));
    cache.shrink().unwrap();
    let shepherd = Shepherd::new();
    let begin = Instant::now();
    while resident() > full / 3 && begin.elapsed().as_secs() < 20 {
        shepherd.tick();
        std::thread::sleep(Duration::from_millis(100));
    }
    let left = resident();
    assert!(left <= full / 3, "{} KiB of {} KiB", left >> 10, full >> 10);
    for &(nth, object) in &kept {
        // SAFETY: the test owns the object, and wrote its 1024 bytes above.
        let bytes = unsafe { std::slice::from_raw_parts(object.as_ptr(), 1024) };
        assert!(bytes.iter().all(|&byte| byte == nth as u8));
    }
    let again = take(&cache, 30_000);
    for object in &again {
        // SAFETY: the test owns the object, which has 1024 bytes.
        unsafe { object.as_ptr().write_bytes(1, 1024) };
    }
    cache.validate().unwrap();
    give(
        &cache,
        again
            .into_iter()
            .chain(kept.into_iter().map(|(_, object)| object)),
    );
    cache.destroy().unwrap();
}
