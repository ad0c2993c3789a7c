//! The faults that a hardened cache finds, and the bytes that it erases.

mod common;

use common::reports::{PAUSE, free, keep, reports};
use common::{assert_has, pin, take};
use pinfold::shepherd::Shepherd;
use pinfold::slab::debug::{Kind, on_report};
use pinfold::slab::{KmemCache, MemPool};
use std::alloc::Layout;
use std::collections::HashSet;
use std::ptr::NonNull;
use std::thread::sleep;
use std::time::{Duration, Instant};

fn hardened(name: &str, size: usize) -> KmemCache {
    on_report(keep);
    KmemCache::builder(name, Layout::from_size_align(size, 8).unwrap())
        .hardened(true)
        .build()
        .unwrap()
}

fn bytes(object: NonNull<u8>, size: usize) -> &'static mut [u8] {
    // SAFETY: the object is of one of the test's caches and has `size` bytes, which stay mapped
    // after a free.
    unsafe { std::slice::from_raw_parts_mut(object.as_ptr(), size) }
}

#[test]
fn a_second_free_is_found_while_the_first_is_in_a_sheaf() {
    let cache = hardened("twice", 64);
    let objects = take(&cache, 3);
    free(&cache, objects[0]);
    free(&cache, objects[1]);
    free(&cache, objects[0]);
    let found = reports();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].0, Kind::DoubleFree);
    let report = &found[0].1;
    assert_has(report, &["cache twice: object freed twice\n"]);
    let object = format!("\n  object {:p} of 64 bytes, free", objects[0]);
    assert!(report.contains(&object), "{report}");
    free(&cache, objects[2]);
    // The cache accepted the object once, so it gives it out once.
    let all: HashSet<_> = take(&cache, 1000).into_iter().collect();
    assert_eq!(all.len(), 1000);
    all.into_iter().for_each(|object| free(&cache, object));
    assert_eq!(reports().len(), 0);
    cache.destroy().unwrap();
}

/// A freed object waits also while the cache's slabs have few objects in use and drain.
#[test]
fn a_freed_object_waits_while_slabs_are_sparse() {
    pin(0);
    let cache = hardened("waits", 1024);
    let objects = take(&cache, 20_000);
    let (kept, rest): (Vec<_>, Vec<_>) =
        (objects.into_iter().enumerate()).partition(|(nth, _)| nth.is_multiple_of(16));
    rest.into_iter()
        .for_each(|(_, object)| free(&cache, object));
    let sheaf = cache.statistics().sheaf_capacity;
    let mut again = Vec::new();
    for _ in 0..50 {
        // A burst turns the draining off until the coarse clock advances.
        sleep(Duration::from_millis(5));
        let freed = take(&cache, sheaf / 4);
        freed.iter().for_each(|&object| free(&cache, object));
        let next = take(&cache, sheaf);
        let early = next.iter().filter(|object| freed.contains(object)).count();
        assert_eq!(early, 0);
        again.extend(next);
    }
    let kept = kept.into_iter().map(|(_, object)| object);
    kept.chain(again).for_each(|object| free(&cache, object));
    assert_eq!(reports().len(), 0);
    cache.destroy().unwrap();
}

#[test]
fn frees_of_foreign_addresses_are_reported() {
    let (cache, other) = (hardened("mine", 48), hardened("theirs", 48));
    let (object, foreign) = (cache.alloc().unwrap(), other.alloc().unwrap());
    free(&cache, foreign);
    let found = reports();
    assert_eq!(found[0].0, Kind::WrongCache);
    assert_has(&found[0].1, &["cache mine: object of another cache"]);
    assert!(found[0].1.contains("of cache theirs"), "{}", found[0].1);
    // SAFETY: offset 16 is within the object's 48 bytes.
    free(&cache, unsafe { object.add(16) });
    assert_eq!(reports()[0].0, Kind::NotAnObject);
    let mut local = 0u64;
    free(&cache, NonNull::from(&mut local).cast());
    assert_eq!(reports()[0].0, Kind::WrongCache);
    free(&cache, object);
    free(&other, foreign);
    assert_eq!(reports().len(), 0);
    cache.destroy().unwrap();
    other.destroy().unwrap();
}

