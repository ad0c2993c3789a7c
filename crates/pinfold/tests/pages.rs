//! Pages and caches by policy, on four nodes made up by `PINFOLD_FAKE_NODES`. Each test runs in a
//! process of its own.

mod common;

use common::again::{alone, is_alone, passes};
use common::{Random, cpus, give, limit, on_nodes, pin};
use pinfold::internal::arena::node_of;
use pinfold::mempolicy::{Mempolicy, Mode, RangeError, SharedPolicy};
use pinfold::pages::Pages;
use pinfold::slab::{CacheError, KmemCache};
use pinfold::topology::NodeSet;
use std::alloc::Layout;
use std::collections::HashSet;
use std::process::Command;
use std::ptr::NonNull;

const NODES: usize = 4;

fn policy(text: &str) -> Mempolicy {
    Mempolicy::parse(text).unwrap()
}

fn node(page: NonNull<u8>) -> usize {
    node_of(page.as_ptr() as usize)
}

/// Allocates a page for each place, frees the pages, and returns their nodes.
fn nodes_of(pages: &Pages, places: impl Iterator<Item = u64>) -> Vec<usize> {
    let taken: Vec<_> = places.map(|place| pages.alloc(place).unwrap()).collect();
    let nodes = taken.iter().map(|&page| node(page)).collect();
    for page in taken {
        // SAFETY: the page came from `pages` and is not used afterwards.
        unsafe { pages.free(page) };
    }
    nodes
}

#[test]
fn every_mode_places_pages_on_its_nodes() {
    if !on_nodes(NODES, "every_mode_places_pages_on_its_nodes") {
        return;
    }
    // CPU 1 is on node 1.
    let local = if cpus() > 1 { 1 } else { 0 };
    pin(local);
    let pages = Pages::new("modes").unwrap();
    for (text, expected) in [
        ("local", vec![local; 8]),
        ("prefer:2", vec![2; 8]),
        ("bind:3", vec![3; 8]),
        ("bind:0-1", vec![local; 8]),
        // On the ring 0-1-2-3, the nearest of 2 and 3 is 3 from node 0, and 2 from node 1.
        ("bind:2-3", vec![if local == 0 { 3 } else { 2 }; 8]),
        ("bind:1-3@3", vec![3; 8]),
        ("prefer (many):2-3", vec![if local == 0 { 3 } else { 2 }; 8]),
        ("interleave:0-3", vec![0, 1, 2, 3, 0, 1, 2, 3]),
        ("interleave:1,3", vec![1, 3, 1, 3, 1, 3, 1, 3]),
        ("interleave", vec![0, 1, 2, 3, 0, 1, 2, 3]),
        ("default", vec![local; 8]),
        // Positions among the nodes; past the last one they wrap around.
        ("bind=relative:6", vec![2; 8]),
        ("interleave=relative:5-6", vec![1, 2, 1, 2, 1, 2, 1, 2]),
    ] {
        pages.set_policy(0..100, Some(&policy(text))).unwrap();
        assert_eq!(nodes_of(&pages, 0..8), expected, "{text}");
    }
    pages.set_policy(0..100, None).unwrap();
    assert_eq!(nodes_of(&pages, 0..8), vec![local; 8]);
    for text in ["bind:9", "prefer:9", "interleave:8-9"] {
        let policy = policy(text);
        let refused = pages.set_policy(0..100, Some(&policy));
        assert_eq!(refused, Err(RangeError::NoNodes), "{text}");
        let builder = KmemCache::builder("nowhere", Layout::new::<[u64; 64]>());
        assert_eq!(
            builder.policy(&policy).build().err(),
            Some(CacheError::NoNodes)
        );
        // If none of a policy's nodes is usable, `interleave` means all nodes, and the others mean
        // the thread's node.
        pages.policies().set(0..100, Some(&policy)).unwrap();
        let expected = match policy.mode() {
            Mode::Interleave => vec![0, 1, 2, 3],
            _ => vec![local; 4],
        };
        assert_eq!(nodes_of(&pages, 0..4), expected, "{text}");
    }
}

