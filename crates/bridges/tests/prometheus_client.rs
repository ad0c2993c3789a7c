//! The types in the registry and the families of prometheus-client, from several threads, compared
//! with that crate's own types.

use pinfold::slab::KmemCache;
use pinfold_bridges::prometheus_client::AllocatorCollector;
use pinfold_bridges::prometheus_client::metrics::{counter, gauge, histogram};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics as peer;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use std::alloc::Layout;
use std::sync::atomic::AtomicU64;
use std::thread;

const THREADS: usize = 8;
const ROUNDS: usize = 10_000;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Labels {
    path: String,
}

/// Does with the types of one crate what the other crate's types can do too, and returns the page.
macro_rules! page {
    ($counter:ty, $float_counter:ty, $gauge:ty, $float_gauge:ty, $histogram:path) => {{
        let mut registry = Registry::default();
        let requests = Family::<Labels, $counter>::default();
        let seconds = <$float_counter>::default();
        let connections = <$gauge>::default();
        let load = <$float_gauge>::default();
        let sizes = Family::<Labels, _>::new_with_constructor(|| {
            use $histogram as Histogram;
            Histogram::new([1.0, 2.0, 4.0])
        });
        registry.register("requests", "Requests", requests.clone());
        registry.register("seconds", "Seconds", seconds.clone());
        registry.register("connections", "Connections", connections.clone());
        registry.register("load", "Load", load.clone());
        registry.register("sizes", "Sizes", sizes.clone());
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let odd = Labels {
                        path: "C:\\x \"y\"\n".to_owned(),
                    };
                    for round in 0..ROUNDS {
                        requests.get_or_create(&odd).inc();
                        requests.get_or_create(&odd).inc_by(2);
                        seconds.inc_by(0.25);
                        connections.inc_by(5);
                        connections.dec_by(3);
                        connections.dec();
                        load.inc_by(1.5);
                        load.dec();
                        sizes.get_or_create(&odd).observe((round % 6) as f64);
                    }
                });
            }
        });
        let mut page = String::new();
        encode(&mut page, &registry).unwrap();
        page
    }};
}

#[test]
fn pages_equal_those_of_prometheus_client() {
    let ours = page!(
        counter::Counter,
        counter::Counter<f64, AtomicU64>,
        gauge::Gauge,
        gauge::Gauge<f64, AtomicU64>,
        histogram::Histogram
    );
    let theirs = page!(
        peer::counter::Counter,
        peer::counter::Counter<f64, AtomicU64>,
        peer::gauge::Gauge,
        peer::gauge::Gauge<f64, AtomicU64>,
        peer::histogram::Histogram
    );
    assert_eq!(ours, theirs);
    let count = THREADS * ROUNDS;
    for line in [
        format!(
            "requests_total{{path=\"C:\\\\x \\\"y\\\"\\n\"}} {}\n",
            3 * count
        ),
        format!("connections {count}\n"),
    ] {
        assert!(ours.contains(&line), "{line} is not in\n{ours}");
    }
}

#[test]
fn set_returns_the_exact_previous_value() {
    let gauge = gauge::Gauge::<i64>::default();
    let taken: i64 = thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| (0..ROUNDS).for_each(|_| gauge.inc()));
        }
        let taker = scope.spawn(|| (0..500).map(|_| gauge.set(0)).sum());
        taker.join().unwrap()
    });
    assert_eq!(taken + gauge.get(), (THREADS * ROUNDS) as i64);
}

#[test]
fn unsigned_gauges_use_all_bits() {
    let gauge = gauge::Gauge::<u64, AtomicU64>::default();
    gauge.set(u64::MAX - 1);
    gauge.inc();
    assert_eq!(gauge.get(), u64::MAX);
    gauge.dec_by(u64::MAX);
    assert_eq!(gauge.get(), 0);
}

#[test]
fn clones_share_their_counts() {
    let histogram = histogram::Histogram::new(histogram::linear_buckets(1.0, 1.0, 3));
    histogram.clone().observe(2.5);
    assert_eq!((histogram.count(), histogram.sum()), (1, 2.5));
    assert!(format!("{histogram:?}").contains("(3.0, 1)"));
}

/// Returns the value of a series on a page.
#[track_caller]
fn value(page: &str, series: &str) -> i64 {
    let found = page
        .lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    found.expect(series).parse().unwrap()
}

#[test]
fn the_allocator_of_the_process_is_exported() {
    let cache = KmemCache::new("exported", Layout::new::<[u64; 8]>()).unwrap();
    let objects: Vec<_> = (0..1000).map(|_| cache.alloc().unwrap()).collect();
    let mut registry = Registry::default();
    registry.register_collector(Box::new(AllocatorCollector));
    let page = || {
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    };
    let full = page();
    assert!(full.ends_with("# EOF\n"));
    let active = "pinfold_cache_objects{cache=\"exported\",state=\"active\"}";
    assert!(value(&full, active) >= 1000);
    assert!(value(&full, "pinfold_cache_slabs{cache=\"exported\"}") > 0);
    assert!(value(&full, "pinfold_cache_refills_total{cache=\"exported\"}") >= 1000);
    let bytes = |name: &str| value(&full, name);
    assert!(bytes("pinfold_allocated_bytes") >= 64_000);
    assert!(bytes("pinfold_active_bytes") >= bytes("pinfold_allocated_bytes"));
    assert!(bytes("pinfold_held_bytes") >= bytes("pinfold_active_bytes"));
    assert!(bytes("pinfold_held_peak_bytes") >= bytes("pinfold_held_bytes"));
    for object in objects {
        // SAFETY: the object came from this cache, and is not used afterwards.
        unsafe { cache.free(object) };
    }
    cache.shrink().unwrap();
    assert!(value(&page(), active) < 1000);
}
