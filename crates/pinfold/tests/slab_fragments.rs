//! Slabs with few objects in use: empty ones go back, and sparse ones drain.

mod common;

use common::stay_on_one_cpu;
use pinfold::slab::KmemCache;
use std::alloc::Layout;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

const SIZE: usize = 1024;
const PER_SLAB: usize = 64;

fn cache(name: &str) -> KmemCache {
    let layout = Layout::from_size_align(SIZE, SIZE).unwrap();
    let builder = KmemCache::builder(name, layout).hardened(false);
    builder.build().unwrap()
}

fn free(cache: &KmemCache, object: NonNull<u8>) {
    // SAFETY: every caller took the object from this cache and gives it up.
    unsafe { cache.free(object) };
}

/// Returns where the slab of an object begins.
fn slab(object: NonNull<u8>) -> usize {
    object.as_ptr() as usize & !0xffff
}

/// Allocates all objects of `slabs` slabs, past the sheaves, and returns them by slab.
fn fill(cache: &KmemCache, slabs: usize) -> Vec<Vec<NonNull<u8>>> {
    let objects = (0..slabs * PER_SLAB).map(|_| cache.alloc_node(0).unwrap());
    let mut objects: Vec<_> = objects.collect();
    objects.sort();
    let by_slab = objects.chunk_by(|&one, &other| slab(one) == slab(other));
    let by_slab: Vec<_> = by_slab.map(<[_]>::to_vec).collect();
    assert!(by_slab.iter().all(|slab| slab.len() == PER_SLAB));
    by_slab
}

fn is_debugged(cache: &KmemCache) -> bool {
    !cache.debug_flags().is_none()
}

#[test]
fn few_slabs_stay_empty() {
    for slabs in [4, 100, 1000] {
        let cache = cache("empties");
        let objects = fill(&cache, slabs);
        // The program keeps a third of the slabs.
        let (kept, freed) = objects.split_at(slabs / 3);
        freed
            .iter()
            .flatten()
            .for_each(|&object| free(&cache, object));
        let usage = cache.usage();
        let most = 2 + usage.slabs / 16;
        assert!(usage.slabs_empty <= most, "{slabs}: {usage:?}");
        kept.iter()
            .flatten()
            .for_each(|&object| free(&cache, object));
        cache.validate().unwrap();
        cache.destroy().unwrap();
    }
}

#[test]
fn the_fullest_slab_serves_first() {
    let cache = cache("fullest");
    if is_debugged(&cache) || cache.shrink().is_err() {
        return;
    }
    // The result must not depend on which slab got objects back last.
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let mut objects = fill(&cache, 3);
        let sparse = [60, 4, 30];
        for nth in order {
            let freed: Vec<_> = objects[nth].drain(..sparse[nth]).collect();
            freed.iter().for_each(|&object| free(&cache, object));
            cache.shrink().unwrap();
        }
        let fullest = slab(objects[1][0]);
        for _ in 0..4 {
            let object = cache.alloc_node(0).unwrap();
            assert_eq!(slab(object), fullest, "{order:?}");
            objects[1].push(object);
        }
        // Now the second fullest slab serves.
        let object = cache.alloc_node(0).unwrap();
        assert_eq!(slab(object), slab(objects[2][0]), "{order:?}");
        objects[2].push(object);
        cache.validate().unwrap();
        objects
            .iter()
            .flatten()
            .for_each(|&object| free(&cache, object));
        cache.shrink().unwrap();
    }
    cache.destroy().unwrap();
}

/// Returns a function that draws numbers below its argument.
fn random() -> impl FnMut(usize) -> usize {
    let mut random = 1u64;
    move |end| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random as usize % end
    }
}

/// A program uses much less of a cache than before, and replaces its objects one by one.
#[test]
fn sparse_slabs_drain_while_the_cache_is_used() {
    let cache = cache("drains");
    if is_debugged(&cache) {
        return;
    }
    let mut below = random();
    let mut objects: Vec<_> = (0..20_000).map(|_| cache.alloc().unwrap()).collect();
    while objects.len() > 2_000 {
        let object = objects.swap_remove(below(objects.len()));
        free(&cache, object);
    }
    let before = cache.usage().slabs;
    let begin = Instant::now();
    while cache.usage().slabs > before / 3 && begin.elapsed() < Duration::from_secs(120) {
        // The use goes up and down by more than the CPU's sheaves hold: a thread whose use stays
        // within them makes no slow call, and nothing drains.
        for wanted in [1_000, 2_000] {
            for _ in 0..5_000 {
                if objects.len() > wanted {
                    let object = objects.swap_remove(below(objects.len()));
                    free(&cache, object);
                } else {
                    objects.push(cache.alloc().unwrap());
                }
            }
            // Slabs drain only while a millisecond sees few exchanges.
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let usage = cache.usage();
    assert!(
        usage.slabs <= before / 3,
        "{before} slabs before, {usage:?}"
    );
    cache.validate().unwrap();
    objects.into_iter().for_each(|object| free(&cache, object));
    cache.destroy().unwrap();
}

/// The number of objects goes up and down between 1,800 and 2,200. The test replaces each object
/// some 15 times. By then, half of the slabs must have gone back.
#[test]
fn sparse_slabs_drain_while_the_use_stays_the_same() {
    const LIVE: usize = 2_000;
    // On another CPU, the thread would leave a sheaf behind, and make one of full size there.
    stay_on_one_cpu();
    let cache = cache("drains steadily");
    if is_debugged(&cache) {
        return;
    }
    let mut below = random();
    let mut objects: Vec<_> = (0..10 * LIVE).map(|_| cache.alloc().unwrap()).collect();
    while objects.len() > LIVE {
        let object = objects.swap_remove(below(objects.len()));
        free(&cache, object);
    }
    let before = cache.usage().slabs;
    for step in 0..30 * LIVE {
        if step % 200 == 0 {
            // Slabs drain only while a millisecond sees few exchanges.
            std::thread::sleep(Duration::from_millis(1));
        }
        let most = match below(2) {
            0 => LIVE + LIVE / 10,
            _ => LIVE - LIVE / 10,
        };
        if objects.len() < most {
            objects.push(cache.alloc().unwrap());
        } else {
            let object = objects.swap_remove(below(objects.len()));
            free(&cache, object);
        }
    }
    let after = cache.usage().slabs;
    assert!(after <= before / 2, "{before} slabs before, {after} after");
    objects.into_iter().for_each(|object| free(&cache, object));
    cache.destroy().unwrap();
}
