//! Items over zones, as a program uses them.

mod common;

use common::again::alone;
use common::{Random, on_nodes, pin};
use pinfold::counter::CounterError;
use pinfold::slab::KmemCache;
use pinfold::topology::NodeId;
use pinfold::vmstat::{MAX_THRESHOLD, VmStat, Zone, normal_threshold};
use std::alloc::Layout;

pinfold::vmstat_items! {
    enum Pool {
        Free = "nr_free",
        Dirty = "nr_dirty",
        Hit = "pool_hit",
    }
}

#[test]
fn items_are_apart_and_add_up_over_zones() {
    let pool: VmStat<Pool> = VmStat::new();
    assert_eq!((pool.read(Pool::Free), pool.zones()), (0, 0));
    assert_eq!(pool.to_string(), "nr_free 0\nnr_dirty 0\npool_hit 0\n");
    pool.add(Zone::normal(0), Pool::Free, 1_000_000);
    pool.add(Zone::huge(0), Pool::Free, -7);
    pool.inc(Zone::huge(0), Pool::Dirty);
    pool.add(Zone::normal(0), Pool::Hit, i64::MIN);
    pool.add(Zone::normal(0), Pool::Hit, i64::MAX);
    assert_eq!(pool.sum(Pool::Free), 999_993);
    assert_eq!(pool.sum_zone(Zone::huge(0), Pool::Free), -7);
    assert_eq!(
        pool.to_string(),
        "nr_free 999993\nnr_dirty 1\npool_hit -1\n"
    );
    pool.fold();
    assert_eq!(pool.read(Pool::Free), 999_993);
    assert_eq!(pool.read_zone(Zone::normal(0), Pool::Free), 1_000_000);
    assert_eq!(pool.lost(), 0);
}

#[test]
fn a_node_that_does_not_exist_has_no_counts() {
    let pool: VmStat<Pool> = VmStat::new();
    let far = [Zone::normal(1000), Zone::huge(1000), Zone::huge(usize::MAX)];
    for (nth, zone) in far.into_iter().enumerate() {
        pool.add(zone, Pool::Free, 3);
        pool.inc(Zone::huge(0), Pool::Free);
        assert_eq!(pool.lost(), nth as u64 + 1, "{zone:?}");
        assert!(!pool.has(zone), "{zone:?}");
        assert_eq!(pool.threshold(zone), 0);
        assert_eq!(pool.read_zone(zone, Pool::Free), 0);
        assert_eq!(pool.sum_zone(zone, Pool::Free), 0);
    }
    assert!(pool.has(Zone::normal(0)) && pool.has(Zone::huge(0)));
    assert_eq!(pool.sum_zone(Zone::huge(0), Pool::Free), 3);
    assert_eq!(pool.sum(Pool::Free), 3);
}

#[test]
fn settings_apply_also_if_zones_come_before_the_first_cache() {
    let name = "settings_apply_also_if_zones_come_before_the_first_cache";
    let is_alone = alone(name, |command| {
        command.env("PINFOLD_MEMORY_LIMIT", "640M");
    });
    if is_alone {
        assert!(Zone::normal_of(NodeId(usize::MAX)).is_none());
        assert_eq!(pinfold::internal::arena::memory_limit(), Some(640 << 20));
    }
}

#[test]
fn every_node_of_the_allocator_has_two_zones() {
    let ran = [2, 5].map(|nodes| on_nodes(nodes, "every_node_of_the_allocator_has_two_zones"));
    if ran == [false; 2] {
        return;
    }
    let nodes = std::env::var("PINFOLD_FAKE_NODES").unwrap();
    let nodes: usize = nodes.parse().unwrap();
    let pool: VmStat<Pool> = VmStat::new();
    for node in 0..nodes {
        pool.add(Zone::normal(node), Pool::Free, 10 + node as i64);
        pool.add(Zone::huge(node), Pool::Free, -1000);
    }
    pool.inc(Zone::normal(nodes), Pool::Free);
    assert_eq!((pool.zones(), pool.lost()), (2 * nodes, 1));

    let cache = KmemCache::new("zoned", Layout::new::<u64>()).unwrap();
    for node in 0..nodes + 2 {
        let there = node < nodes;
        let zone = Zone::normal(node);
        let counted = if there { 10 + node as i64 } else { 0 };
        assert_eq!(pool.sum_zone(zone, Pool::Free), counted);
        assert_eq!(pool.has(zone), there);
        assert_eq!(Zone::normal_of(NodeId(node)), there.then_some(zone));
        let huge = there.then_some(Zone::huge(node));
        assert_eq!(Zone::huge_of(NodeId(node)), huge);
        let object = cache.alloc_node_exact(node);
        assert_eq!(object.is_some(), there, "node {node} of {nodes}");
        if let Some(object) = object {
            // SAFETY: this cache allocated the object, and nothing uses it.
            unsafe { cache.free(object) };
        }
    }
}

#[test]
fn thresholds_follow_the_formula_and_change() {
    let pool: VmStat<Pool> = VmStat::new();
    let threshold = pool.threshold(Zone::normal(0));
    assert!((2..=MAX_THRESHOLD).contains(&threshold));
    assert_eq!(pool.set_threshold(0), Err(CounterError::Batch { batch: 0 }));
    for wanted in [threshold + 50, 3] {
        match pool.set_threshold(wanted) {
            Ok(()) => assert_eq!(pool.threshold(Zone::huge(0)), wanted),
            Err(error) => assert_eq!(error, CounterError::Fence),
        }
        for n in 0..1000 {
            pool.inc(Zone::normal(0), Pool::Free);
            let truth = pool.sum(Pool::Free);
            assert!(
                pool.read(Pool::Free).abs_diff(truth) <= pool.error_bound(Pool::Free),
                "{n}"
            );
        }
    }
    pool.set_normal_threshold().unwrap();
    assert_eq!(pool.threshold(Zone::normal(0)), threshold);
    assert_eq!(pool.sum(Pool::Free), 2000);
    // From the kernel's table in mm/vmstat.c.
    let gib = |gib: u64| gib << 30;
    let table = [
        (1, gib(1) - 1, 8),
        (2, gib(1) - 1, 16),
        (2, gib(2) - 1, 20),
        (2, gib(3), 24),
    ];
    for (cpus, memory, threshold) in table {
        assert_eq!(normal_threshold(cpus, memory), threshold);
    }
}

#[test]
fn threads_on_all_cpus_lose_nothing() {
    static POOL: VmStat<Pool> = VmStat::new();
    std::thread::scope(|scope| {
        for seed in 0..8 {
            scope.spawn(move || {
                let mut random = Random::new(seed);
                for _ in 0..100_000 {
                    POOL.inc(Zone::normal(0), Pool::Free);
                    POOL.add(Zone::huge(0), Pool::Dirty, random.below(300) as i64 - 150);
                    POOL.dec(Zone::normal(0), Pool::Free);
                    POOL.inc(Zone::normal(0), Pool::Hit);
                    if random.below(5000) == 0 {
                        pin(random.below(64) as usize);
                        POOL.fold();
                    }
                }
            });
        }
    });
    assert_eq!(POOL.sum(Pool::Free), 0);
    assert_eq!(POOL.sum(Pool::Hit), 800_000);
    POOL.fold();
    assert_eq!(POOL.read(Pool::Hit), 800_000);
}
