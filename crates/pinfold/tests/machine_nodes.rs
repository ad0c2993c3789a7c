//! The library on real nodes: it finds the nodes, and memory lies where it says.

mod common;

use common::machine::{Node, move_to, nearest_with_memory, nodes, where_lie};
use pinfold::internal::arena::node_of;
use pinfold::slab::KmemCache;
use pinfold::topology::{NodeId, Topology};
use std::alloc::Layout;
use std::ptr::NonNull;

const SIZES: [usize; 4] = [64, 1000, 4096, 20_000];

fn cache(size: usize) -> KmemCache {
    KmemCache::new("placed", Layout::from_size_align(size, 8).unwrap()).unwrap()
}

/// Returns the system's ids of the nodes with memory. A node's place in the list is its number in
/// the library.
fn with_memory(nodes: &[Node]) -> Vec<usize> {
    let with_memory = nodes.iter().filter(|node| node.mebibytes > 0);
    with_memory.map(|node| node.id).collect()
}

/// Writes to all objects, so that all their pages exist.
fn touch(objects: &[NonNull<u8>], size: usize) {
    for object in objects {
        // SAFETY: the callers pass objects of a cache of this size, which they have allocated and
        // not freed.
        unsafe { object.write_bytes(1, size) };
    }
}

/// Returns how many objects begin on another node than the wanted one, which is given as the
/// library's number and the system's id.
fn elsewhere(objects: &[NonNull<u8>], (number, id): (usize, usize)) -> usize {
    let addresses: Vec<_> = objects
        .iter()
        .map(|object| object.as_ptr() as usize)
        .collect();
    let lie = where_lie(&addresses);
    let places = addresses.iter().zip(lie.iter().copied());
    if let Some((address, node)) = places.clone().find(|(_, node)| *node != id as i32) {
        println!(
            "{address:#x} of node {}, by arithmetic, lies on {node}, not {id}",
            node_of(*address)
        );
    }
    let wrong = |&(address, node): &(&usize, i32)| node != id as i32 || node_of(*address) != number;
    places.filter(wrong).count()
}

fn free(cache: &KmemCache, objects: Vec<NonNull<u8>>) {
    for object in objects {
        // SAFETY: each object came from `cache` and is not used afterwards.
        unsafe { cache.free(object) };
    }
}

