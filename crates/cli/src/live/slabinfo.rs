//! `pinfold slabinfo`: a process's caches in the form of `/proc/slabinfo`.

use super::snapshot::{Cache, Snapshot};
use super::source::Source;
use crate::foreign::Identity;
use crate::output;
use anyhow::{Context, Result};
use pinfold::internal::segment::SlabEvent;
use serde::Serialize;
use std::fmt::Write;
use std::process::ExitCode;

/// Show a process's object caches as /proc/slabinfo does
///
/// Active objects are those out of their slabs. They include free objects in the sheaves of CPUs
/// and barns. Only `pinfold_slabinfo`, in the process itself, can tell them apart.
#[derive(clap::Args)]
pub struct Args {
    /// The process id
    #[arg(value_name = "PID", value_parser = super::pid)]
    pid: u32,

    /// Print one JSON object instead of the kernel's format
    #[arg(long)]
    json: bool,
}

const HEADER: &str = "slabinfo - version: 2.1\n\
    # name            <active_objs> <num_objs> <objsize> <objperslab> <pagesperslab> \
    : tunables <limit> <batchcount> <sharedfactor> \
    : slabdata <active_slabs> <num_slabs> <sharedavail>\n";

#[derive(Serialize)]
struct Rows {
    process: Identity,
    caches: Vec<Row>,
}

/// One cache.
#[derive(Serialize)]
pub struct Row {
    name: String,
    active_objects: u64,
    objects: u64,
    object_bytes: u64,
    slot_bytes: u64,
    objects_per_slab: u64,
    slab_bytes: u64,
    slabs: u64,
    sheaf_capacity: u64,
    refills: u64,
    flushes: u64,
    remote_frees: u64,
}

impl Row {
    pub fn of(cache: &Cache) -> Row {
        Row {
            name: cache.name.clone(),
            active_objects: cache.out(),
            objects: cache.total(),
            object_bytes: cache.object,
            slot_bytes: cache.size,
            objects_per_slab: cache.per_slab,
            slab_bytes: cache.slab,
            slabs: cache.slabs(),
            sheaf_capacity: cache.sheaf_capacity,
            refills: cache.count(SlabEvent::Refilled),
            flushes: cache.count(SlabEvent::Flushed),
            remote_frees: cache.count(SlabEvent::FreeRemote),
        }
    }
}

pub fn main(args: Args) -> Result<ExitCode> {
    let source = Source::open(args.pid).with_context(|| format!("process {}", args.pid))?;
    let snapshot = source.read()?;
    let rows = Rows {
        process: Identity::of(source.process()),
        caches: snapshot.caches.iter().map(Row::of).collect(),
    };
    output::show(args.json, "slabinfo", &rows, || text(&snapshot))?;
    Ok(ExitCode::SUCCESS)
}

fn text(snapshot: &Snapshot) -> String {
    let mut text = HEADER.to_owned();
    for cache in &snapshot.caches {
        let name = cache
            .name
            .replace(|char: char| !char.is_ascii_graphic(), "_");
        let capacity = cache.sheaf_capacity;
        let _ = writeln!(
            text,
            "{name:<17} {:6} {:6} {:6} {:4} {:4} : tunables {:4} {capacity:4}    0 : slabdata {slabs:6} {slabs:6}      0",
            cache.out(),
            cache.total(),
            cache.size,
            cache.per_slab,
            cache.slab / snapshot.page_size.max(1),
            2 * capacity,
            slabs = cache.slabs(),
        );
    }
    text
}