#[test]
fn a_write_after_the_free_is_found_when_the_object_is_allocated() {
    let cache = hardened("after", 32);
    // The other object keeps their slab in use.
    let (object, _other) = (cache.alloc().unwrap(), cache.alloc().unwrap());
    free(&cache, object);
    bytes(object, 32)[3] ^= 0xff;
    // Without this, the object would be given out much later.
    cache.shrink().unwrap();
    let all = take(&cache, 20_000);
    let found = reports();
    assert_eq!(found.len(), 1, "the object was never taken again");
    assert_eq!(found[0].0, Kind::WrittenAfterFree);
    assert_has(&found[0].1, &[&format!("object {object:p}")]);
    assert!(!all.contains(&object));
}

#[test]
fn overwritten_objects_are_not_given_out_past_the_sheaves() {
    // So that the objects are freed on node 0, from which `alloc_node` takes them below.
    pin(0);
    let cache = hardened("past", 64);
    let mut objects = take(&cache, 50);
    let kept = objects.pop();
    objects.iter().for_each(|&object| free(&cache, object));
    cache.shrink().unwrap();
    for object in &objects {
        bytes(*object, 64)[3] ^= 0xff;
    }
    for _ in 0..200 {
        let object = cache.alloc_node(0).or_else(|| cache.alloc_node_exact(0));
        assert!(!objects.contains(&object.unwrap()));
    }
    let found = reports();
    assert!(kept.is_some() && !found.is_empty());
    assert!(found.iter().all(|found| found.0 == Kind::WrittenAfterFree));
}

/// A cache can be destroyed after deferred frees, whichever CPU makes the objects free.
#[test]
fn a_hardened_cache_ends_after_deferred_frees() {
    for count in [1, 100, 1000] {
        let cache = hardened("deferred", 64);
        for object in take(&cache, count) {
            // SAFETY: the object came from this cache, and no reader knows it.
            unsafe { cache.free_deferred(object) };
        }
        match cache.destroy() {
            Ok(()) => {}
            // The cache could not drain the CPUs, because the kernel cannot fence.
            Err(leak) => assert_eq!(leak.objects, 0, "{leak}"),
        }
        assert_eq!(reports().len(), 0);
    }
}

#[test]
fn reserves_are_zeroed_and_checked_too() {
    let cache = hardened("reserve", 64);
    let pool = MemPool::new(&cache, 4).unwrap();
    let reserve = |count| (0..count).map(|_| pool.alloc_preallocated().unwrap());
    let objects: Vec<_> = reserve(4).collect();
    for &object in &objects {
        bytes(object, 64).fill(0x77);
        // SAFETY: the object came from this pool and is given up.
        unsafe { pool.free(object) };
    }
    for object in reserve(4).collect::<Vec<_>>() {
        assert!(bytes(object, 64).iter().all(|&byte| byte == 0));
        // SAFETY: the object came from this pool and is given up.
        unsafe { pool.free(object) };
    }
    assert_eq!(reports().len(), 0);
    // Takes two objects and frees the second one twice. The reserve lacks one object at the second
    // free, and would take it.
    let object = reserve(2).last().unwrap();
    // SAFETY: the object came from this pool; the second free is a planted fault, which the cache
    // reports.
    unsafe {
        pool.free(object);
        pool.free(object);
    }
    assert_eq!(reports()[0].0, Kind::DoubleFree);
    assert_eq!(pool.kept(), 3);
    bytes(object, 64)[3] ^= 0xff;
    assert!(!reserve(2).any(|other| other == object));
    assert_eq!(reports()[0].0, Kind::WrittenAfterFree);
}