#[test]
fn a_rebind_to_unknown_nodes_is_refused() {
    if !on_nodes(NODES, "a_rebind_to_unknown_nodes_is_refused") {
        return;
    }
    let allowed = |list: &str| list.parse::<NodeSet>().unwrap();
    let pages = Pages::new("rebound").unwrap();
    pages.set_policy(0..10, Some(&policy("bind:0"))).unwrap();
    pages
        .set_policy(10..20, Some(&policy("interleave:0-1")))
        .unwrap();
    pages.set_policy(20..30, Some(&policy("prefer:3"))).unwrap();
    pages.set_policy(30..40, Some(&policy("local"))).unwrap();
    let now = || {
        let nodes = [0..2, 10..12, 20..21].map(|places| nodes_of(&pages, places));
        (pages.policies().to_string(), nodes.concat())
    };
    pages.rebind(&allowed("0-3")).unwrap();
    assert_eq!(now().1, [0, 0, 0, 1, 3]);
    pages.rebind(&allowed("2-5")).unwrap();
    assert_eq!(now().1, [2, 2, 2, 3, 3]);
    let before = now();
    for unknown in ["4-7", "63"] {
        let refused = pages.rebind(&allowed(unknown));
        assert_eq!(refused, Err(RangeError::UnknownNodes), "{unknown}");
        assert_eq!(now(), before, "{unknown}");
    }
    // Node 3 is known, and gives the pages.
    pages.rebind(&allowed("3-4")).unwrap();
    assert_eq!(now().1, [3, 3, 3, 3, 3]);
    // The two policies that remain do not need node 7, so `rebind` accepts it: one is only a
    // preference, and the other means the calling thread's node.
    pages.set_policy(0..20, None).unwrap();
    pages.rebind(&allowed("7")).unwrap();
    assert_eq!(nodes_of(&pages, 20..21), [3]);
    // A shared policy outside of a `Pages` follows to any node.
    let shared = SharedPolicy::new();
    shared.set(0..1, Some(&policy("bind=relative:0"))).unwrap();
    shared.rebind(&allowed("7")).unwrap();
    assert_eq!(shared.to_string(), "0-1 bind=relative:0\n");
    let nodes = shared.lookup(0).map(|policy| policy.nodes().to_string());
    assert_eq!(nodes.as_deref(), Some("7"));
}

#[test]
fn ranges_have_policies_of_their_own() {
    if !on_nodes(NODES, "ranges_have_policies_of_their_own") {
        return;
    }
    pin(0);
    let pages = Pages::new("ranges").unwrap();
    pages.set_policy(0..100, Some(&policy("bind:1"))).unwrap();
    pages.set_policy(40..60, Some(&policy("bind:2"))).unwrap();
    pages.set_policy(50..55, None).unwrap();
    let places = [0, 39, 40, 49, 50, 54, 55, 59, 60, 99, 100];
    assert_eq!(
        nodes_of(&pages, places.into_iter()),
        [1, 1, 2, 2, 0, 0, 2, 2, 1, 1, 0]
    );
    assert_eq!(pages.policy_of(45), Some(policy("bind:2")));
    assert_eq!(pages.policy_of(52), None);
    let reversed = core::ops::Range { start: 5, end: 4 };
    assert_eq!(
        pages.set_policy(reversed, Some(&policy("local"))),
        Err(RangeError::Empty)
    );
}

#[test]
fn no_page_has_two_owners_and_all_come_back() {
    if !on_nodes(NODES, "no_page_has_two_owners_and_all_come_back") {
        return;
    }
    let pages = Pages::new("storm").unwrap();
    let texts = ["interleave", "bind:2", "prefer (many):1,3", "local"];
    pages.set_policy(0..1000, Some(&policy(texts[0]))).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let pages = &pages;
            scope.spawn(move || work(pages, thread));
        }
        // Meanwhile, this thread changes policies.
        let mut random = Random::new(99);
        for _ in 0..2000 {
            let start = random.below(900);
            let text = texts[random.below(texts.len() as u64) as usize];
            let range = start..start + 1 + random.below(100);
            pages.set_policy(range, Some(&policy(text))).unwrap();
        }
    });
    pages.shrink().unwrap();
    for list in pages.lists() {
        assert_eq!((list.active, list.count), (0, 0), "{list}");
    }
}

