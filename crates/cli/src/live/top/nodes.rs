//! The memory nodes of a process.

use crate::live::per_second;
use crate::live::snapshot::{Cache, Snapshot};
use pinfold::internal::segment::{EVENTS, SlabEvent};
use serde::Serialize;

/// One node. Rates are of a second.
#[derive(Clone, Copy, Debug, Default)]
pub struct Node {
    /// Bytes in slabs and large blocks.
    pub used: u64,
    pub dirty: u64,
    /// Bytes of slabs.
    pub slabs: u64,
    /// Bytes of free objects in the barns.
    pub in_barns: u64,
    /// Objects moved from slabs to sheaves.
    pub refills: f64,
    /// Objects of this node that were freed on another one.
    pub remote: f64,
    /// Objects taken from another node than wanted.
    pub mismatches: f64,
    /// The counts behind the rates.
    counts: [u64; 3],
}

const RATES: [SlabEvent; 3] = [
    SlabEvent::Refilled,
    SlabEvent::FreeRemote,
    SlabEvent::AllocNodeMismatch,
];

/// Reads the nodes. `before` is the reading `seconds` ago.
pub fn read(snapshot: &Snapshot, seconds: Option<f64>, before: &[Node]) -> Vec<Node> {
    let nodes = snapshot.nodes.iter().enumerate();
    nodes
        .map(|(nth, memory)| {
            let of_caches = |of: &dyn Fn(&Cache, &[u64; EVENTS]) -> u64| {
                snapshot.of_caches(|cache| of(cache, &cache.nodes[nth]))
            };
            let counts = RATES.map(|event| {
                let counts = snapshot.caches.iter();
                let counts = counts.map(|cache| cache.nodes[nth][event as usize]);
                counts.fold(0, u64::wrapping_add)
            });
            let earlier = before.get(nth).map_or(counts, |before| before.counts);
            let rate = |which: usize| per_second(seconds, earlier[which], counts[which]);
            Node {
                used: memory.used,
                dirty: memory.dirty,
                slabs: of_caches(&|cache, counts| {
                    Cache::slabs_in(counts).saturating_mul(cache.slab)
                }),
                in_barns: of_caches(&|cache, counts| {
                    Cache::barns_in(counts).saturating_mul(cache.size)
                }),
                refills: rate(0),
                remote: rate(1),
                mismatches: rate(2),
                counts,
            }
        })
        .collect()
}

/// What was counted of one node so far.
#[derive(Serialize)]
pub struct Counts {
    node: usize,
    used_bytes: u64,
    dirty_bytes: u64,
    /// Bytes of slabs.
    slabs_bytes: u64,
    in_barns_bytes: u64,
    refills: u64,
    remote_frees: u64,
    node_mismatches: u64,
}

/// Reads what was counted so far.
pub fn counts(snapshot: &Snapshot) -> Vec<Counts> {
    let nodes = read(snapshot, None, &[]).into_iter().enumerate();
    let counts = nodes.map(|(nth, node)| Counts {
        node: nth,
        used_bytes: node.used,
        dirty_bytes: node.dirty,
        slabs_bytes: node.slabs,
        in_barns_bytes: node.in_barns,
        refills: node.counts[0],
        remote_frees: node.counts[1],
        node_mismatches: node.counts[2],
    });
    counts.collect()
}
