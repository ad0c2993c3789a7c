//! Heap profiles of object caches: every way to get an object is sampled, and every way to free it
//! is seen. The tests sample each allocation, so all sums are exact.

use pinfold::internal::profile;
use pinfold::slab::{KmemCache, MemPool};
use pinfold::topology::{CpuSet, affinity, set_affinity};
use std::alloc::Layout;
use std::ptr::{NonNull, null_mut};
use std::sync::Mutex;

const SIZE: usize = 96;

/// The profile belongs to the process, so one test at a time uses it.
static ALONE: Mutex<()> = Mutex::new(());

fn start() {
    // SAFETY: only this module uses the private memory, and `ALONE` is held.
    assert!(unsafe { profile::start(1, profile::private_memory) });
}

fn cache(profiled: bool) -> KmemCache {
    let layout = Layout::from_size_align(SIZE, 8).unwrap();
    let builder = KmemCache::builder("profiled", layout);
    builder.profiled(profiled).build().unwrap()
}

/// Returns the bytes in use by the profile.
fn in_use() -> u64 {
    let totals = profile::totals();
    assert_eq!(totals.dropped, 0);
    totals.bytes - totals.freed_bytes
}

/// Checks that `count` objects more are in use than at `before`.
fn check(before: u64, count: usize, what: &str) {
    assert_eq!(in_use() - before, (count * SIZE) as u64, "{what}");
}

#[test]
fn every_way_to_allocate_and_to_free_is_seen() {
    let _alone = ALONE.lock().unwrap();
    start();
    let cache = cache(true);
    warm_up(&cache);
    let before = in_use();
    let mut objects: Vec<NonNull<u8>> = (0..300).map(|_| cache.alloc().unwrap()).collect();
    check(before, 300, "alloc");
    let mut bulk = [null_mut(); 200];
    assert_eq!(cache.alloc_bulk(&mut bulk), 200);
    check(before, 500, "alloc_bulk");
    objects.push(cache.alloc_node(0).unwrap());
    objects.push(cache.alloc_node_exact(0).unwrap());
    check(before, 502, "alloc_node");
    // SAFETY: the objects came from this cache and are not used afterwards.
    unsafe { cache.free_bulk(&bulk) };
    check(before, 302, "free_bulk");
    let deferred = objects.split_off(200);
    for &object in &deferred {
        // SAFETY: as above, and no reader knows the object.
        unsafe { cache.free_deferred(object) };
    }
    cache.flush_deferred().unwrap();
    check(before, 200, "free_deferred");
    for object in objects {
        // SAFETY: as above.
        unsafe { cache.free(object) };
    }
    check(before, 0, "free");
    profile::stop();
    cache.destroy().unwrap();
}

#[test]
fn reserves_are_in_use_until_their_owner_ends() {
    let _alone = ALONE.lock().unwrap();
    start();
    let cache = cache(true);
    warm_up(&cache);
    let before = in_use();
    let prefilled = cache.prefill(50).unwrap();
    check(before, 50, "prefill");
    drop(prefilled);
    check(before, 0, "a dropped prefill");
    let pool = MemPool::new(&cache, 8).unwrap();
    check(before, 8, "a pool's reserve");
    drop(pool);
    check(before, 0, "a dropped pool");
    profile::stop();
}

#[test]
fn other_caches_and_times_are_left_out() {
    let _alone = ALONE.lock().unwrap();
    let (plain, profiled) = (cache(false), cache(true));
    let early = profiled.alloc().unwrap();
    start();
    warm_up(&profiled);
    let before = in_use();
    let object = plain.alloc().unwrap();
    check(before, 0, "a cache without the setting");
    let sampled = profiled.alloc().unwrap();
    check(before, 1, "a cache with the setting");
    profile::stop();
    let late = profiled.alloc().unwrap();
    check(before, 1, "an object from after the end");
    // SAFETY: each object came from its cache and is not used afterwards.
    unsafe {
        plain.free(object);
        profiled.free(early);
        profiled.free(late);
        profiled.free(sampled);
    }
    check(before, 0, "the free of a sampled object after the end");
}

/// Begins an interval on each CPU. The first allocation in an interval is not sampled. Then stays
/// on one CPU.
fn warm_up(cache: &KmemCache) {
    for cpu in affinity().unwrap().iter() {
        assert!(set_affinity(&CpuSet::from_iter([cpu])));
        let object = cache.alloc().unwrap();
        // SAFETY: the object came from this cache and is not used afterwards.
        unsafe { cache.free(object) };
    }
}
