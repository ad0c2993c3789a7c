//! `pinfold list`: the processes that run on Pinfold.

use super::backend_name;
use super::mail::{Asked, ask_to_show};
use super::snapshot::{Refused, Snapshot};
use super::source::{PATIENCE, Source, Unreadable};
use crate::figures::{self, Table};
use anyhow::{Context, Result};
use serde::Serialize;
use std::fs;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

/// List the processes that run on Pinfold
///
/// Shows the processes that this user may look at. A forked child shows itself from the time that
/// it was first listed.
#[derive(clap::Args)]
pub struct Args {
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Answer<'r> {
    list: &'r [Row],
}

/// One process.
#[derive(Serialize)]
pub struct Row {
    pub pid: u32,
    pub name: String,
    backend: &'static str,
    pub held_bytes: u64,
    pub held_peak_bytes: u64,
    pub used_bytes: u64,
    pub dirty_bytes: u64,
    caches: usize,
    pub seconds: u64,
}

impl Row {
    fn of(source: &Source, snapshot: &Snapshot) -> Row {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let started = Duration::from_nanos(snapshot.started_ns);
        Row {
            pid: source.pid,
            name: source.name(),
            backend: backend_name(snapshot.backend),
            held_bytes: snapshot.held,
            held_peak_bytes: snapshot.held_peak,
            used_bytes: snapshot.used(),
            dirty_bytes: snapshot.dirty(),
            caches: snapshot.caches.len(),
            seconds: now.unwrap_or_default().saturating_sub(started).as_secs(),
        }
    }
}

/// The processes that were found.
pub struct Listing {
    pub rows: Vec<Row>,
    /// Forked children that were asked and have not answered.
    children: Vec<u32>,
    /// How many processes this user may not look at.
    hidden: usize,
    refused: Vec<(u32, Refused)>,
}

/// The processes that were found, before they are read.
pub struct Found {
    pub sources: Vec<Source>,
    children: Vec<u32>,
    hidden: usize,
    refused: Vec<(u32, Refused)>,
}

/// Finds all processes. Asks forked children to show themselves, and waits for them for `patience`
/// at most.
pub fn sources(patience: Duration) -> Result<Found> {
    let (mut sources, mut refused) = (Vec::new(), Vec::new());
    let (mut children, mut hidden) = (Vec::new(), 0);
    for pid in pids()? {
        match Source::open(pid) {
            Ok(source) => sources.push(source),
            Err(Unreadable::Child) => children.push(pid),
            Err(Unreadable::Forbidden) => hidden += 1,
            Err(Unreadable::Refused(why)) => refused.push((pid, why)),
            Err(_) => {}
        }
    }
    let begin = Instant::now();
    // A child that may not be asked is not waited for. One whose mailbox is full is asked later.
    let mut unasked = children.clone();
    let mut ask = |children: &mut Vec<u32>| {
        unasked.retain(|&pid| match ask_to_show(pid) {
            Ok(Asked::Posted) => false,
            Ok(Asked::Full) => true,
            _ => {
                children.retain(|&child| child != pid);
                false
            }
        });
    };
    ask(&mut children);
    while !children.is_empty() && begin.elapsed() < patience {
        sleep(Duration::from_millis(20));
        ask(&mut children);
        children.retain(|&pid| match Source::open(pid) {
            Ok(source) => {
                sources.push(source);
                false
            }
            Err(error) => matches!(error, Unreadable::Child),
        });
    }
    sources.sort_by_key(|source| source.pid);
    Ok(Found {
        sources,
        children,
        hidden,
        refused,
    })
}

/// Finds all processes as [`sources`] does, and reads them.
pub fn rows(patience: Duration) -> Result<Listing> {
    let found = sources(patience)?;
    let rows = found.sources.iter();
    Ok(Listing {
        rows: rows
            .filter_map(|source| Some(Row::of(source, &source.read().ok()?)))
            .collect(),
        children: found.children,
        hidden: found.hidden,
        refused: found.refused,
    })
}

pub fn main(args: Args) -> Result<ExitCode> {
    let listing = rows(PATIENCE)?;
    for (pid, why) in &listing.refused {
        eprintln!("pinfold: process {pid}: {why}");
    }
    let text = match args.json {
        true => {
            serde_json::to_string_pretty(&Answer {
                list: &listing.rows,
            })? + "\n"
        }
        false => table(&listing.rows).to_string(),
    };
    figures::print(&text)?;
    if !listing.children.is_empty() {
        let children: Vec<String> = listing.children.iter().map(u32::to_string).collect();
        eprintln!(
            "pinfold: forked children that have not allocated since they were asked to show themselves: {}",
            children.join(" ")
        );
    }
    if listing.hidden > 0 {
        eprintln!(
            "pinfold: this user may not look at {} other processes, on Pinfold or not; root may",
            listing.hidden
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the numbers of all processes.
fn pids() -> Result<Vec<u32>> {
    let entries = fs::read_dir("/proc").context("cannot read /proc")?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter_map(|name| name.parse().ok()).collect())
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new([
        "NAME",
        "PID",
        "BACKEND",
        "HELD MiB",
        "PEAK MiB",
        "USED MiB",
        "DIRTY MiB",
        "CACHES",
        "SECONDS",
    ]);
    for row in rows {
        let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
        table.row([
            row.name.clone(),
            row.pid.to_string(),
            row.backend.to_owned(),
            mib(row.held_bytes),
            mib(row.held_peak_bytes),
            mib(row.used_bytes),
            mib(row.dirty_bytes),
            row.caches.to_string(),
            row.seconds.to_string(),
        ]);
    }
    table
}
