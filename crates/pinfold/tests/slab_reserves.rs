//! Objects set apart: prefilled sheaves and memory pools, also when the system has no more memory.

mod common;

use common::Random;
use pinfold::slab::{KmemCache, MemPool};
use std::alloc::Layout;
use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Not hardened: such a cache keeps some back in quarantine.
fn cache(name: &str, size: usize) -> KmemCache {
    let layout = Layout::from_size_align(size, 8).unwrap();
    let builder = KmemCache::builder(name, layout).hardened(false);
    builder.build().unwrap()
}

/// A thread without memory cannot use the objects in another CPU's sheaves, so that the number of
/// objects to be had would change with the CPU.
fn stay_on_one_cpu() {
    common::pin(0);
}

/// Runs `f` in a child in which no memory can be mapped or committed from then on; its answer is whether all was well.
fn without_memory(f: impl FnOnce() -> bool) {
    // SAFETY: the child works on caches only, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let none = libc::rlimit {
            // Not 0: for the sake of valgrind the kernel takes that for no limit on data.
            rlim_cur: 1,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: the limit is readable. Who waits for ever ends by the alarm.
        unsafe {
            libc::alarm(30);
            // Not RLIMIT_AS: pages that are reserved already could be committed under it.
            libc::setrlimit(libc::RLIMIT_DATA, &raw const none);
        }
        let fine = f();
        // SAFETY: no preconditions.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut status = 0;
    // SAFETY: `status` is writable.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}

/// Takes objects until there are none, linked through their first word; returns the first and how many.
fn exhaust(cache: &KmemCache) -> (*mut u8, usize) {
    let (mut first, mut count) = (std::ptr::null_mut(), 0);
    while let Some(object) = cache.alloc() {
        // SAFETY: the object is ours and has room for a pointer.
        unsafe { object.cast::<*mut u8>().write(first) };
        (first, count) = (object.as_ptr(), count + 1);
    }
    (first, count)
}

#[test]
fn what_was_prefilled_is_there() {
    for (size, counts) in [
        (8, &[0, 1, 124, 125, 126, 250, 251, 4000][..]),
        (4096, &[1, 33, 130]),
    ] {
        let cache = cache("prefilled", size);
        for &count in counts {
            let mut prefilled = cache.prefill(count).unwrap();
            assert_eq!(prefilled.len(), count);
            let half = prefilled.len() / 2;
            let mut seen: HashSet<NonNull<u8>> =
                (0..half).map(|_| prefilled.alloc().unwrap()).collect();
            prefilled.refill(count).unwrap();
            prefilled.refill(0).unwrap();
            assert_eq!(prefilled.len(), count);
            seen.extend((0..count).map(|_| prefilled.alloc().unwrap()));
            assert_eq!(seen.len(), half + count, "an object was given out twice");
            assert!(prefilled.is_empty() && prefilled.alloc().is_none());
            let objects: Vec<_> = seen.iter().map(|object| object.as_ptr()).collect();
            // SAFETY: they came from this cache.
            unsafe { cache.free_bulk(&objects) };
        }
        cache.validate().unwrap();
        cache.destroy().unwrap();
    }
}

#[test]
fn prefilled_objects_go_back_from_any_thread() {
    let cache = cache("sent", 64);
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let prefilled = cache.prefill(300).unwrap();
            let cache = &cache;
            scope.spawn(move || {
                let (mut random, mut prefilled) = (Random::new(seed), prefilled);
                for _ in 0..200 {
                    let taken: Vec<_> = (0..random.below(300))
                        .map(|_| prefilled.alloc().unwrap().as_ptr())
                        .collect();
                    // SAFETY: they came from this cache.
                    unsafe { cache.free_bulk(&taken) };
                    prefilled.refill(300).unwrap();
                }
            });
        }
    });
    cache.validate().unwrap();
    cache.destroy().unwrap();
}

#[test]
fn prefilled_objects_outlast_the_memory() {
    stay_on_one_cpu();
    let cache = cache("certain", 1024);
    let mut prefilled = cache.prefill(500).unwrap();
    without_memory(|| {
        exhaust(&cache);
        let mut fine = prefilled.refill(1_000_000).is_err() && prefilled.len() == 500;
        fine &= cache.prefill(1000).is_err();
        for _ in 0..500 {
            fine &= prefilled.alloc().is_some();
        }
        fine
    });
    drop(prefilled);
    cache.destroy().unwrap();
}

