//! Where the allocator's memory lies, according to the kernel, on a machine with several nodes.

mod common;

use common::again::passes;
use common::pin;
use pinfold::internal::arena::{NUMA_STAT, NumaItem};
use pinfold::mempolicy::{
    Distances, Mempolicy, Move, PageNode, Weights, apply, mems_allowed, node_for, nodes_of_pages,
    set_for_thread, thread_changed,
};
use pinfold::pages::Pages;
use pinfold::slab::KmemCache;
use pinfold::topology::{NodeId, NodeSet, Topology};
use pinfold::vmstat::Zone;
use std::alloc::Layout;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

/// Returns the nodes with memory, and for each node a CPU that is not isolated, if it has one.
fn nodes() -> Vec<(NodeId, Option<usize>)> {
    let topology = Topology::system().unwrap();
    let nodes = topology.with_memory.iter().map(NodeId);
    nodes
        .map(|node| {
            let cpus = topology.cpus_of(node).unwrap();
            let cpu = cpus.iter().find(|&cpu| !topology.isolated.contains(cpu));
            (node, cpu)
        })
        .collect()
}

/// Returns the nodes with memory. With fewer than two, prints that the test is skipped and returns
/// none.
fn several() -> Vec<NodeId> {
    let all: Vec<_> = nodes().into_iter().map(|(node, _)| node).collect();
    if all.len() < 2 {
        eprintln!("skipped: one node");
        return Vec::new();
    }
    all
}

fn policy(text: &str) -> Mempolicy {
    let mut policy = Mempolicy::parse(text).unwrap();
    policy.contextualize(&mems_allowed().unwrap()).unwrap();
    policy
}

/// Writes to each page, and asks the kernel which node holds it.
fn lie_on(pages: &[NonNull<u8>]) -> Vec<NodeId> {
    for page in pages {
        // SAFETY: the callers pass objects that they have allocated and not freed, of at least one
        // byte.
        unsafe { page.write_volatile(1) };
    }
    let addresses: Vec<_> = pages
        .iter()
        .map(|page| page.as_ptr().cast_const())
        .collect();
    let mut nodes = vec![PageNode::UNKNOWN; pages.len()];
    nodes_of_pages(&addresses, &mut nodes).unwrap();
    let node = |node: PageNode| node.node().unwrap_or_else(|| panic!("{:?}", node.error()));
    nodes.into_iter().map(node).collect()
}

