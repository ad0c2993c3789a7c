//! The numbers of the page for people, in JSON.

use super::{Snapshot, Source};
use crate::live::snapshot::Shepherd;
use crate::live::top::{Sum, nodes, threads_by_cpu};
use serde::Serialize;

#[derive(Serialize)]
struct Status {
    processes: Vec<Process>,
}

#[derive(Serialize)]
struct Process {
    pid: u32,
    name: String,
    backend: &'static str,
    sum: Sum,
    slow_calls: u64,
    caches: Vec<Cache>,
    /// How many threads ran on each CPU last.
    cpus: Vec<(String, u64)>,
    nodes: Vec<nodes::Node>,
    shepherd: Shepherd,
}

#[derive(Serialize)]
struct Cache {
    name: String,
    objects: u64,
    active: u64,
    size: u64,
    slabs: u64,
    bytes: u64,
    refilled: u64,
}

/// Returns the numbers of all processes.
pub fn text(processes: &[(&Source, Snapshot)]) -> String {
    let processes = processes.iter().map(|(source, snapshot)| Process {
        pid: source.pid,
        name: source.name(),
        backend: crate::live::backend_name(snapshot.backend),
        sum: Sum::of(snapshot),
        slow_calls: snapshot
            .caches
            .iter()
            .fold(0, |sum, cache| cache.slow().wrapping_add(sum)),
        cpus: threads_by_cpu(source.pid, snapshot),
        nodes: nodes::read(snapshot, None, &[]),
        shepherd: snapshot.shepherd,
        caches: snapshot
            .caches
            .iter()
            .filter(|cache| cache.refilled() > 0)
            .map(|cache| Cache {
                name: cache.name.clone(),
                objects: cache.total(),
                active: cache.out(),
                size: cache.size,
                slabs: cache.slabs(),
                bytes: cache.slabs().saturating_mul(cache.slab),
                refilled: cache.refilled(),
            })
            .collect(),
    });
    let status = Status {
        processes: processes.collect(),
    };
    // The numbers and names have a form in JSON.
    serde_json::to_string(&status).unwrap_or_default()
}
