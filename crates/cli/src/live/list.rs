//! `pinfold list`: the processes that run on Pinfold.

use super::snapshot::Snapshot;
use super::source::{Source, Unreadable};
use super::{backend_name, locked, mib};
use crate::foreign::{Deadline, Identity, NO_PROC, pids};
use crate::output::{self, Table};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

/// List the processes that run on Pinfold
///
/// Shows the processes that this user may look at, with their forked children.
#[derive(clap::Args)]
pub struct Args {
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// One process.
#[derive(Serialize)]
pub struct Row {
    #[serde(flatten)]
    pub process: Identity,
    age_seconds: u64,
    backend: &'static str,
    pub held_bytes: u64,
    pub held_peak_bytes: u64,
    pub used_bytes: u64,
    pub dirty_bytes: u64,
    cache_count: usize,
}

impl Row {
    fn of(source: &Source, snapshot: &Snapshot) -> Row {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let process = Identity::of(source.process());
        // The numbers of a forked child begin with its parent's, but it is younger.
        let started = process.started_seconds.map_or_else(
            || Duration::from_nanos(snapshot.started_ns),
            Duration::from_secs_f64,
        );
        Row {
            process,
            age_seconds: now.unwrap_or_default().saturating_sub(started).as_secs(),
            backend: backend_name(snapshot.backend),
            held_bytes: snapshot.held,
            held_peak_bytes: snapshot.held_peak,
            used_bytes: snapshot.used(),
            dirty_bytes: snapshot.dirty(),
            cache_count: snapshot.caches.len(),
        }
    }

    pub fn seconds(&self) -> u64 {
        self.age_seconds
    }

    pub fn command(&self) -> &str {
        self.process.command.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
impl Row {
    /// Returns the row of a made-up process that holds nothing.
    pub fn with(pid: u32, name: &str) -> Row {
        Row {
            process: Identity::named(pid, name.to_owned()),
            age_seconds: 0,
            backend: backend_name(0),
            held_bytes: 0,
            held_peak_bytes: 0,
            used_bytes: 0,
            dirty_bytes: 0,
            cache_count: 0,
        }
    }
}

/// How many processes on Pinfold were not read, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Unread {
    /// Reading them failed.
    #[serde(rename = "error")]
    pub failed: usize,
    /// They could not be read in time.
    #[serde(rename = "time")]
    pub late: usize,
    /// This command may not open more files, or has no more memory for the numbers of processes.
    #[serde(rename = "limit")]
    pub beyond: usize,
    /// They run on Pinfold, and this user may not trace them.
    #[serde(rename = "permission")]
    pub untraceable: usize,
}

/// The processes that were found.
#[derive(Default)]
pub struct Found {
    pub sources: Vec<Source>,
    /// How many processes on Pinfold this user may not trace: forked children, and processes that
    /// have closed their descriptors.
    pub untraceable: usize,
    /// How many processes this user may not look at.
    hidden: usize,
    /// How many processes were not looked at, or not wholly, because that took too long.
    pub unseen: usize,
    /// The processes that cannot be read, or not be asked.
    pub refused: Vec<(u32, Unreadable)>,
}

/// How long a look at all processes may take. A process can make each look at it slow.
const LOOK: Duration = Duration::from_secs(10);
/// How long the reads of one process may take. Usually they take some milliseconds.
const EACH: Duration = Duration::from_secs(2);

impl Found {
    /// Returns how many processes were not read.
    pub fn unread(&self) -> Unread {
        Unread {
            failed: self.refused.len(),
            late: self.unseen,
            beyond: 0,
            untraceable: self.untraceable,
        }
    }
}

pub fn sources() -> Result<Found> {
    // The process with which the last look ended. The next one begins behind it, so that slow
    // processes do not hide others from each look.
    static LAST: AtomicU32 = AtomicU32::new(0);
    allow_many_files();
    let mut found = Found::default();
    let pids = pids(Path::new("/proc")).context("cannot read /proc")?;
    if pids.is_empty() {
        bail!(NO_PROC);
    }
    let last = LAST.load(Relaxed);
    let (before, behind): (Vec<u32>, Vec<u32>) = pids.into_iter().partition(|&pid| pid <= last);
    let end = Instant::now() + LOOK;
    let _look = Deadline::after(LOOK);
    let mut rest = behind.into_iter().chain(before);
    LAST.store(0, Relaxed);
    for pid in rest.by_ref() {
        if Instant::now() >= end {
            LAST.store(pid - 1, Relaxed);
            found.unseen += 1 + rest.count();
            break;
        }
        let Some(_opening) = Opening::begin(pid) else {
            found.unseen += 1;
            continue;
        };
        let _each = Deadline::after(EACH);
        match Source::open(pid) {
            Ok(source) => found.sources.push(source),
            Err(Unreadable::Untraceable) => found.untraceable += 1,
            Err(Unreadable::Forbidden) => found.hidden += 1,
            Err(why) if why.is_late() => found.unseen += 1,
            // A child between its fork and its exec shares its parent's statistics.
            Err(Unreadable::NotShown | Unreadable::Gone | Unreadable::Shares) => {}
            Err(why) => found.refused.push((pid, why)),
        }
    }
    Ok(found)
}

/// A process that a thread is opening. A process can make a read of it wait for as long as it
/// likes. So the other threads leave the process out while one thread is opening it.
struct Opening(u32);

impl Opening {
    /// Returns `None` if another thread is opening the process.
    fn begin(pid: u32) -> Option<Opening> {
        Opening::all().insert(pid).then(|| Opening(pid))
    }