/// The key is lost with the page, but the slab knows that the object is free.
#[test]
fn a_second_free_is_found_after_the_page_was_given_back() {
    let cache = hardened("purged", 64);
    let mut objects = take(&cache, 1000);
    // Two objects that keep their slab in use.
    let kept = objects.split_off(998);
    objects.iter().for_each(|&object| free(&cache, object));
    if cache.shrink().is_err() {
        return;
    }
    let begin = Instant::now();
    let mut gone = objects.iter().filter(|object| bytes(**object, 8) == [0; 8]);
    let object = loop {
        Shepherd::new().tick();
        if let Some(&object) = gone.clone().next() {
            break object;
        }
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "no page went back"
        );
        sleep(Duration::from_millis(100));
    };
    free(&cache, object);
    let found = reports();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].0, Kind::DoubleFree);
    gone.by_ref()
        .take(10)
        .for_each(|&object| free(&cache, object));
    assert_eq!(reports().len(), 10);
    kept.into_iter().for_each(|object| free(&cache, object));
    cache.validate().unwrap();
    cache.destroy().unwrap();
}

#[test]
fn freed_bytes_cannot_be_read_again() {
    for size in [8, 24, 64, 1000, 4096, 40_000] {
        let cache = hardened("zero", size);
        for _ in 0..3 {
            let objects = take(&cache, 600);
            for &object in &objects {
                let bytes = bytes(object, size);
                assert!(
                    bytes.iter().all(|&byte| byte == 0),
                    "size {size}: not zeroed"
                );
                bytes.fill(0x77);
            }
            for &object in &objects {
                free(&cache, object);
                // All bytes but the key.
                assert!(bytes(object, size).iter().skip(8).all(|&byte| byte == 0));
            }
        }
        assert_eq!(reports().len(), 0);
        cache.destroy().unwrap();
    }
}

#[test]
fn freed_objects_are_not_given_out_at_once() {
    let cache = hardened("late", 64);
    let object = cache.alloc().unwrap();
    free(&cache, object);
    let next = take(&cache, 100);
    assert!(!next.contains(&object));
    next.into_iter().for_each(|object| free(&cache, object));
    // But freed objects are given out again in the end, so memory does not grow without bound.
    for _ in 0..200_000 {
        free(&cache, cache.alloc().unwrap());
    }
    let slabs = cache.statistics().slabs;
    assert!(slabs <= 8, "{slabs} slabs");
    cache.destroy().unwrap();
}

#[test]
fn fresh_objects_come_in_random_order() {
    let cache = hardened("order", 64);
    let objects = take(&cache, 100);
    let ascending = objects.windows(2).filter(|pair| pair[0] < pair[1]).count();
    assert!((20..80).contains(&ascending), "{ascending} of 99 ascend");
    let plain = KmemCache::builder("plain", Layout::new::<[u64; 8]>())
        .hardened(false)
        .build()
        .unwrap();
    let objects = take(&plain, 100);
    assert!(objects.windows(2).all(|pair| pair[0] < pair[1]));
}

/// The page behind the last object of a slab cannot be touched.
#[test]
fn an_overrun_ends_at_the_guard_page() {
    let cache = hardened("guarded", 4096);
    let highest = take(&cache, 200).into_iter().max().unwrap();
    // SAFETY: the child writes to nothing but the slab, and ends at the guard page or by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut at = highest.as_ptr();
        loop {
            // SAFETY: the bytes belong to the slab, or are closed to access, which ends the child.
            unsafe { at.write_volatile(1) };
            at = at.wrapping_add(1);
            if at as usize - highest.as_ptr() as usize > 4 << 20 {
                // SAFETY: `_exit` has no preconditions.
                unsafe { libc::_exit(1) };
            }
        }
    }
    let mut status = 0;
    // SAFETY: `status` is a live integer that the kernel may write to.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert!(
        libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV,
        "{status:#x}"
    );
}

