//! Prefilled sheaves and memory pools, also in processes that get no more memory.

mod common;

use common::{Random, in_child, limit, stay_on_one_cpu};
use pinfold::slab::{KmemCache, MemPool};
use std::alloc::Layout;
use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Not hardened, because a hardened cache would hold objects back in quarantine.
fn cache(name: &str, size: usize) -> KmemCache {
    let layout = Layout::from_size_align(size, 8).unwrap();
    let builder = KmemCache::builder(name, layout).hardened(false);
    builder.build().unwrap()
}

/// Runs `f` in a child that can neither map nor commit more memory, and fails unless `f` returns
/// true.
fn without_memory(f: impl FnOnce() -> bool) {
    in_child(30, || {
        // Not RLIMIT_AS, under which pages that are already reserved could still be committed.
        limit(libc::RLIMIT_DATA, 1);
        f()
    });
}

/// Allocates objects until the cache has none, and links them through their first words. Returns
/// the first object and their number.
fn exhaust(cache: &KmemCache) -> (*mut u8, usize) {
    let (mut first, mut count) = (std::ptr::null_mut(), 0);
    while let Some(object) = cache.alloc() {
        // SAFETY: this thread owns the object, which has room for a pointer.
        unsafe { object.cast::<*mut u8>().write(first) };
        (first, count) = (object.as_ptr(), count + 1);
    }
    (first, count)
}

#[test]
fn prefilled_objects_can_be_allocated() {
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
            // SAFETY: the objects came from this cache and are not used afterwards.
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
                    // SAFETY: the objects came from this cache and are not used afterwards.
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
        // The first objects that are freed fill the reserve, and the others go to the cache.
        for _ in 0..count {
            // SAFETY: `exhaust` linked the objects, which came from this cache; each is read before
            // it is given up.
            unsafe {
                let next = first.cast::<*mut u8>().read();
                pool.free(NonNull::new_unchecked(first));
                first = next;
            }
        }
        fine &= pool.kept() == count.min(150) && exhaust(&cache).1 == count - pool.kept();
        for object in taken {
            // SAFETY: the object came from this pool and is not used afterwards.
            unsafe { pool.free(object) };
        }
        fine & (pool.kept() == 150) & pool.resize(100_000).is_err()
    });
    drop(pool);
    cache.destroy().unwrap();
}

/// Blocks of pages of every order, each at a multiple of its size, also when memory is out.
#[test]
fn a_pool_of_pages_outlasts_the_memory() {
    stay_on_one_cpu();
    for order in 0..=4 {
        let size = 4096 << order;
        let layout = Layout::from_size_align(size, size).unwrap();
        let builder = KmemCache::builder("pages", layout).hardened(false);
        let cache = builder.build().unwrap();
        let pool = MemPool::new(&cache, 8).unwrap();
        without_memory(|| {
            exhaust(&cache);
            let mut taken = Vec::with_capacity(8);
            while let Some(pages) = pool.alloc() {
                // SAFETY: this thread owns the block, which has `size` bytes.
                unsafe { pages.write_bytes(taken.len() as u8, size) };
                taken.push(pages);
            }
            let mut fine = taken.len() == 8;
            for (nth, &pages) in taken.iter().enumerate() {
                // SAFETY: this thread owns the block, and has written all of it.
                let bytes = unsafe { std::slice::from_raw_parts(pages.as_ptr(), size) };
                fine &= pages.addr().get().is_multiple_of(size);
                fine &= bytes.iter().all(|&byte| usize::from(byte) == nth);
            }
            for pages in taken {
                // SAFETY: the block came from this pool and is not used afterwards.
                unsafe { pool.free(pages) };
            }
            fine && pool.kept() == 8
        });
        drop(pool);
        cache.destroy().unwrap();
    }
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
        // SAFETY: the object came from this pool and is not used afterwards.
        unsafe { pool.free(object) };
    }
    assert_eq!(pool.kept(), 2, "never more than wanted");
    drop(pool);
    cache.destroy().unwrap();
}

