//! The numbers that caches report, compared with what a test has done to them, on the backend that
//! `PINFOLD_RSEQ` selects.
//!
//! The numbers of objects in use are exact if no other thread uses the cache. The numbers of events
//! are exact where the cache's geometry determines them.

mod slabinfo_text;

use pinfold::internal::kmalloc;
use pinfold::slab::debug::{Report, Verdict, on_report};
use pinfold::slab::{DebugFlags, KmemCache, caches, slabinfo};
use slabinfo_text::{Line, parse};
use std::alloc::Layout;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};

/// Runs one test at a time. Destroying a cache stops all CPUs for a moment, and then the sheaves of
/// all caches take other ways.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

fn take(cache: &KmemCache, count: usize) -> Vec<Object> {
    (0..count).map(|_| Object(cache.alloc().unwrap())).collect()
}

fn give(cache: &KmemCache, objects: impl IntoIterator<Item = Object>) {
    for Object(object) in objects {
        // SAFETY: the objects came from this cache and are not used afterwards.
        unsafe { cache.free(object) };
    }
}

/// An object that may go to another thread.
struct Object(NonNull<u8>);
// SAFETY: an `Object` is the only owner of its object.
unsafe impl Send for Object {}

fn attribute(cache: &KmemCache, name: &str) -> usize {
    let value = cache.attribute(name);
    value.unwrap_or_else(|| panic!("no attribute {name}")) as usize
}

/// Checks what must hold of any idle cache that has `active` objects in use.
fn check(cache: &KmemCache, active: usize) {
    let (usage, line) = (cache.usage(), line_of(cache));
    let (in_use, slabs) = (cache.in_use(), cache.statistics().slabs);
    let attributes: HashMap<_, _> = cache.attributes().collect();
    let value = |name: &str| attributes[name] as usize;
    assert_eq!(usage.active, active, "{usage:?}");
    let in_sheaves = usage.cpu_objects + usage.barn_objects;
    assert_eq!(usage.allocated, active + in_sheaves);
    assert_eq!((usage.allocated, usage.slabs), (in_use, slabs));
    let per_slab = value("objs_per_slab");
    assert_eq!(usage.total, usage.slabs * per_slab);
    let in_full = usage.slabs_full() * per_slab;
    assert_eq!(usage.allocated, in_full + usage.objects_partial);
    // The event counts must agree with the current state.
    assert_eq!(usage.slabs, value("alloc_slab") - value("free_slab"));
    assert_eq!(usage.allocated, value("refilled") - value("flushed"));
    assert!(value("sheaf_refill") <= value("refilled"));
    assert!(value("sheaf_flush") <= value("flushed"));
    assert_eq!((line.active_objs, line.num_objs), (active, usage.total));
    assert_eq!(line.active_slabs, usage.slabs - usage.slabs_empty);
    assert_eq!(line.num_slabs, usage.slabs);
    assert_eq!(line.sharedavail, usage.barn_objects);
    cache.validate().unwrap();
}

fn line_of(cache: &KmemCache) -> Line {
    let mut lines = parse(&cache.slabinfo().to_string());
    assert_eq!(lines.len(), 1);
    lines.remove(0)
}

#[test]
fn a_fresh_cache_has_nothing() {
    let _turn = turn();
    let cache = KmemCache::new("fresh", layout(100, 4)).unwrap();
    check(&cache, 0);
    let fixed = |name: &str| attribute(&cache, name);
    assert_eq!(fixed("object_size"), 100);
    assert_eq!((fixed("slab_size"), fixed("align")), (104, 8));
    assert_eq!(fixed("ctor"), 0);
    let bytes = fixed("objs_per_slab") * fixed("slab_size");
    // SAFETY: `sysconf` has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    assert!(bytes <= page << fixed("order"));
    assert_eq!(fixed("sheaf_capacity"), cache.statistics().sheaf_capacity);
    let rest: usize = cache
        .attributes()
        .skip_while(|&(name, _)| name != "objects")
        .map(|(_, value)| value as usize)
        .sum();
    assert_eq!(rest, 0, "{}", cache.attributes());
    let line = line_of(&cache);
    assert_eq!((line.objsize, line.num_slabs), (104, 0));
    assert_eq!(line.pagesperslab, 1 << fixed("order"));
    assert_eq!(line.tunables[1], fixed("sheaf_capacity"));
}

