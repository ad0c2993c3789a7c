//! Zones and units on real nodes: counters and the allocator number the nodes alike, and each CPU's
//! unit lies on that CPU's node. Each test starts this binary again, for one ignored test.

mod common;
mod policy_machine;

use common::again::passes;
use common::machine::{Node, move_to, nodes, where_lie};
use pinfold::counter::EventCounter;
use pinfold::slab::KmemCache;
use pinfold::topology::{NodeId, NodeSet};
use pinfold::vmstat::{VmStat, Zone};
use std::alloc::Layout;
use std::collections::BTreeMap;

pinfold::vmstat_items! {
    enum Item {
        Count = "count",
    }
}

/// Starts this binary again, for one test, with a variable in its environment.
fn again(test: &str, (name, value): (&str, &str)) {
    passes(test, |command| {
        command.env(name, value);
    });
}

/// Returns the ids of the nodes with memory.
fn with_memory() -> Vec<usize> {
    let nodes = nodes();
    let with_memory = nodes.iter().filter(|node| node.mebibytes > 0);
    with_memory.map(|node| node.id).collect()
}

fn set(ids: &[usize]) -> NodeSet {
    ids.iter().copied().collect()
}

const ALLOWED: &str = "PINFOLD_TEST_ALLOWED";

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn zones_are_of_the_nodes_that_a_cpuset_allows() {
    let ids = with_memory();
    if ids.len() < 3 {
        return;
    }
    let last_two = &ids[ids.len() - 2..];
    again("zones_in_a_cpuset", (ALLOWED, &set(last_two).to_string()));
    let all_but_one = [&ids[..1], &ids[2..]].concat();
    again(
        "zones_in_a_cpuset",
        (ALLOWED, &set(&all_but_one).to_string()),
    );
}

#[test]
#[ignore = "run by zones_are_of_the_nodes_that_a_cpuset_allows"]
fn zones_in_a_cpuset() {
    let Ok(list) = std::env::var(ALLOWED) else {
        return;
    };
    let allowed: NodeSet = list.parse().unwrap();
    let group = policy_machine::Group::new("zones");
    group.allow(&allowed);
    group.enter();
    let stat: VmStat<Item> = VmStat::new();
    assert!(stat.init());
    assert_eq!(stat.zones(), 2 * allowed.len());
    let cache = KmemCache::new("zoned", Layout::new::<[u64; 64]>()).unwrap();
    for (number, id) in allowed.iter().enumerate() {
        let zone = Zone::normal(number);
        assert_eq!(Zone::normal_of(NodeId(id)), Some(zone), "node {id}");
        stat.add(zone, Item::Count, 10);
        assert_eq!(stat.sum_zone(zone, Item::Count), 10);
        let object = cache.alloc_node_exact(number).unwrap();
        // SAFETY: `alloc_node_exact` returned the object to this thread, and it is 512 bytes large.
        unsafe { object.write_bytes(1, 512) };
        assert_eq!(where_lie(&[object.as_ptr() as usize]), [id as i32]);
        // SAFETY: the object came from `cache` and is not used afterwards.
        unsafe { cache.free(object) };
    }
    for id in with_memory()
        .into_iter()
        .filter(|&id| !allowed.contains(id))
    {
        assert_eq!(Zone::normal_of(NodeId(id)), None, "node {id}");
    }
    assert!(!stat.has(Zone::normal(allowed.len())));
    assert_eq!(cache.alloc_node_exact(allowed.len()), None);
}

#[test]
#[ignore = "needs the test machine: cargo xtask vm"]
fn units_lie_on_their_cpus_nodes_whatever_the_policy() {
    let ids = with_memory();
    if ids.len() < 2 {
        return;
    }
    let first = set(&ids[..1]);
    for policy in [format!("interleave:{}", set(&ids)), format!("bind:{first}")] {
        again("units_under_a_policy", ("PINFOLD_POLICY", &policy));
    }
}

/// For the ranges with a `prefer` policy, returns how many of their pages lie on which node: by the
/// preferred node and the node that holds the pages.
fn preferred() -> BTreeMap<(usize, usize), usize> {
    let mut found = BTreeMap::new();
    for line in std::fs::read_to_string("/proc/self/numa_maps")
        .unwrap()
        .lines()
    {
        let mut words = line.split(' ').skip(1);
        let policy = words.next().unwrap_or("");
        let Some(Ok(wanted)) = policy.strip_prefix("prefer:").map(str::parse) else {
            continue;
        };
        for (node, pages) in words.filter_map(|word| word.strip_prefix('N')?.split_once('=')) {
            let place = (wanted, node.parse().unwrap());
            *found.entry(place).or_insert(0) += pages.parse::<usize>().unwrap();
        }
    }
    found
}

#[test]
#[ignore = "run by units_lie_on_their_cpus_nodes_whatever_the_policy"]
fn units_under_a_policy() {
    if std::env::var_os("PINFOLD_POLICY").is_none() {
        return;
    }
    let nodes = nodes();
    let counter = EventCounter::new();
    let cache = KmemCache::new("near", Layout::new::<[u64; 8]>()).unwrap();
    // The kernel places the allocator's memory by the process's policy, without a range policy. So
    // only units prefer a node.
    assert_eq!(preferred(), BTreeMap::new());
    for cpu in nodes.iter().flat_map(|node| &node.cpus) {
        move_to(0, &[*cpu]);
        counter.inc();
        let object = cache.alloc().unwrap();
        // SAFETY: the object came from `cache` and is not used afterwards.
        unsafe { cache.free(object) };
    }
    let found = preferred();
    let has_both = |node: &&Node| node.mebibytes > 0 && !node.cpus.is_empty();
    for node in nodes.iter().filter(has_both) {
        let pages = found.get(&(node.id, node.id)).copied().unwrap_or(0);
        // Each CPU has a page in the counters' unit, and one in the caches'.
        let least = 2 * node.cpus.len();
        assert!(pages >= least, "node {}: {pages} in {found:?}", node.id);
    }
    let away: Vec<_> = found.keys().filter(|(wanted, at)| wanted != at).collect();
    assert!(away.is_empty(), "{found:?}");
}