fn take(cache: &KmemCache, count: usize) -> Vec<NonNull<u8>> {
    (0..count).map(|_| cache.alloc().unwrap()).collect()
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn the_topology_is_read_correctly() {
    let nodes = nodes();
    let topology = Topology::system().unwrap();
    let ids: Vec<_> = nodes.iter().map(|node| node.id).collect();
    assert_eq!(topology.nodes.iter().collect::<Vec<_>>(), ids);
    assert_eq!(
        topology.with_memory.iter().collect::<Vec<_>>(),
        with_memory(&nodes)
    );
    for node in &nodes {
        let cpus = topology.cpus_of(NodeId(node.id)).unwrap();
        assert_eq!(cpus.iter().collect::<Vec<_>>(), node.cpus);
        let distances = ids
            .iter()
            .map(|&to| topology.distance(NodeId(node.id), NodeId(to)));
        assert_eq!(distances.collect::<Vec<_>>(), node.distances);
        // The kernel keeps some memory for itself, most of it from the first node.
        let mebibytes = topology.memory_of(NodeId(node.id)) >> 20;
        let least = node.mebibytes * 6 / 10;
        assert!(
            (least..=node.mebibytes).contains(&mebibytes),
            "{node:?}: {mebibytes}"
        );
    }
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn objects_lie_near_the_cpu_that_allocates_them() {
    let nodes = nodes();
    let numbers = with_memory(&nodes);
    for size in SIZES {
        let cache = cache(size);
        for node in nodes.iter().filter(|node| !node.cpus.is_empty()) {
            let near = nearest_with_memory(&nodes, node);
            let number = numbers.iter().position(|&id| id == near).unwrap();
            for &cpu in &node.cpus {
                move_to(0, &[cpu]);
                let objects = take(&cache, 10_000_000 / size.max(1000));
                touch(&objects, size);
                assert_eq!(elsewhere(&objects, (number, near)), 0, "{size}, CPU {cpu}");
                free(&cache, objects);
            }
        }
        cache.validate().unwrap();
        cache.destroy().unwrap();
    }
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn objects_lie_on_the_node_asked_for() {
    let nodes = nodes();
    move_to(0, &[0]);
    for size in SIZES {
        let cache = cache(size);
        for place in with_memory(&nodes).into_iter().enumerate() {
            let exact = (0..1000).map(|_| cache.alloc_node_exact(place.0).unwrap());
            let others = (0..1000).map(|_| cache.alloc_node(place.0).unwrap());
            let objects: Vec<_> = exact.chain(others).collect();
            touch(&objects, size);
            assert_eq!(elsewhere(&objects, place), 0, "{size}, node {place:?}");
            free(&cache, objects);
        }
        assert_eq!(cache.statistics().alloc_node_mismatch, 0);
        cache.destroy().unwrap();
    }
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn objects_freed_elsewhere_go_home() {
    const COUNT: usize = 20_000;
    let nodes = nodes();
    let numbers = with_memory(&nodes);
    let with_cpus: Vec<_> = nodes.iter().filter(|node| !node.cpus.is_empty()).collect();
    for (&from, &to) in with_cpus.iter().zip(with_cpus.iter().cycle().skip(1)) {
        let (home, away) = (
            nearest_with_memory(&nodes, from),
            nearest_with_memory(&nodes, to),
        );
        if home == away {
            continue;
        }
        let place = |id| (numbers.iter().position(|&other| other == id).unwrap(), id);
        let cache = cache(64);
        move_to(0, &[from.cpus[0]]);
        let objects = take(&cache, COUNT);
        touch(&objects, 64);
        assert_eq!(elsewhere(&objects, place(home)), 0);
        move_to(0, &[to.cpus[0]]);
        free(&cache, objects);
        let statistics = cache.statistics();
        let most = 2 * statistics.sheaf_capacity;
        assert!(
            statistics.free_remote as usize >= COUNT - most,
            "{statistics:?}"
        );
        // Allocations there get near memory, except for the objects that the CPU's sheaves still
        // hold.
        let objects = take(&cache, COUNT);
        touch(&objects, 64);
        assert!(elsewhere(&objects, place(away)) <= most);
        // Allocations at home get the objects that went home.
        move_to(0, &[from.cpus[0]]);
        let others = take(&cache, COUNT - most);
        touch(&others, 64);
        assert_eq!(elsewhere(&others, place(home)), 0);
        let slabs = cache.statistics().slabs;
        assert!(slabs <= 2 * (COUNT * 64).div_ceil(64 << 10) + 4, "{slabs}");
        free(&cache, objects);
        free(&cache, others);
        cache.validate().unwrap();
        cache.destroy().unwrap();
    }
}

/// When a node is full, the kernel silently uses another one. The cache does not notice, and goes
/// on.
#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn when_a_node_is_full_others_give_memory() {
    let nodes = nodes();
    let numbers = with_memory(&nodes);
    if numbers.len() < 2 {
        return;
    }
    let (number, &last) = numbers.iter().enumerate().next_back().unwrap();
    let text = std::fs::read_to_string(format!("/sys/devices/system/node/node{last}/meminfo"));
    let text = text.unwrap();
    let line = text.lines().find(|line| line.contains("MemFree:")).unwrap();
    let kib: usize = line.split_whitespace().nth(3).unwrap().parse().unwrap();
    let cache = cache(1 << 16);
    // A tenth more than the node has left. The other nodes have room for that.
    let objects: Vec<_> = (0..kib / 64 * 11 / 10)
        .map(|_| cache.alloc_node(number).unwrap())
        .collect();
    touch(&objects, 1 << 16);
    let away = elsewhere(&objects, (number, last));
    assert!(
        away > 0 && away < objects.len() / 2,
        "{away} of {}",
        objects.len()
    );
    free(&cache, objects);
    cache.validate().unwrap();
    cache.destroy().unwrap();
    // The arena does not notice pages that the kernel placed elsewhere, and they stay there until
    // they go back to the system. Then the node has room again.
    pinfold::internal::arena::trim();
    let cache = self::cache(64);
    let objects: Vec<_> = (0..10_000)
        .map(|_| cache.alloc_node_exact(number).unwrap())
        .collect();
    touch(&objects, 64);
    assert_eq!(elsewhere(&objects, (number, last)), 0);
    free(&cache, objects);
    cache.destroy().unwrap();
}
