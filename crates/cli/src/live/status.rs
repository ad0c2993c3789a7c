//! All numbers of processes at one moment, for programs: what `pinfold top --once --json` prints,
//! and `pinfold serve` serves to its page.

use super::list::Unread;
use super::snapshot::{self, Snapshot};
use super::top::{Sum, nodes};
use super::{backend_name, slabinfo};
use crate::foreign::Identity;
use serde::Serialize;

#[derive(Serialize)]
pub struct Status {
    pub processes: Vec<Process>,
    pub unread: Unread,
}

#[derive(Serialize)]
pub struct Process {
    #[serde(flatten)]
    process: Identity,
    backend: &'static str,
    used_bytes: u64,
    #[serde(flatten)]
    sum: Sum,
    slow_calls: u64,
    /// The caches that have ever had objects.
    caches: Vec<slabinfo::Row>,
    cpus: Vec<Cpu>,
    nodes: Vec<nodes::Counts>,
    shepherd: Shepherd,
}

#[derive(Serialize)]
struct Cpu {
    name: String,
    /// How many threads ran there last.
    threads: u64,
}

#[derive(Serialize)]
struct Shepherd {
    threads: u32,
    ticks: u64,
    /// When the last tick was, since the epoch. `None` before the first.
    ticked_seconds: Option<f64>,
    in_ticks_seconds: f64,
    folds: u64,
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

impl Process {
    /// `cpus` are the threads that ran on each CPU last.
    pub fn of(process: Identity, snapshot: &Snapshot, cpus: &[(String, u64)]) -> Process {
        let caches = snapshot.caches.iter();
        let cpu = |(name, threads): &(String, u64)| Cpu {
            name: name.clone(),
            threads: *threads,
        };
        let shepherd = snapshot.shepherd;
        Process {
            process,
            backend: backend_name(snapshot.backend),
            used_bytes: snapshot.used(),
            sum: Sum::of(snapshot),
            slow_calls: snapshot.of_caches(snapshot::Cache::slow),
            caches: caches
                .filter(|cache| cache.refilled() > 0)
                .map(slabinfo::Row::of)
                .collect(),
            cpus: cpus.iter().map(cpu).collect(),
            nodes: nodes::counts(snapshot),
            shepherd: Shepherd {
                threads: shepherd.threads,
                ticks: shepherd.ticks,
                ticked_seconds: (shepherd.ticked_ns != 0).then(|| seconds(shepherd.ticked_ns)),
                in_ticks_seconds: seconds(shepherd.in_ticks_ns),
                folds: shepherd.folds,
            },
        }
    }
}
