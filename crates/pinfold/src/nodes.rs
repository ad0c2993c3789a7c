//! How many nodes the allocator tells apart, and which of them is the current one.
//!
//! Nodes are numbered densely here, from 0, in the order of the system's ids; a machine without NUMA has one.
//!
//! # Nodes that are not there
//!
//! For tests on machines with one node, [`FAKE_VARIABLE`] in the environment of a starting process gives the number of nodes, as the
//! kernel's `numa=fake=`: CPU c is on node c modulo that number, and all their memory is asked of the system's node 0. What
//! the allocator keeps apart by node, and what it sends home, is then what it would be on a machine with so many; only
//! distances are not.

use crate::topology::{CpuSet, NodeId, Topology};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize};
use pinfold_rseq::MAX_INDEX;

/// Nodes that the allocator tells apart; memory of further ones is taken as the first's.
pub(crate) const MAX_NODES: usize = 64;

/// The environment variable that makes nodes up.
const FAKE_VARIABLE: &str = "PINFOLD_FAKE_NODES";

static COUNT: AtomicUsize = AtomicUsize::new(1);
/// The system's id of each node.
static IDS: [AtomicUsize; MAX_NODES] = [const { AtomicUsize::new(0) }; MAX_NODES];
/// The node of each CPU.
static OF_CPU: [AtomicU8; MAX_INDEX] = [const { AtomicU8::new(0) }; MAX_INDEX];

/// Reads the machine's nodes, once, before anything is made that there is one of for each. A machine that cannot be read has
/// one.
pub(crate) fn init() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.load(Acquire) {
        // Two threads at once find the same.
        read();
        DONE.store(true, Release);
    }
}

fn read() {
    if let Some(nodes) = fake() {
        for (cpu, node) in OF_CPU.iter().enumerate() {
            node.store((cpu % nodes) as u8, Relaxed);
        }
        // Release pairs with the acquire in `count`.
        COUNT.store(nodes, Release);
        return;
    }
    // Most machines have one node, and every process starts here: one file answers for them.
    if !Topology::may_have_nodes(b"/") {
        return;
    }
    let Ok(topology) = Topology::system() else {
        return;
    };
    let nodes = topology.with_memory.len();
    if !(2..=MAX_NODES).contains(&nodes) {
        return;
    }
    for (node, id) in topology.with_memory.iter().enumerate() {
        IDS[node].store(id, Relaxed);
    }
    for from in topology.nodes.iter().map(NodeId) {
        // CPUs of a node without memory use the nearest that has some.
        let distance = |(_, to): &(usize, usize)| topology.distance(b"/", from, NodeId(*to));
        // The others are their own nearest, which saves reading a file for each pair of nodes.
        let all = || topology.with_memory.iter().enumerate();
        let own = all().find(|&(_, id)| id == from.0);
        let nearest = own.or_else(|| all().min_by_key(distance));
        let node = nearest.map_or(0, |(node, _)| node) as u8;
        for cpu in topology.cpus_of(b"/", from).iter().flat_map(CpuSet::iter) {
            OF_CPU[cpu].store(node, Relaxed);
        }
    }
    // Release pairs with the acquire in `count`.
    COUNT.store(nodes, Release);
}

/// How many nodes to make up, if any.
fn fake() -> Option<usize> {
    let mut buffer = [0; 4];
    let text = pinfold_rseq::env::read(FAKE_VARIABLE, &mut buffer)?;
    let nodes = core::str::from_utf8(text).ok()?.parse().ok()?;
    (1..=MAX_NODES).contains(&nodes).then_some(nodes)
}

/// How many nodes there are, at least 1.
pub(crate) fn count() -> usize {
    // Acquire pairs with the release in `init`.
    COUNT.load(Acquire)
}

/// The system's id of node `node`.
pub(crate) fn id(node: usize) -> usize {
    IDS[node].load(Relaxed)
}

/// The node of the CPU the thread runs on; it may run elsewhere by the time this returns. One test where there is one
/// node.
#[inline]
pub(crate) fn current() -> usize {
    if count() == 1 {
        return 0;
    }
    // SAFETY: no preconditions.
    let cpu = unsafe { libc::sched_getcpu() };
    let node = OF_CPU
        .get(cpu as usize)
        .map_or(0, |node| node.load(Relaxed));
    usize::from(node).min(count() - 1)
}