    fn all() -> MutexGuard<'static, BTreeSet<u32>> {
        static ALL: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
        locked(&ALL)
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        Opening::all().remove(&self.0);
    }
}

/// Raises the limit of open files as far as this process may, and returns it. Each process that is
/// found takes some.
pub fn allow_many_files() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is writable, and valid for the second call if the first one succeeded.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
    limit.rlim_cur
}

/// Returns what `of` makes of each process that was found, and of its numbers. Counts the processes
/// that cannot be read in time.
pub fn read<T>(found: &mut Found, of: impl Fn(&Source, &Snapshot) -> T) -> Vec<T> {
    let _look = Deadline::after(LOOK);
    let mut rows = Vec::new();
    for source in &found.sources {
        let _each = Deadline::after(EACH);
        match source.read() {
            Ok(snapshot) => rows.push(of(source, &snapshot)),
            Err(why) if why.is_late() => found.unseen += 1,
            Err(_) => {}
        }
    }
    rows
}

/// Reads the processes that were found.
pub fn rows(found: &mut Found) -> Vec<Row> {
    read(found, Row::of)
}

/// What is printed for programs.
#[derive(Serialize)]
struct List<'l> {
    processes: &'l [Row],
    unread: Unread,
}

pub fn main(args: Args) -> Result<ExitCode> {
    let mut found = sources()?;
    found.sources.sort_by_key(|source| source.pid);
    let rows = rows(&mut found);
    for (pid, why) in &found.refused {
        output::note(format_args!("process {pid}: {why}"));
    }
    let list = List {
        processes: &rows,
        unread: found.unread(),
    };
    output::show(args.json, "list", &list, || table(&rows).to_string())?;
    if found.untraceable > 0 {
        output::note(format_args!(
            "processes on Pinfold that are not shown: {}; forked children, and processes that have closed their descriptors, are read by those that may trace them: run this as root with CAP_SYS_PTRACE, or as their owner while kernel.yama.ptrace_scope is 0",
            found.untraceable
        ));
    }
    if found.unseen > 0 {
        output::note(format_args!(
            "processes that were not read in time: {}; one may take {} s, and all together {} s",
            found.unseen,
            EACH.as_secs(),
            LOOK.as_secs()
        ));
    }
    // Root may look at almost all processes, and has no use for the few others.
    let is_root = rustix::process::geteuid().is_root();
    if found.hidden > 0 && (!is_root || rows.is_empty()) {
        let hidden = match found.hidden {
            1 => "1 other process".to_owned(),
            hidden => format!("{hidden} other processes"),
        };
        output::note(format_args!(
            "{hidden} could not be checked, because the system does not show them to this user; root with CAP_SYS_PTRACE sees most"
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// The characters of a command line that the table has.
const SHOWN: usize = 60;

fn shortened(command: &str) -> String {
    match command.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &command[..end]),
        None => command.to_owned(),
    }
}

fn table(rows: &[Row]) -> Table {
    Table::of(rows)
        .column("NAME", |row| &row.process.name)
        .column("PID", |row| row.process.pid)
        .column("BACKEND", |row| row.backend)
        .column("HELD MiB", |row| mib(row.held_bytes))
        .column("PEAK MiB", |row| mib(row.held_peak_bytes))
        .column("USED MiB", |row| mib(row.used_bytes))
        .column("DIRTY MiB", |row| mib(row.dirty_bytes))
        .column("CACHES", |row| row.cache_count)
        .column("SECONDS", |row| row.age_seconds)
        .also_names("COMMAND", |row| shortened(row.command()))
        .table()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise each finder of processes would hang at the same one, and none would be found.
    #[test]
    fn a_process_in_which_a_read_hangs_is_left_out() {
        let own = std::process::id();
        let hangs = Opening::begin(own).unwrap();
        assert!(Opening::begin(own).is_none());
        let found = sources().unwrap();
        assert!(found.unseen >= 1);
        drop(hangs);
        assert!(Opening::begin(own).is_some());
    }
}