#[test]
fn a_pool_serves_from_its_reserve_when_memory_is_out() {
    stay_on_one_cpu();
    let cache = cache("reserve", 2048);
    let pool = MemPool::new(&cache, 150).unwrap();
    without_memory(|| {
        let (mut first, count) = exhaust(&cache);
        let mut taken: Vec<_> = Vec::with_capacity(150);
        while let Some(object) = pool.alloc() {
            taken.push(object);
        }
        let mut fine = count > 0 && taken.len() == 150 && pool.kept() == 0;
        // What is freed first fills the reserve; the rest is the cache's.
        for _ in 0..count {
            // SAFETY: linked by `exhaust`; each object is given up.
            unsafe {
                let next = first.cast::<*mut u8>().read();
                pool.free(NonNull::new_unchecked(first));
                first = next;
            }
        }
        fine &= pool.kept() == count.min(150) && exhaust(&cache).1 == count - pool.kept();
        for object in taken {
            // SAFETY: it came from this pool.
            unsafe { pool.free(object) };
        }
        fine & (pool.kept() == 150) & pool.resize(100_000).is_err()
    });
    drop(pool);
    cache.destroy().unwrap();
}

#[test]
fn a_pool_is_resized() {
    let cache = cache("resized", 128);
    let pool = MemPool::new(&cache, 3).unwrap();
    for n in [0, 1000, 125, 126, 7] {
        pool.resize(n).unwrap();
        assert_eq!((pool.kept(), pool.wanted()), (n, n));
    }
    let taken: Vec<_> = (0..7).map(|_| pool.alloc_preallocated().unwrap()).collect();
    assert!(pool.alloc_preallocated().is_none() && pool.kept() == 0);
    pool.resize(2).unwrap();
    assert_eq!(pool.kept(), 2);
    for object in taken {
        // SAFETY: it came from this pool.
        unsafe { pool.free(object) };
    }
    assert_eq!(pool.kept(), 2, "never more than wanted");
    drop(pool);
    cache.destroy().unwrap();
}

/// An object that is in the reserve is not waited for, and the last one freed is the next one had.
#[test]
fn waiting_takes_from_the_reserve() {
    let cache = cache("awaited", 4096);
    let pool = MemPool::new(&cache, 2).unwrap();
    without_memory(|| {
        exhaust(&cache);
        let (first, second) = (pool.alloc_wait(), pool.alloc_wait());
        let mut fine = pool.alloc().is_none();
        // SAFETY: they came from this pool.
        unsafe { pool.free(first) };
        fine &= pool.alloc_wait() == first;
        // SAFETY: as above.
        unsafe {
            pool.free(second);
            pool.free(first);
        }
        fine & (pool.kept() == 2)
    });
    drop(pool);
    cache.destroy().unwrap();
}

/// More threads than objects, and no memory: each waits for another to free. The threads start before the memory goes.
#[test]
fn waiting_threads_are_woken() {
    // SAFETY: the child works on caches and its own threads only, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no preconditions.
        unsafe { libc::alarm(30) };
        let fine = contend();
        // SAFETY: no preconditions.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut status = 0;
    // SAFETY: `status` is writable.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}

fn contend() -> bool {
    const ROUNDS: usize = 2000;
    let cache = cache("contended", 4096);
    let pool = MemPool::new(&cache, 1).unwrap();
    let (ready, served) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                ready.fetch_add(1, Relaxed);
                while ready.load(Relaxed) < 4 {
                    std::thread::yield_now();
                }
                for _ in 0..ROUNDS {
                    let object = pool.alloc_wait();
                    served.fetch_add(1, Relaxed);
                    std::thread::yield_now();
                    // SAFETY: it came from this pool.
                    unsafe { pool.free(object) };
                }
            });
        }
        while ready.load(Relaxed) < 3 {
            std::thread::yield_now();
        }
        let little = libc::rlimit {
            rlim_cur: 1,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: the limit is readable.
        unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const little) };
        exhaust(&cache);
        ready.fetch_add(1, Relaxed);
    });
    // A missed wake-up would cost a nap of a tenth of a second each time.
    served.load(Relaxed) == 3 * ROUNDS && begin.elapsed() < Duration::from_secs(20)
}
