//! Caches on two nodes, which `PINFOLD_FAKE_NODES` simulates. Each test runs in a process of its
//! own.

mod common;

use common::{Random, cpus, give, limit, on_nodes, pin};
use pinfold::counter::PerCpuCounter;
use pinfold::internal::arena::node_of;
use pinfold::slab::KmemCache;
use pinfold_rseq::{Backend, Index};
use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

fn cache(size: usize) -> KmemCache {
    KmemCache::new("noded", Layout::from_size_align(size, 8).unwrap()).unwrap()
}

fn node(object: NonNull<u8>) -> usize {
    node_of(object.as_ptr() as usize)
}

/// A sheaf belongs to a CPU's node. A concurrency id has no node, so it must not select the sheaf,
/// also if the process's first slow path is a counter's.
#[test]
fn a_counter_before_the_first_cache_chooses_cpu_numbers() {
    if !on_nodes(2, "a_counter_before_the_first_cache_chooses_cpu_numbers") {
        return;
    }
    let counter = PerCpuCounter::new();
    counter.add(1);
    let backend = pinfold_rseq::backend();
    let asked = std::env::var("PINFOLD_RSEQ").is_ok_and(|value| value == "cid");
    assert!(asked || backend != Backend::Rseq(Index::Cid), "{backend:?}");
    assert!(pinfold_rseq::decided());
    cache(64).destroy().unwrap();
    assert_eq!(counter.sum(), 1);
}

#[test]
fn objects_are_of_the_node_asked_for() {
    if !on_nodes(2, "objects_are_of_the_node_asked_for") {
        return;
    }
    let cache = cache(256);
    for wanted in [0, 1, 1, 0] {
        let objects: Vec<_> = (0..3000)
            .map(|_| cache.alloc_node_exact(wanted).unwrap())
            .chain((0..3000).map(|_| cache.alloc_node(wanted).unwrap()))
            .collect();
        assert!(objects.iter().all(|&object| node(object) == wanted));
        give(&cache, objects);
        cache.validate().unwrap();
    }
    assert!(cache.alloc_node_exact(2).is_none());
    assert_eq!(cache.statistics().alloc_node_mismatch, 0);
    cache.destroy().unwrap();
}

#[test]
fn runs_may_come_before_caches() {
    if !on_nodes(2, "runs_may_come_before_caches") {
        return;
    }
    let run =
        pinfold::internal::arena::alloc_run(1, 1, pinfold::internal::arena::LARGE, false).unwrap();
    let cache = cache(256);
    assert_eq!(node(run.start), 1);
    for wanted in [0, 1] {
        let object = cache.alloc_node_exact(wanted).unwrap();
        assert_eq!(node(object), wanted);
        // SAFETY: the object came from this cache and is not used afterwards.
        unsafe { cache.free(object) };
    }
    // SAFETY: the run is in use, and the test gives it up.
    unsafe { pinfold::internal::arena::free_run(run.start) };
    cache.destroy().unwrap();
}

#[test]
fn remote_objects_go_home_in_batches() {
    if !on_nodes(2, "remote_objects_go_home_in_batches") || cpus() < 2 {
        return;
    }
    goes_home(cache(64));
    let layout = Layout::from_size_align(64, 8).unwrap();
    let hardened = KmemCache::builder("guarded", layout).hardened(true).build();
    goes_home(hardened.unwrap());
}

fn goes_home(cache: KmemCache) {
    const COUNT: usize = 20_000;
    // The thread is on node 0 and frees only objects of node 1, so none of them may stay in this
    // CPU's sheaves.
    pin(0);
    let remote: Vec<_> = (0..COUNT)
        .map(|_| cache.alloc_node_exact(1).unwrap().as_ptr())
        .collect();
    // SAFETY: the objects came from this cache and are not used afterwards.
    unsafe { cache.free_bulk(&remote) };
    let statistics = cache.statistics();
    // A debugged cache has no sheaves. Each of its objects goes home when it is freed.
    let sheaves = statistics.sheaf_capacity > 0;
    assert!(!sheaves || statistics.free_remote as usize >= COUNT - 2 * statistics.sheaf_capacity);
    // This CPU then gets only its own node's objects, except for those that its sheaves still hold.
    let local: Vec<_> = (0..COUNT).map(|_| cache.alloc().unwrap()).collect();
    let foreign = local.iter().filter(|&&object| node(object) == 1).count();
    assert!(foreign <= 2 * statistics.sheaf_capacity, "{foreign}");
    give(&cache, local);
    cache.validate().unwrap();
    cache.destroy().unwrap();
}

