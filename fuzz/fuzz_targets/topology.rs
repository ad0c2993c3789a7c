//! The kernel's files: lists of CPUs and nodes, cpusets, memory figures, distances and weights.
//!
//! The input's parts, between bytes 0xff, become the files of a made-up `/sys` and `/proc`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pinfold::mempolicy::{Distances, Weights};
use pinfold::internal::topology_below;
use pinfold::topology::{CpuSet, NodeId, NodeSet};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::LazyLock;

const FILES: [&str; 16] = [
    "sys/devices/system/cpu/online",
    "sys/devices/system/cpu/possible",
    "sys/devices/system/cpu/nohz_full",
    "sys/devices/system/cpu/isolated",
    "sys/devices/system/node/online",
    "sys/devices/system/node/has_memory",
    "proc/self/cgroup",
    "sys/fs/cgroup/a/cpuset.cpus.effective",
    "sys/fs/cgroup/cpuset.cpus.effective",
    "sys/fs/cgroup/cpuset/a/cpuset.effective_cpus",
    "sys/devices/system/node/node0/cpulist",
    "sys/devices/system/node/node0/meminfo",
    "sys/devices/system/node/node1/meminfo",
    "sys/devices/system/node/node0/distance",
    "sys/devices/system/node/node1/distance",
    "sys/kernel/mm/mempolicy/weighted_interleave/node0",
];

static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
    let root = PathBuf::from(format!("/dev/shm/pinfold-fuzz-{}", std::process::id()));
    for file in FILES {
        fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
    }
    extern "C" fn remove() {
        let _ = fs::remove_dir_all(&*ROOT);
    }
    // SAFETY: the handler is a function without arguments.
    unsafe { libc::atexit(remove) };
    root
});

fuzz_target!(|data: &[u8]| {
    let mut parts = data.split(|&byte| byte == 0xff);
    for file in FILES {
        let path = ROOT.join(file);
        match parts.next() {
            Some(text) => {
                read_back(text);
                fs::write(path, text).unwrap();
            }
            None => _ = fs::remove_file(path),
        }
    }
    let root = ROOT.as_os_str().as_bytes();
    let topology = match topology_below(root) {
        Ok(topology) => topology,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert!(!topology.possible.is_empty() && !topology.online.is_empty());
    assert!(!topology.nodes.is_empty() && !topology.with_memory.is_empty());
    assert!(topology.allowed.without(&topology.online).is_empty());
    let housekeeping = topology.housekeeping();
    assert!(housekeeping.without(&topology.allowed).is_empty());
    for node in [0, 1, 1023].map(NodeId) {
        let _ = topology.cpus_of(node);
        let _ = topology.memory_of(node);
        for to in [0, 1, 1023].map(NodeId) {
            let _ = topology.distance(node, to);
        }
    }
    // A file for each node: more of them would only cost time.
    if topology.nodes.len() <= 4 {
        let weights = Weights::read(&topology);
        let distances = Distances::read(&topology);
        for node in topology.nodes.iter().map(NodeId) {
            assert!(weights.weight(node) > 0);
            let order: NodeSet = distances.nearest_first(node).map(|node| node.0).collect();
            assert!(
                order
                    .without(&topology.nodes.or(&topology.with_memory))
                    .is_empty()
            );
        }
    }
});

/// What is printed of a list is read back as the same list.
fn read_back(list: &[u8]) {
    let list = String::from_utf8_lossy(list);
    if let Ok(cpus) = list.parse::<CpuSet>() {
        assert_eq!(cpus.to_string().parse::<CpuSet>(), Ok(cpus));
    }
    if let Ok(nodes) = list.parse::<NodeSet>() {
        assert_eq!(nodes.to_string().parse::<NodeSet>(), Ok(nodes));
    }
}