#[test]
fn objects_in_sheaves_are_not_active() {
    let _turn = turn();
    for size in [8, 64, 1000, 8192, 65536] {
        let cache = KmemCache::new("sheaves", layout(size, 8)).unwrap();
        let mut objects = take(&cache, 1);
        check(&cache, 1);
        assert!(cache.usage().cpu_objects + cache.usage().barn_objects > 0);
        objects.extend(take(&cache, 999));
        check(&cache, 1000);
        give(&cache, objects.drain(500..));
        check(&cache, 500);
        assert!(cache.usage().cpu_objects + cache.usage().barn_objects > 0);
        assert!(cache.shrink().is_ok());
        check(&cache, 500);
        let usage = cache.usage();
        assert_eq!((usage.cpu_objects, usage.barn_objects), (0, 0));
        assert_eq!((usage.cpu_sheaves, usage.barn_sheaves), (0, 0));
        assert_eq!((usage.allocated, usage.slabs_empty), (500, 0));
        give(&cache, objects);
        check(&cache, 0);
        cache.shrink().unwrap();
        check(&cache, 0);
        assert_eq!(cache.usage(), Default::default());
        cache.destroy().unwrap();
    }
}

#[test]
fn slabs_are_counted_by_state() {
    let _turn = turn();
    let cache = KmemCache::new("states", layout(512, 8)).unwrap();
    let per_slab = attribute(&cache, "objs_per_slab");
    // Allocates past the sheaves, so that the slabs give exactly these objects.
    let mut pointers = vec![std::ptr::null_mut(); 3 * per_slab];
    let mut objects = Vec::new();
    for pointer in &mut pointers {
        *pointer = cache.alloc_node(0).unwrap().as_ptr();
        objects.push(Object(NonNull::new(*pointer).unwrap()));
    }
    let states = || {
        let usage = cache.usage();
        (usage.slabs_full(), usage.slabs_partial, usage.slabs_empty)
    };
    assert_eq!(states(), (3, 0, 0));
    assert_eq!(attribute(&cache, "refilled"), 3 * per_slab);
    assert_eq!(attribute(&cache, "sheaf_refill"), 0);
    check(&cache, 3 * per_slab);
    give(&cache, objects.drain(2 * per_slab + 1..));
    cache.shrink().unwrap();
    assert_eq!(states(), (2, 1, 0));
    assert_eq!(attribute(&cache, "objects_partial"), 1);
    assert_eq!(attribute(&cache, "free_add_partial"), 1);
    assert_eq!(attribute(&cache, "free_remove_partial"), 0);
    give(&cache, objects.drain(2 * per_slab..));
    cache.shrink().unwrap();
    assert_eq!(states(), (2, 0, 0));
    assert_eq!(attribute(&cache, "free_remove_partial"), 1);
    assert_eq!(attribute(&cache, "alloc_slab"), 3);
    assert_eq!(attribute(&cache, "free_slab"), 1);
    give(&cache, objects);
    check(&cache, 0);
}

#[test]
fn sheaves_that_pass_the_barn_are_counted() {
    let _turn = turn();
    let cache = KmemCache::new("barn", layout(256, 8)).unwrap();
    let capacity = attribute(&cache, "sheaf_capacity");
    let barn = attribute(&cache, "barn_capacity");
    let count = capacity * (barn + 20);
    let objects = take(&cache, count);
    let took = |name: &str| attribute(&cache, name);
    // The barn gives back only sheaves that it got because the thread moved to another CPU with a
    // sheaf in hand.
    assert!(took("barn_get") <= took("barn_put"));
    assert!(took("barn_get_fail") >= barn + 20);
    assert!(took("alloc_slowpath") >= took("barn_get_fail"));
    assert_eq!(took("sheaf_refill"), took("refilled"));
    assert!(took("sheaf_refill") >= count);
    assert_eq!(took("sheaf_flush"), 0);
    give(&cache, objects);
    assert!(took("barn_put") > barn);
    assert!(took("barn_put_fail") > 0 && took("barn_sheaves") <= barn);
    // Some sheaves may have come to the barn partly filled, from a CPU that the thread left.
    assert!((1..=took("flushed")).contains(&took("sheaf_flush")));
    assert!(took("free_slowpath") >= took("barn_put"));
    check(&cache, 0);
    let statistics = cache.statistics();
    assert_eq!(statistics.barn_put_fail as usize, took("barn_put_fail"));
    assert_eq!(statistics.flushed as usize, took("flushed"));
    let objects = take(&cache, 3 * capacity);
    assert!(took("barn_get") > 0);
    give(&cache, objects);
}

#[test]
fn numbers_are_exact_while_several_threads_pause() {
    let _turn = turn();
    const EACH: usize = 2000;
    let cache = KmemCache::new("threads", layout(128, 8)).unwrap();
    let barrier = Barrier::new(5);
    std::thread::scope(|scope| {
        for nth in 0..4 {
            let (cache, barrier) = (&cache, &barrier);
            scope.spawn(move || {
                for round in 0..3 {
                    let kept = take(cache, EACH + nth);
                    give(cache, take(cache, 100 * round));
                    barrier.wait();
                    barrier.wait();
                    give(cache, kept);
                    barrier.wait();
                    barrier.wait();
                }
            });
        }
        for round in 0..3 {
            barrier.wait();
            check(&cache, 4 * EACH + 6);
            if round == 1 {
                cache.shrink().unwrap();
                check(&cache, 4 * EACH + 6);
                assert_eq!(cache.usage().allocated, 4 * EACH + 6);
            }
            barrier.wait();
            barrier.wait();
            check(&cache, 0);
            barrier.wait();
        }
    });
    cache.destroy().unwrap();
}

