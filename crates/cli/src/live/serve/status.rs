//! The numbers of the page for people, in JSON.

use super::look::{Look, Reading};
use crate::live::snapshot::{self, Shepherd};
use crate::live::top::{Sum, nodes};
use crate::output;
use serde::Serialize;

#[derive(Serialize)]
struct Status<'l> {
    processes: Vec<Process<'l>>,
    /// How many processes could not be read.
    unread: usize,
}

#[derive(Serialize)]
struct Process<'l> {
    pid: u32,
    name: &'l str,
    backend: &'static str,
    sum: Sum,
    slow_calls: u64,
    caches: Vec<Cache>,
    /// How many threads ran on each CPU last.
    cpus: &'l [(String, u64)],
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

impl<'l> Process<'l> {
    fn of(reading: &'l Reading) -> Process<'l> {
        let snapshot = &reading.snapshot;
        Process {
            pid: reading.pid,
            name: &reading.name,
            backend: crate::live::backend_name(snapshot.backend),
            sum: Sum::of(snapshot),
            slow_calls: snapshot.of_caches(snapshot::Cache::slow),
            cpus: &reading.cpus,
            nodes: nodes::read(snapshot, None, &[]),
            shepherd: snapshot.shepherd,
            caches: snapshot
                .caches
                .iter()
                .filter(|cache| cache.refilled() > 0)
                .map(|cache| Cache {
                    name: output::escaped(&cache.name).into_owned(),
                    objects: cache.total(),
                    active: cache.out(),
                    size: cache.size,
                    slabs: cache.slabs(),
                    bytes: cache.slabs().saturating_mul(cache.slab),
                    refilled: cache.refilled(),
                })
                .collect(),
        }
    }
}

pub fn text(look: &Look) -> String {
    let status = Status {
        processes: look.readings.iter().map(Process::of).collect(),
        unread: look.unread.sum(),
    };
    // The numbers and names have a form in JSON.
    serde_json::to_string(&status).unwrap_or_default()
}