#[test]
#[cfg_attr(
    target_env = "musl",
    ignore = "the C library's malloc needs memory too"
)]
fn another_node_helps_out() {
    if !on_nodes(2, "another_node_helps_out") {
        return;
    }
    let cache = cache(1024);
    // Makes slabs of node 1 before the memory runs out.
    let first: Vec<_> = (0..500)
        .map(|_| cache.alloc_node_exact(1).unwrap().as_ptr())
        .collect();
    // SAFETY: the objects came from this cache and are not used afterwards.
    unsafe { cache.free_bulk(&first) };
    let mut objects = Vec::with_capacity(200_000);
    limit(libc::RLIMIT_DATA, 1);
    while let Some(object) = cache.alloc_node_exact(0) {
        objects.push(object);
    }
    let own = objects.len();
    while let Some(object) = cache.alloc_node(0) {
        objects.push(object);
    }
    assert!(objects[..own].iter().all(|&object| node(object) == 0));
    assert!(objects[own..].iter().all(|&object| node(object) == 1));
    let helped = (objects.len() - own) as u64;
    assert!(helped > 0 && cache.statistics().alloc_node_mismatch == helped);
    give(&cache, objects);
    cache.validate().unwrap();
    cache.destroy().unwrap();
}

#[test]
fn threads_of_two_nodes_exchange_objects() {
    if !on_nodes(2, "threads_of_two_nodes_exchange_objects") {
        return;
    }
    let cache = cache(128);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (sender, receiver) = std::sync::mpsc::sync_channel::<Vec<usize>>(8);
        for seed in 0..2 {
            let (cache, stop, sender) = (&cache, &stop, sender.clone());
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !stop.load(Relaxed) {
                    pin(random.below(64) as usize);
                    let mut objects = vec![std::ptr::null_mut(); random.below(700) as usize];
                    let got = match random.below(3) {
                        0 => {
                            let wanted = random.below(2) as usize;
                            objects.fill_with(|| cache.alloc_node(wanted).unwrap().as_ptr());
                            objects.len()
                        }
                        _ => cache.alloc_bulk(&mut objects),
                    };
                    assert_eq!(got, objects.len());
                    let objects = objects.into_iter().map(|object| object as usize).collect();
                    if sender.send(objects).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut random = Random::new(9);
        for turn in 0..2000 {
            pin(random.below(64) as usize);
            let objects: Vec<_> = receiver
                .recv()
                .unwrap()
                .into_iter()
                .map(|object| object as *mut u8)
                .collect();
            match turn % 3 {
                // SAFETY: the objects came from this cache, and their sender gave them up.
                0 => unsafe { cache.free_bulk(&objects) },
                1 => objects
                    .into_iter()
                    .filter_map(NonNull::new)
                    .for_each(|object| {
                        // SAFETY: the object came from this cache, and its sender gave it up.
                        unsafe { cache.free(object) };
                    }),
                _ => objects
                    .into_iter()
                    .filter_map(NonNull::new)
                    .for_each(|object| {
                        // SAFETY: the object came from this cache, and no reader knows it.
                        unsafe { cache.free_deferred(object) };
                    }),
            }
            if turn % 500 == 0 {
                cache.validate().unwrap();
                let _ = cache.shrink();
            }
        }
        stop.store(true, Relaxed);
        for objects in receiver.iter() {
            let objects: Vec<_> = objects
                .into_iter()
                .map(|object| object as *mut u8)
                .collect();
            // SAFETY: the objects came from this cache, and their sender gave them up.
            unsafe { cache.free_bulk(&objects) };
        }
    });
    let statistics = cache.statistics();
    assert!(cpus() < 2 || statistics.sheaf_capacity == 0 || statistics.free_remote > 0);
    cache.validate().unwrap();
    if cache.flush_deferred().is_ok() {
        cache.destroy().unwrap();
    }
}