/// Objects with a constructor keep their bytes, and have the key behind them.
#[test]
fn constructed_objects_stay_constructed() {
    unsafe fn construct(object: *mut u8) {
        // SAFETY: the cache's objects have 40 bytes.
        unsafe { object.write_bytes(0x11, 40) };
    }
    on_report(keep);
    let builder = KmemCache::builder("made", Layout::from_size_align(40, 8).unwrap());
    // SAFETY: `construct` initialises all 40 bytes of an object, and cannot unwind.
    let cache = unsafe { builder.hardened(true).constructor(construct) }
        .build()
        .unwrap();
    for _ in 0..3 {
        let objects = take(&cache, 500);
        for &object in &objects {
            assert!(bytes(object, 40).iter().all(|&byte| byte == 0x11));
        }
        objects.into_iter().for_each(|object| free(&cache, object));
    }
    let object = cache.alloc().unwrap();
    free(&cache, object);
    free(&cache, object);
    assert_eq!(reports()[0].0, Kind::DoubleFree);
    cache.destroy().unwrap();
}

/// Two threads report at the same time, and the report that began first ends first. Each thread can
/// report again afterwards.
#[test]
fn threads_that_reported_at_the_same_time_report_again() {
    let cache = hardened("beside", 64);
    let free_twice = &|pause: u64| {
        PAUSE.set(Duration::from_millis(pause));
        let object = cache.alloc().unwrap();
        free(&cache, object);
        free(&cache, object);
        assert_eq!(reports().len(), 1);
    };
    std::thread::scope(|scope| {
        for late in [0, 50] {
            scope.spawn(move || {
                sleep(Duration::from_millis(late));
                free_twice(100);
                sleep(Duration::from_millis(100));
                free_twice(0);
            });
        }
    });
}

#[test]
fn threads_exchange_objects_without_reports() {
    let cache = hardened("busy", 128);
    let (send, receive) = std::sync::mpsc::channel::<usize>();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (send, cache) = (send.clone(), &cache);
            scope.spawn(move || {
                for turn in 0..30_000u32 {
                    let object = cache.alloc().unwrap();
                    let bytes = bytes(object, 128);
                    assert!(bytes.iter().all(|&byte| byte == 0));
                    bytes.fill(turn as u8);
                    if turn % 3 == 0 {
                        send.send(object.as_ptr() as usize).unwrap();
                    } else {
                        free(cache, object);
                    }
                }
                let mut many = vec![std::ptr::null_mut(); 300];
                assert_eq!(cache.alloc_bulk(&mut many), 300);
                // SAFETY: the objects came from this cache and are not used afterwards.
                unsafe { cache.free_bulk(&many) };
                assert_eq!(reports().len(), 0);
            });
        }
        drop(send);
        for object in receive {
            free(&cache, NonNull::new(object as *mut u8).unwrap());
        }
    });
    assert_eq!(reports().len(), 0);
    cache.validate().unwrap();
    cache.destroy().unwrap();
}

/// The shepherd also drains the sheaf of a CPU on which the cache's objects were only freed.
#[test]
fn idle_held_sheaves_are_drained() {
    let isolated = std::fs::read_to_string("/sys/devices/system/cpu/isolated");
    if isolated.is_ok_and(|list| !list.trim().is_empty())
        || (pinfold_rseq::init(pinfold_rseq::Index::Cid) != pinfold_rseq::Backend::Atomic
            && pinfold_rseq::fence().is_err())
    {
        return;
    }
    let cache = hardened("held", 4096);
    let objects: Vec<_> = take(&cache, 20)
        .iter()
        .map(|at| at.as_ptr() as usize)
        .collect();
    // Frees the objects on another CPU, which has nothing else of this cache. This thread stays
    // busy meanwhile, because otherwise both would have the same concurrency id.
    let freed = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(1);
            for &object in &objects {
                free(&cache, NonNull::new(object as *mut u8).unwrap());
            }
            freed.store(true, std::sync::atomic::Ordering::Release);
        });
        pin(0);
        while !freed.load(std::sync::atomic::Ordering::Acquire) {
            std::hint::spin_loop();
        }
    });
    let shepherd = Shepherd::new();
    let begin = Instant::now();
    while cache.usage().cpu_objects > 0 {
        assert!(begin.elapsed().as_secs() < 20, "{:?}", cache.usage());
        shepherd.tick();
        sleep(Duration::from_millis(20));
    }
    cache.destroy().unwrap();
}