/// A bulk allocation gets all objects, from the cache and the reserve together, or keeps none.
#[test]
fn a_pool_serves_many_objects_or_none() {
    stay_on_one_cpu();
    let cache = cache("many", 2048);
    let pool = MemPool::new(&cache, 150).unwrap();
    let mut objects = [std::ptr::null_mut(); 151];
    for count in [0, 1, 7, 151] {
        pool.alloc_bulk(&mut objects[..count]).unwrap();
        let apart: HashSet<_> = objects[..count].iter().collect();
        assert_eq!((apart.len(), pool.kept()), (count, 150));
        // SAFETY: the objects came from this pool and are not used afterwards.
        unsafe { pool.free_bulk(&objects[..count]) };
    }
    without_memory(|| {
        let (first, count) = exhaust(&cache);
        let mut fine = count > 1 && pool.alloc_bulk(&mut objects).is_err() && pool.kept() == 150;
        // SAFETY: the object came from this cache and is given up.
        unsafe { cache.free(NonNull::new_unchecked(first)) };
        // One object from the cache is not enough, and goes back.
        fine &= pool.alloc_bulk(&mut [std::ptr::null_mut(); 152]).is_err() && pool.kept() == 150;
        // One object from the cache, and the others from the reserve.
        fine &= pool.alloc_bulk(&mut objects).is_ok() && pool.kept() == 0;
        fine &= objects.iter().collect::<HashSet<_>>().len() == 151;
        fine &= pool.alloc_bulk(&mut objects[..0]).is_ok();
        let mut one = [std::ptr::null_mut()];
        fine &= pool.alloc_bulk(&mut one).is_err();
        // SAFETY: the objects came from this pool and are given up.
        unsafe { pool.free_bulk(&objects) };
        fine &= pool.kept() == 150 && exhaust(&cache).1 == 1;
        pool.alloc_bulk_wait(&mut objects[..150]);
        fine & (pool.kept() == 0)
    });
    drop(pool);
    cache.destroy().unwrap();
}

/// `alloc_wait` does not wait while the reserve has an object, and returns the object that was
/// freed last.
#[test]
fn waiting_takes_from_the_reserve() {
    let cache = cache("awaited", 4096);
    let pool = MemPool::new(&cache, 2).unwrap();
    without_memory(|| {
        exhaust(&cache);
        let (first, second) = (pool.alloc_wait(), pool.alloc_wait());
        let mut fine = pool.alloc().is_none();
        // SAFETY: the object came from this pool and is given up.
        unsafe { pool.free(first) };
        fine &= pool.alloc_wait() == first;
        // SAFETY: both objects came from this pool and are given up.
        unsafe {
            pool.free(second);
            pool.free(first);
        }
        fine & (pool.kept() == 2)
    });
    drop(pool);
    cache.destroy().unwrap();
}

/// There are more threads than objects, and no memory. So each thread waits until another one
/// frees. The threads start before the memory runs out.
#[test]
fn waiting_threads_are_woken() {
    in_child(30, || contend(1));
}

/// Each thread waits for two of three objects, and none of them waits without end.
#[test]
fn threads_that_wait_for_many_are_woken() {
    in_child(30, || contend(2));
}

fn contend(many: usize) -> bool {
    const ROUNDS: usize = 2000;
    let cache = cache("contended", 4096);
    let pool = MemPool::new(&cache, 2 * many - 1).unwrap();
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
                    let mut objects = [std::ptr::null_mut(); 2];
                    match many {
                        1 => objects[0] = pool.alloc_wait().as_ptr(),
                        _ => pool.alloc_bulk_wait(&mut objects),
                    }
                    served.fetch_add(1, Relaxed);
                    std::thread::yield_now();
                    // SAFETY: the objects came from this pool and are given up.
                    unsafe { pool.free_bulk(&objects[..many]) };
                }
            });
        }
        while ready.load(Relaxed) < 3 {
            std::thread::yield_now();
        }
        limit(libc::RLIMIT_DATA, 1);
        exhaust(&cache);
        ready.fetch_add(1, Relaxed);
    });
    // Each missed wake-up would cost a nap of a tenth of a second.
    served.load(Relaxed) == 3 * ROUNDS && begin.elapsed() < Duration::from_secs(20)
}