#[test]
fn numbers_stay_within_bounds_while_other_threads_work() {
    let _turn = turn();
    let cache = KmemCache::new("bounds", layout(64, 8)).unwrap();
    let stop = AtomicBool::new(false);
    let objects = take(&cache, 10);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    give(&cache, take(&cache, 700));
                }
            });
        }
        for _ in 0..500 {
            let usage = cache.usage();
            assert!(usage.allocated <= usage.total && usage.active <= usage.allocated);
            parse(&cache.slabinfo().to_string());
            assert!(cache.attributes().count() > 30);
        }
        stop.store(true, Ordering::Relaxed);
    });
    check(&cache, 10);
    give(&cache, objects);
}

fn overlook(_: &Report<'_>) -> Verdict {
    Verdict::Continue
}

#[test]
fn a_debugged_cache() {
    let _turn = turn();
    on_report(overlook);
    let flags = DebugFlags::RED_ZONE | DebugFlags::USER;
    let cache = KmemCache::builder("debugged", layout(64, 8))
        .debug(flags)
        .build()
        .unwrap();
    let fixed = |name: &str| attribute(&cache, name);
    let made = ["sanity_checks", "red_zone", "poison", "store_user", "trace"];
    assert_eq!(made.map(fixed), [0, 1, 0, 1, 0]);
    assert_eq!((fixed("object_size"), fixed("hardened")), (64, 0));
    assert!(fixed("slab_size") > 64 + 16);
    assert_eq!((fixed("sheaf_capacity"), fixed("barn_capacity")), (0, 0));
    assert_eq!(line_of(&cache).tunables, [0; 3]);
    let mut objects = take(&cache, 300);
    check(&cache, 300);
    give(&cache, objects.drain(100..));
    check(&cache, 100);
    assert_eq!(
        (fixed("alloc_slowpath"), fixed("free_slowpath")),
        (300, 200)
    );
    assert_eq!((fixed("refilled"), fixed("flushed")), (300, 200));
    let through_sheaves = [
        "sheaf_refill",
        "sheaf_flush",
        "cpu_sheaves",
        "barn_get_fail",
    ];
    assert_eq!(through_sheaves.map(fixed), [0; 4]);
    cache.shrink().unwrap();
    check(&cache, 100);
    give(&cache, objects);
    check(&cache, 0);
    cache.destroy().unwrap();
}

#[test]
fn a_hardened_cache() {
    let _turn = turn();
    on_report(overlook);
    let cache = KmemCache::builder("hard", layout(96, 8))
        .hardened(true)
        .build()
        .unwrap();
    assert!(cache.info().is_hardened() && attribute(&cache, "hardened") == 1);
    let mut objects = take(&cache, 1000);
    check(&cache, 1000);
    give(&cache, objects.drain(300..));
    // The quarantine is in the barn, and its objects are not active.
    check(&cache, 300);
    assert!(cache.usage().barn_objects > 0 && cache.usage().cpu_sheaves > 0);
    // An object that was overwritten is never given out again, and stays active. This picks one
    // whose slab stays: another object of the same 64 KiB is in use.
    objects.sort_by_key(|object| object.0);
    let of = |object: &Object| object.0.as_ptr() as usize >> 16;
    let beside = |pair: &[Object]| of(&pair[0]) == of(&pair[1]);
    let nth = objects.windows(2).position(beside).unwrap();
    let written = objects.remove(nth).0;
    // SAFETY: the object came from this cache, whose memory stays mapped; the write after the free
    // is the planted fault.
    unsafe {
        cache.free(written);
        // Changes a byte of the key.
        *written.as_ptr() ^= 7;
    }
    cache.shrink().unwrap();
    check(&cache, 299);
    let all = take(&cache, attribute(&cache, "total_objects"));
    assert_eq!(cache.usage().active, 299 + all.len() + 1);
    give(&cache, all);
    give(&cache, objects);
    assert_eq!(cache.usage().active, 1);
}

#[test]
fn a_constructor_is_an_attribute() {
    let _turn = turn();
    unsafe fn nothing(_: *mut u8) {}
    // SAFETY: the objects are plain bytes, for which any content is valid.
    let cache = unsafe { KmemCache::builder("made", layout(32, 32)).constructor(nothing) }
        .build()
        .unwrap();
    assert_eq!(attribute(&cache, "ctor"), 1);
    assert_eq!(attribute(&cache, "align"), 32);
}

