//! Deferred frees and grace periods: no reader sees a freed object, and every deferred object
//! becomes free in the end.

mod common;

use common::items::{Item, can_fence, look, make};
use common::{Random, StopAtEnd, in_child, limit, pin, stay_on_one_cpu};
use pinfold::shepherd::Shepherd;
use pinfold::slab::{DebugFlags, KmemCache, grace};
use std::alloc::Layout;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

fn cache(name: &str) -> KmemCache {
    KmemCache::new(name, Layout::new::<Item>()).unwrap()
}

#[test]
fn objects_wait_for_readers() {
    let _alone = alone();
    if !can_fence() {
        return;
    }
    let cache = cache("waits");
    let objects: Vec<_> = (0..1000).map(|_| make(&cache)).collect();
    let reader = grace::enter();
    let inner = grace::enter();
    for &object in &objects {
        // SAFETY: the object came from this cache, and only `reader` and `inner` protect uses of
        // it.
        unsafe { cache.free_deferred(object) };
    }
    let shepherd = Shepherd::new();
    (0..20).for_each(|_| {
        shepherd.tick();
    });
    drop(inner);
    shepherd.tick();
    for object in &objects {
        // SAFETY: `reader` is still inside, so the objects are not free.
        look(unsafe { object.cast::<Item>().as_ref() }, 1);
    }
    // None of the objects is given out again meanwhile.
    let others: Vec<_> = (0..1000).map(|_| cache.alloc().unwrap()).collect();
    assert!(others.iter().all(|other| !objects.contains(other)));
    drop(reader);
    cache.flush_deferred().unwrap();
    // SAFETY: the objects came from this cache and are not used afterwards.
    others
        .into_iter()
        .for_each(|other| unsafe { cache.free(other) });
    assert_eq!(cache.statistics().free_rcu_sheaf, 1000);
    cache.validate().unwrap();
    cache.destroy().unwrap();
}

/// Runs one test at a time. On a busy machine, one test's sleeping reader would delay another
/// test's grace periods.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Also with caches that check what is freed.
#[test]
fn a_cache_can_be_destroyed_after_deferred_frees() {
    let _alone = alone();
    if !can_fence() {
        return;
    }
    for (hardened, checks) in [
        (false, DebugFlags::NONE),
        (true, DebugFlags::NONE),
        (false, DebugFlags::CONSISTENCY),
    ] {
        for count in [1, 300] {
            let cache = KmemCache::builder("ends", Layout::new::<Item>())
                .hardened(hardened)
                .debug(checks)
                .build()
                .unwrap();
            let objects: Vec<_> = (0..count).map(|_| cache.alloc().unwrap()).collect();
            for object in objects {
                // SAFETY: the object came from this cache, and no reader knows it.
                unsafe { cache.free_deferred(object) };
            }
            cache.destroy().unwrap();
        }
    }
}

#[test]
fn later_frees_free_the_deferred_objects() {
    let _alone = alone();
    if !can_fence() {
        return;
    }
    let cache = cache("in passing");
    let mut most = 0;
    for turn in 0..1_000_000 {
        let reader = grace::enter();
        let object = make(&cache);
        // SAFETY: the object came from this cache, and no reader knows it.
        unsafe { cache.free_deferred(object) };
        drop(reader);
        if turn % 1000 == 0 {
            most = most.max(cache.statistics().slabs);
        }
    }
    // If none was freed, a million objects of 64 bytes would need 977 slabs.
    assert!(most < 700, "{most} slabs: deferred objects were not freed");
    assert_eq!(cache.statistics().free_rcu_sheaf_fail, 0);
    cache.destroy().unwrap();
}

#[test]
fn synchronize_waits_for_the_readers_inside() {
    let _alone = alone();
    if !can_fence() {
        return;
    }
    for round in 0..20 {
        let (entered, leaving) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pin(round);
                let _reader = grace::enter();
                entered.store(true, Release);
                std::thread::sleep(Duration::from_millis(2));
                pin(round + 1);
                leaving.store(true, Relaxed);
            });
            while !entered.load(Acquire) {
                std::thread::yield_now();
            }
            grace::synchronize().unwrap();
            assert!(leaving.load(Relaxed));
        });
    }
}

/// At every moment a reader is inside, and yet both ways of waiting end.
#[test]
fn overlapping_readers_delay_no_grace_period() {
    let _alone = alone();
    if !can_fence() {
        return;
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for _ in 0..3 {
            scope.spawn(|| {
                let mut reader = grace::enter();
                while !stop.load(Relaxed) {
                    let next = grace::enter();
                    drop(std::mem::replace(&mut reader, next));
                }
            });
        }
        let begin = Instant::now();
        for _ in 0..50 {
            grace::synchronize().unwrap();
        }
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "{:?}",
            begin.elapsed()
        );
    });
}

/// A process forks while threads read and defer. The child waits for none of these threads, and
/// guards from before the fork do no harm.
#[test]
fn a_child_waits_for_no_reader_of_its_parent() {
    let _alone = alone();
    if !can_fence() {
        return;
    }
    let cache = cache("forked");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for seed in 0..3 {
            let (cache, stop) = (&cache, &stop);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !stop.load(Relaxed) {
                    let _reader = grace::enter();
                    for _ in 0..random.below(300) {
                        // SAFETY: the object came from this cache, and no reader knows it.
                        unsafe { cache.free_deferred(make(cache)) };
                    }
                }
            });
        }
        for round in 0..100 {
            let mut along = (round % 3 == 0).then(grace::enter);
            in_child(10, || {
                drop(along.take());
                works_alone(&cache)
            });
        }
    });
    cache.destroy().unwrap();
}

fn works_alone(cache: &KmemCache) -> bool {
    let mut fine = cache.flush_deferred().is_ok() && grace::synchronize().is_ok();
    for _ in 0..1000 {
        let _reader = grace::enter();
        // SAFETY: the object came from this cache, and no reader knows it.
        unsafe { cache.free_deferred(make(cache)) };
    }
    fine &= grace::synchronize().is_ok() && cache.flush_deferred().is_ok();
    fine && cache.validate().is_ok()
}

/// Without memory for a sheaf, a deferred free itself waits for the readers.
#[test]
#[cfg_attr(
    target_env = "musl",
    ignore = "the C library's malloc needs memory too"
)]
fn deferred_frees_work_without_memory() {
    let _alone = alone();
    in_child(30, || {
        // Without memory, a thread cannot use the objects in another CPU's sheaves.
        stay_on_one_cpu();
        // Not hardened, because a hardened cache would hold objects back in quarantine.
        let layout = Layout::new::<[u8; 32768]>();
        let cache = KmemCache::builder("exhausted", layout).hardened(false);
        let cache = cache.build().unwrap();
        let first = cache.alloc().unwrap();
        limit(libc::RLIMIT_DATA, 1);
        let mut objects = Vec::from([first]);
        while objects.len() < 1000
            && let Some(object) = cache.alloc()
        {
            objects.push(object);
        }
        for &object in &objects {
            // SAFETY: the object came from this cache, and no reader knows it.
            unsafe { cache.free_deferred(object) };
        }
        let lost = cache.statistics().free_rcu_sheaf_fail;
        let fine = cache.flush_deferred().is_ok() && lost == 0;
        let again = objects.iter().filter(|_| cache.alloc().is_some()).count();
        fine && again == objects.len()
    });
}