/// Allocates and frees pages. Marks the first and the last word of each page with its owner.
fn work(pages: &Pages, thread: usize) {
    let mut random = Random::new(thread as u64 + 1);
    let mut held: Vec<(NonNull<u8>, u64)> = Vec::new();
    let words = pages.page_size() / 8;
    for round in 0..20_000 {
        if held.len() < 100 && random.below(2) == 0 {
            let page = pages.alloc(random.below(1000)).unwrap();
            let mark = (thread as u64) << 32 | round;
            for at in [0, words - 1] {
                // SAFETY: `alloc` returned the page to this thread, and `at` is below the number of
                // its words.
                unsafe { page.cast::<u64>().add(at).write(mark) };
            }
            held.push((page, mark));
        } else if !held.is_empty() {
            let (page, mark) = held.swap_remove(random.below(held.len() as u64) as usize);
            for at in [0, words - 1] {
                // SAFETY: the page is in `held`, so this thread owns it, and `at` is below the
                // number of its words.
                assert_eq!(unsafe { page.cast::<u64>().add(at).read() }, mark);
            }
            // SAFETY: the page came from `pages` and is not used afterwards.
            unsafe { pages.free(page) };
        }
    }
    for (page, _) in held {
        // SAFETY: the page came from `pages` and is not used afterwards.
        unsafe { pages.free(page) };
    }
}

#[test]
fn allocations_are_counted_while_counting_is_on() {
    if !on_nodes(NODES, "allocations_are_counted_while_counting_is_on") {
        return;
    }
    pin(0);
    let pages = Pages::new("counted").unwrap();
    pages
        .set_policy(0..100, Some(&policy("interleave:0-3")))
        .unwrap();
    nodes_of(&pages, 0..100);
    assert_eq!(
        pages.numa_stat().to_string(),
        "numa_hit 0\nnuma_miss 0\nnuma_foreign 0\ninterleave_hit 0\nlocal_node 0\nother_node 0\n"
    );
    pages.set_counting(true);
    nodes_of(&pages, 0..100);
    nodes_of(&pages, 200..210);
    assert_eq!(
        pages.numa_stat().to_string(),
        "numa_hit 110\nnuma_miss 0\nnuma_foreign 0\ninterleave_hit 100\nlocal_node 35\nother_node 75\n"
    );
}

#[test]
fn memory_without_a_policy_follows_the_process_policy() {
    const NAME: &str = "memory_without_a_policy_follows_the_process_policy";
    if is_alone(NAME) {
        return under_a_process_policy();
    }
    let with = |policy: &str| {
        let prepare = |command: &mut Command| {
            command.envs([("PINFOLD_FAKE_NODES", "4"), ("PINFOLD_POLICY", policy)]);
        };
        passes(NAME, prepare).contains("by the kernel")
    };
    if pinfold::mempolicy::available().is_ok() {
        assert!(with("interleave:0"));
    }
    for policy in ["local", "default", "interleave:900", "nonsense"] {
        assert!(!with(policy), "{policy}");
    }
}

fn under_a_process_policy() {
    pin(0);
    let pages = Pages::new("process").unwrap();
    let cache = KmemCache::new("process", Layout::new::<[u64; 8]>()).unwrap();
    pages.set_policy(10..20, Some(&policy("bind:2"))).unwrap();
    let [placed, other] = [15, 5].map(|place| pages.alloc(place).unwrap());
    let object = cache.alloc().unwrap();
    assert_eq!(node(placed), 2);
    assert_eq!(node(other), node(object));
    if pages.node_of(other).is_none() {
        println!("by the kernel");
        assert_eq!(node(other), NODES);
    } else {
        assert_eq!(node(other), 0);
    }
    // SAFETY: each page came from `pages` and the object from `cache`, and none is used afterwards.
    unsafe {
        pages.free(placed);
        pages.free(other);
        cache.free(object);
    }
    cache.destroy().unwrap();
}

#[test]
fn other_nodes_give_no_memory_under_a_process_policy() {
    let name = "other_nodes_give_no_memory_under_a_process_policy";
    let prepare = |command: &mut Command| {
        command.envs([("PINFOLD_FAKE_NODES", "4"), ("PINFOLD_POLICY", "bind:0")]);
    };
    if pinfold::mempolicy::available().is_err() || !alone(name, prepare) {
        return;
    }
    let cache = KmemCache::new("alone", Layout::new::<[u64; 128]>()).unwrap();
    // Node 1 has memory too, but that bears a policy of its own.
    let other = cache.alloc_node_exact(1).unwrap();
    let mut objects = Vec::with_capacity(200_000);
    limit(libc::RLIMIT_DATA, 1);
    while let Some(object) = cache.alloc() {
        objects.push(object);
    }
    // A failed assertion needs memory for its message.
    limit(libc::RLIMIT_DATA, libc::RLIM_INFINITY);
    assert!(objects.iter().all(|&object| node(object) == NODES));
    objects.push(cache.alloc_node_exact(1).expect("node 1 still has memory"));
    give(&cache, objects.into_iter().chain([other]));
}