#[test]
fn names_are_one_word_of_ascii() {
    let _turn = turn();
    for (name, shown) in [
        ("two words", "two_words"),
        ("tab\there\n", "tab_here_"),
        ("größe", "gr__e"),
        ("#comment", "_comment"),
        ("a#b:c-1", "a#b:c-1"),
        ("", "(unnamed)"),
        (
            "a-name-that-is-longer-than-its-column",
            "a-name-that-is-longer-than-its-c",
        ),
    ] {
        let cache = KmemCache::new(name, layout(8, 8)).unwrap();
        assert_eq!(line_of(&cache).name, shown);
    }
}

#[test]
fn attributes_as_text_and_one_by_one() {
    let _turn = turn();
    let cache = KmemCache::new("text", layout(40, 8)).unwrap();
    let objects = take(&cache, 50);
    let text = cache.attributes().to_string();
    let mut read = HashMap::new();
    for line in text.lines() {
        let (name, value) = line.split_once(' ').unwrap();
        assert!(read.insert(name, value.parse::<u64>().unwrap()).is_none());
    }
    for (name, value) in cache.attributes() {
        assert_eq!(read[name], value);
        assert_eq!(cache.attribute(name), Some(value), "{name}");
    }
    assert_eq!(read["objects"], 50);
    for unknown in ["alloc_fastpath", "cache_dma", "min_partial", "", "Objects"] {
        assert_eq!(cache.attribute(unknown), None);
    }
    // The documentation must list every attribute.
    let documented = include_str!("../../../docs/slabinfo.md");
    for name in read.keys() {
        assert!(documented.contains(&format!("`{name}`")), "{name}");
    }
    give(&cache, objects);
}

#[test]
fn all_caches_are_listed() {
    let _turn = turn();
    let cache = KmemCache::new("listed", layout(24, 8)).unwrap();
    let objects = take(&cache, 7);
    let lines = parse(&slabinfo().to_string());
    let line = lines.iter().find(|line| line.name == "listed").unwrap();
    assert_eq!(line, &line_of(&cache));
    assert_eq!(line.active_objs, 7);
    let info = caches().find(|info| info.name() == "listed").unwrap();
    assert_eq!(info.statistics(), cache.statistics());
    assert_eq!(info.usage(), cache.usage());
    assert_eq!(info.debug_flags(), DebugFlags::NONE);
    give(&cache, objects);
}

#[test]
fn a_destroyed_cache_reads_as_zero() {
    let _turn = turn();
    let cache = KmemCache::new("gone", layout(24, 8)).unwrap();
    let info = cache.info();
    give(&cache, take(&cache, 1000));
    assert!(!info.is_destroyed() && info.statistics().slab_alloc > 0);
    cache.destroy().unwrap();
    // The new cache gets the old cache's number, and with it its words in the units.
    let next = KmemCache::new("next", layout(24, 8)).unwrap();
    let objects = take(&next, 1000);
    assert!(info.is_destroyed());
    assert_eq!(info.name(), "gone");
    assert_eq!(info.usage(), Default::default());
    assert_eq!(info.statistics(), Default::default());
    assert_eq!(info.attribute("alloc_slab"), Some(0));
    assert!(parse(&info.slabinfo().to_string()).is_empty());
    assert!(
        !parse(&slabinfo().to_string())
            .iter()
            .any(|line| line.name == "gone")
    );
    give(&next, objects);
}

#[test]
fn caches_come_and_go_while_they_are_listed() {
    let _turn = turn();
    let stop = AtomicBool::new(false);
    let stop = &stop;
    std::thread::scope(|scope| {
        for thread in 0..2 {
            scope.spawn(move || {
                let sizes = [16, 5000];
                while !stop.load(Ordering::Relaxed) {
                    let cache = KmemCache::new("passing", layout(sizes[thread], 8)).unwrap();
                    give(&cache, take(&cache, 300));
                    cache.destroy().unwrap();
                }
            });
        }
        for _ in 0..100 {
            for line in parse(&slabinfo().to_string()) {
                assert!(line.active_objs <= line.num_objs, "{line:?}");
                assert!(line.name != "passing" || line.num_slabs <= 64, "{line:?}");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_size_class_is_listed_from_its_first_use_on() {
    let _turn = turn();
    assert!(kmalloc::init());
    let name = format!(
        "kmalloc-{:05}",
        kmalloc::size_of_class(kmalloc::class_of(3_000))
    );
    let is_listed = || caches().any(|info| info.name() == name);
    assert!(!is_listed());
    let block = kmalloc::alloc(3_000);
    assert!(is_listed());
    // SAFETY: the block is new, and is not used afterwards.
    unsafe { kmalloc::free_class(block, kmalloc::class_of(3_000)) };
}