fn list(nodes: &[NodeId]) -> String {
    let set: NodeSet = nodes.iter().map(|node| node.0).collect();
    set.to_string()
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn every_page_lies_on_its_policys_node() {
    let all = several();
    if all.is_empty() {
        return;
    }
    let (first, last) = (all[0].0, all[all.len() - 1].0);
    let distances = Distances::read(&Topology::system().unwrap());
    let pages = Pages::new("lie").unwrap();
    for (here, cpu) in nodes() {
        let Some(cpu) = cpu else {
            continue;
        };
        pin(cpu);
        for text in [
            "local".to_string(),
            format!("prefer:{last}"),
            format!("bind:{first}"),
            format!("bind:{}", list(&all[1..])),
            format!("prefer (many):{}", list(&all[..2])),
            format!("interleave:{}", list(&all)),
            format!("interleave:{first},{last}"),
            "interleave".to_string(),
            format!("weighted interleave:{}", list(&all)),
        ] {
            let policy = policy(&text);
            pages.set_policy(0..64, Some(&policy)).unwrap();
            let taken: Vec<_> = (0..64).map(|place| pages.alloc(place).unwrap()).collect();
            let lie = lie_on(&taken);
            for (place, (page, node)) in taken.iter().zip(&lie).enumerate() {
                let expected =
                    node_for(&policy, place as u64, here, &Weights::default(), &distances);
                assert_eq!(*node, expected, "{text} from node {}, page {place}", here.0);
                assert_eq!(pages.node_of(*page), Some(*node));
                // SAFETY: the page came from `pages` and is not used afterwards.
                unsafe { pages.free(*page) };
            }
        }
    }
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn objects_lie_on_their_caches_nodes() {
    let all = several();
    if all.is_empty() {
        return;
    }
    for size in [64, 4096] {
        for (text, expected) in [
            (format!("bind:{}", all[1].0), all[1..2].to_vec()),
            (format!("prefer:{}", all[0].0), all[..1].to_vec()),
            ("interleave".to_string(), all.clone()),
        ] {
            let layout = Layout::from_size_align(size, 64).unwrap();
            let builder = KmemCache::builder("lie", layout).policy(&policy(&text));
            let cache = builder.build().unwrap();
            let objects: Vec<_> = (0..2000).map(|_| cache.alloc().unwrap()).collect();
            assert_eq!(list(&lie_on(&objects)), list(&expected), "{text}");
            for object in objects {
                // SAFETY: each object came from `cache` and is not used afterwards.
                unsafe { cache.free(object) };
            }
            cache.destroy().unwrap();
        }
    }
}

/// A mapping that fills `node` until it is dropped.
struct Hog(*mut u8, usize);

impl Hog {
    fn fill(node: NodeId) -> Hog {
        // At its low watermark the kernel takes the rest from other nodes.
        let size = free_memory(node) & !0xfff;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: without an address, `mmap` replaces no other mapping.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        let at = at.cast::<u8>();
        let only = policy(&format!("prefer:{}", node.0));
        apply(at, size, &only, Move::No, false).unwrap();
        for page in (0..size).step_by(4096) {
            // SAFETY: `page` is below `size`, so the byte is in the mapping, which is writable.
            unsafe { at.add(page).write_volatile(1) };
        }
        std::thread::sleep(Duration::from_millis(150));
        Hog(at, size)
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        // SAFETY: `fill` mapped exactly these bytes, and no reference to them exists.
        unsafe { libc::munmap(self.0.cast(), self.1) };
        std::thread::sleep(Duration::from_millis(150));
    }
}

fn free_memory(node: NodeId) -> usize {
    let file = format!("/sys/devices/system/node/node{}/meminfo", node.0);
    let text = std::fs::read_to_string(file).unwrap();
    let line = text.lines().find(|line| line.contains("MemFree:")).unwrap();
    line.split_whitespace()
        .nth(3)
        .unwrap()
        .parse::<usize>()
        .unwrap()
        * 1024
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn a_full_node_passes_requests_to_the_nearest() {
    if several().is_empty() {
        return;
    }
    let all = nodes();
    let (full, _) = *all.last().unwrap();
    let number = all.len() - 1;
    pin(all[0].1.unwrap());
    let distances = Distances::read(&Topology::system().unwrap());
    let next = distances.nearest_first(full).nth(1).unwrap();
    let next_number = all.iter().position(|(node, _)| *node == next).unwrap();

    let pages = Pages::new("full").unwrap();
    pages.set_counting(true);
    pages
        .set_policy(0..100, Some(&policy(&format!("prefer:{}", full.0))))
        .unwrap();
    pages
        .set_policy(100..200, Some(&policy(&format!("bind:{}", full.0))))
        .unwrap();
    let count = |number: usize, item| pages.numa_stat().sum_zone(Zone::normal(number), item);

    let hog = Hog::fill(full);
    pinfold::internal::arena::refresh_room();
    let before = NUMA_STAT.read_node(number, NumaItem::Foreign);
    let taken: Vec<_> = (0..50).map(|place| pages.alloc(place).unwrap()).collect();
    let elsewhere = lie_on(&taken);
    assert_eq!(
        list(&elsewhere),
        next.0.to_string(),
        "the nearest of node {}",
        full.0
    );
    assert_eq!(count(number, NumaItem::Foreign), 50);
    assert_eq!(count(next_number, NumaItem::Miss), 50);
    assert_eq!(count(number, NumaItem::Hit), 0);
    assert!(NUMA_STAT.read_node(number, NumaItem::Foreign) > before);
    assert_eq!(pages.alloc(150), None, "bound to a full node");
    drop(hog);

    // The node has room again.
    pinfold::internal::arena::refresh_room();
    let back = pages.alloc(50).unwrap();
    assert_eq!(lie_on(&[back]), [full]);
    assert_eq!(count(number, NumaItem::Hit), 1);
    for page in taken.into_iter().chain([back]) {
        // SAFETY: each page came from `pages` and is not used afterwards.
        unsafe { pages.free(page) };
    }
}

/// Starts this binary again, for one test, with a policy in its environment.
fn again(test: &str, policy: &str) {
    passes(test, |command| {
        command.env("PINFOLD_POLICY", policy);
    });
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn a_process_policy_places_memory_without_a_policy() {
    let all = several();
    if all.is_empty() {
        return;
    }
    again(
        "placed_by_the_process",
        &format!("interleave:{}", list(&all)),
    );
    again("placed_by_the_process", &format!("bind:{}", all[1].0));
    again(
        "placed_by_the_process",
        &format!("prefer:{}", all[all.len() - 1].0),
    );
}

#[test]
#[ignore = "run by a_process_policy_places_memory_without_a_policy"]
fn placed_by_the_process() {
    let Ok(text) = std::env::var("PINFOLD_POLICY") else {
        return;
    };
    // Turns huge pages off: under `interleave` the nodes take turns by whole huge pages of 2 MiB.
    // SAFETY: the call takes plain numbers, and affects only the calling process.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    let wanted = policy(&text).nodes().clone();
    let layout = Layout::from_size_align(4096, 4096).unwrap();
    let cache = KmemCache::new("process", layout).unwrap();
    let objects: Vec<_> = (0..4000).map(|_| cache.alloc().unwrap()).collect();
    let lie = lie_on(&objects);
    for node in wanted.iter().map(NodeId) {
        let here = lie.iter().filter(|&&lies| lies == node).count();
        let share = lie.len() / wanted.len();
        assert!(
            here.abs_diff(share) <= share / 20,
            "{text}: {here} of {} on {}",
            lie.len(),
            node.0
        );
    }
    for object in objects {
        // SAFETY: each object came from `cache` and is not used afterwards.
        unsafe { cache.free(object) };
    }
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn the_shepherd_drains_idle_page_lists() {
    let all = several();
    if all.is_empty() {
        return;
    }
    let pages = Pages::new("idle").unwrap();
    pages
        .set_policy(0..1000, Some(&policy(&format!("bind:{}", all[1].0))))
        .unwrap();
    let taken: Vec<_> = (0..400).map(|place| pages.alloc(place).unwrap()).collect();
    for page in taken {
        // SAFETY: the page came from `pages` and is not used afterwards.
        unsafe { pages.free(page) };
    }
    let on_lists = || pages.lists().map(|list| list.count).sum::<usize>();
    assert!(on_lists() > 0);
    let shepherd = pinfold::shepherd::Shepherd::new().interval(Duration::from_millis(20));
    let running = shepherd.start().unwrap();
    let began = Instant::now();
    while on_lists() > 0 {
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "{} stay",
            on_lists()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    running.stop();
}

/// A policy that a thread sets after the process has started places the thread's later pages.
#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn a_pool_follows_the_policy_that_a_thread_sets() {
    let all = nodes();
    if several().is_empty() {
        return;
    }
    let pool = Pages::new("threads").unwrap();
    let lies_on = |node: NodeId, what: &str| {
        let pages: Vec<_> = (0..20).map(|place| pool.alloc(place).unwrap()).collect();
        let found = lie_on(&pages);
        assert!(
            found.iter().all(|&found| found == node),
            "{what}: {found:?}"
        );
        for page in pages {
            // SAFETY: the page came from `pool` and is not used afterwards.
            unsafe { pool.free(page) };
        }
    };
    for &(node, _) in &all {
        // The thread runs on another node than the one that its policy names.
        let other = all.iter().find(|(id, cpu)| *id != node && cpu.is_some());
        let (home, cpu) = other.map(|(id, cpu)| (*id, cpu.unwrap())).unwrap();
        std::thread::scope(|scope| {
            let follow = || {
                pin(cpu);
                lies_on(home, "without a policy");
                set_for_thread(&policy(&format!("bind:{}", node.0))).unwrap();
                lies_on(node, "bound");
                std::thread::scope(|inner| {
                    let inherits = || {
                        pin(cpu);
                        lies_on(node, "inherited");
                        set_for_thread(&policy("default")).unwrap();
                        lies_on(home, "removed");
                    };
                    inner.spawn(inherits).join().unwrap();
                });
                lies_on(node, "bound, after another thread's change");
                // SAFETY: without nodes, the kernel reads no memory.
                unsafe { libc::syscall(libc::SYS_set_mempolicy, 0, 0, 0) };
                pool.set_following_threads(true);
                lies_on(home, "the kernel is asked");
                pool.set_following_threads(false);
                lies_on(node, "a system call that Pinfold does not see");
                thread_changed();
                lies_on(home, "told");
            };
            scope.spawn(follow).join().unwrap();
        });
    }
}