#[test]
fn caches_have_policies_of_their_own() {
    if !on_nodes(NODES, "caches_have_policies_of_their_own") {
        return;
    }
    pin(0);
    for hardened in [false, true] {
        for (text, expected) in [
            ("bind:2", vec![2]),
            ("prefer:3", vec![3]),
            ("interleave:1-3", vec![1, 2, 3]),
            ("local", vec![0]),
            ("default", vec![0]),
        ] {
            let layout = Layout::new::<[u64; 64]>();
            let builder = KmemCache::builder("placed", layout).hardened(hardened);
            let cache = builder.policy(&policy(text)).build().unwrap();
            // The second round gets the objects that the first round freed.
            for _ in 0..2 {
                let mut objects: Vec<_> = (0..1000).map(|_| cache.alloc().unwrap()).collect();
                let mut bulk = [std::ptr::null_mut(); 300];
                assert_eq!(cache.alloc_bulk(&mut bulk), 300);
                objects.extend(bulk.into_iter().map(|object| NonNull::new(object).unwrap()));
                let seen: HashSet<_> = objects.iter().map(|&object| node(object)).collect();
                assert_eq!(seen, expected.iter().copied().collect(), "{text}");
                give(&cache, objects);
                cache.validate().unwrap();
            }
            cache.destroy().unwrap();
        }
    }
}

#[test]
fn a_default_policy_counts_as_no_policy() {
    let pages = Pages::new("none").unwrap();
    pages.set_policy(0..100, Some(&policy("local"))).unwrap();
    pages.set_policy(40..60, Some(&policy("default"))).unwrap();
    let has = |place| pages.policy_of(place).is_some();
    assert_eq!([39, 40, 59, 60].map(has), [true, false, false, true]);
}

/// The made-up nodes are known to the kernel as node 0, so `bind:0` is the only policy that it
/// accepts. It means the allocator's node 0, on every CPU.
#[test]
fn a_pool_follows_the_threads_policy_of_the_moment() {
    let name = "a_pool_follows_the_threads_policy_of_the_moment";
    if pinfold::mempolicy::available().is_err() || !on_nodes(NODES, name) {
        return;
    }
    let Some(cpu) = (0..cpus()).find(|cpu| cpu % NODES != 0) else {
        return;
    };
    pin(cpu);
    let local = cpu % NODES;
    let pages = Pages::new("threads").unwrap();
    pages.set_policy(50..60, Some(&policy("bind:3"))).unwrap();
    let at = |place| nodes_of(&pages, std::iter::once(place))[0];
    let set = |text| pinfold::mempolicy::set_for_thread(&policy(text)).unwrap();
    let set_unseen = |mode: i32, nodes: u64| {
        // SAFETY: the mask is 64 bits long, which the kernel reads for 65.
        let answer = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, &raw const nodes, 65) };
        assert_eq!(answer, 0);
    };
    const BIND: i32 = 2;
    set_unseen(BIND, 1);
    assert_eq!((at(1), at(50)), (local, 3), "the change was not seen");
    pinfold::mempolicy::thread_changed();
    assert_eq!((at(1), at(50)), (0, 3), "a range's policy comes first");
    set_unseen(0, 0);
    assert_eq!(at(1), 0, "the thread has a note");
    pages.set_following_threads(true);
    assert_eq!(at(1), local, "the kernel is asked");
    pages.set_following_threads(false);
    set("bind:0");
    assert_eq!(at(1), 0);
    // Another thread has a policy of its own.
    let elsewhere = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            pin(cpu);
            set("default");
            at(1)
        });
        other.join().unwrap()
    });
    assert_eq!((elsewhere, at(1)), (local, 0));
    set("local");
    assert_eq!(at(1), local);
    set("prefer:0");
    assert_eq!(at(1), 0);
    // The pool's default comes before the thread's policy.
    pages.set_default_policy(Some(&policy("bind:2"))).unwrap();
    assert_eq!((at(1), at(50)), (2, 3));
    pages.set_default_policy(None).unwrap();
    assert_eq!(at(1), 0);
}
