//! `pinfold list`: the processes that run on Pinfold.

use super::backend_name;
use super::mail::{Asked, Child, LONGEST_PAUSE, NoAnswer, ask_to_show};
use super::numbers::Numbers;
use super::snapshot::Snapshot;
use super::source::{PATIENCE, Source, Unreadable};
use crate::figures::{self, Table};
use crate::foreign::pids;
use anyhow::{Context, Result, bail};
use pinfold::segment::Code;
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::thread::{self, sleep};
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
        // The numbers of a forked child begin with its parent's, but it is younger.
        let started = source.start_seconds().map_or_else(
            || Duration::from_nanos(snapshot.started_ns),
            Duration::from_secs_f64,
        );
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
#[derive(Default)]
pub struct Found {
    pub sources: Vec<Source>,
    /// Forked children that do not show themselves.
    children: Vec<u32>,
    /// Forked children with a seccomp filter, which makes it unsafe to ask them.
    filtered: Vec<u32>,
    /// How many processes this user may not look at.
    hidden: usize,
    /// How many processes were not looked at, because the look took too long.
    pub unseen: usize,
    /// The processes that cannot be read, or not be asked.
    pub refused: Vec<(u32, Unreadable)>,
}

/// How long a look at all processes may take. A process can make each look at it slow.
const LOOK: Duration = Duration::from_secs(10);

/// Finds all processes. Has a thread ask forked children to show themselves, so that a later call
/// finds them.
pub fn sources() -> Result<Found> {
    static IS_ASKING: AtomicBool = AtomicBool::new(false);
    let found = find()?;
    if !found.children.is_empty() && !IS_ASKING.swap(true, Relaxed) {
        let mut children = Found {
            children: found.children.clone(),
            ..Found::default()
        };
        let asking = thread::Builder::new().spawn(move || {
            children.ask();
            IS_ASKING.store(false, Relaxed);
        });
        if asking.is_err() {
            IS_ASKING.store(false, Relaxed);
        }
    }
    Ok(found)
}

/// Finds all processes. Does not ask forked children.
fn find() -> Result<Found> {
    // The process with which the last look ended. The next one begins behind it, so that slow
    // processes do not hide others from each look.
    static LAST: AtomicU32 = AtomicU32::new(0);
    allow_many_files();
    let mut found = Found::default();
    let pids = pids(Path::new("/proc")).context("cannot read /proc")?;
    if pids.is_empty() {
        bail!("/proc shows no processes; mount it by `mount -t proc proc /proc`");
    }
    let last = LAST.load(Relaxed);
    let (before, behind): (Vec<u32>, Vec<u32>) = pids.into_iter().partition(|&pid| pid <= last);
    let end = Instant::now() + LOOK;
    let mut rest = behind.into_iter().chain(before);
    LAST.store(0, Relaxed);
    for pid in rest.by_ref() {
        if Instant::now() >= end {
            LAST.store(pid - 1, Relaxed);
            found.unseen = 1 + rest.count();
            break;
        }
        match Source::open(pid) {
            Ok(source) => found.sources.push(source),
            Err(Unreadable::Child) => found.children.push(pid),
            Err(Unreadable::Forbidden) => found.hidden += 1,
            Err(Unreadable::NotShown | Unreadable::Gone) => {}
            Err(why) => found.refused.push((pid, why)),
        }
    }
    Ok(found)
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

impl Found {
    /// Asks the forked children to show themselves, and waits for them for [`PATIENCE`] at most.
    fn ask(&mut self) {
        if self.children.is_empty() {
            return;
        }
        let begin = Instant::now();
        let numbers = Numbers::read();
        let mut asked: Vec<Child> = Vec::new();
        let mut unable = Vec::new();
        loop {
            self.post(&numbers, &mut asked);
            asked.retain(|child| match child.answer() {
                Ok(None) => child.is_alive(),
                Ok(Some(answer)) if answer.code() == Some(Code::Done) => {
                    self.sources.extend(Source::open(child.pid()));
                    false
                }
                // It got the consent too late, and is asked again.
                Ok(Some(answer)) if answer.code() == Some(Code::NoConsent) => {
                    self.children.push(child.pid());
                    false
                }
                // It may have no more files.
                Ok(Some(_)) => {
                    unable.push(child.pid());
                    false
                }
                Err(NoAnswer::Filtered) => {
                    self.filtered.push(child.pid());
                    false
                }
                Err(_) => false,
            });
            let is_done = self.children.is_empty() && asked.is_empty();
            if is_done || begin.elapsed() >= PATIENCE {
                break;
            }
            sleep(LONGEST_PAUSE);
        }
        self.children.extend(asked.iter().map(Child::pid));
        self.children.append(&mut unable);
    }

    /// Posts requests to the children that were not asked yet, until a mailbox is full.
    fn post(&mut self, numbers: &Numbers, asked: &mut Vec<Child>) {
        let mut is_full = false;
        self.children.retain(|&pid| {
            if is_full {
                return true;
            }
            match ask_to_show(pid, numbers) {
                Ok(Asked::Posted(child)) => asked.push(child),
                Ok(Asked::Full) => is_full = true,
                Ok(Asked::Filtered) => self.filtered.push(pid),
                Err(Unreadable::NoMailbox | Unreadable::Gone) => {}
                Err(why) => self.refused.push((pid, why)),
            }
            is_full
        });
        if is_full {
            // The next child may have another mailbox.
            self.children.rotate_left(1);
        }
    }
}

/// Reads the processes that were found.
pub fn rows(found: &Found) -> Vec<Row> {
    let rows = found.sources.iter();
    rows.filter_map(|source| Some(Row::of(source, &source.read().ok()?)))
        .collect()
}

/// Finds all processes. Asks forked children to show themselves, and waits for them.
pub fn sources_and_children() -> Result<Found> {
    let mut found = find()?;
    found.ask();
    Ok(found)
}

pub fn main(args: Args) -> Result<ExitCode> {
    let mut found = sources_and_children()?;
    found.sources.sort_by_key(|source| source.pid);
    let rows = rows(&found);
    for (pid, why) in &found.refused {
        figures::note(format_args!("process {pid}: {why}"));
    }
    let text = match args.json {
        true => serde_json::to_string_pretty(&Answer { list: &rows })? + "\n",
        false => table(&rows).to_string(),
    };
    figures::print(&text)?;
    let name = |children: &[u32], what: &str| {
        if !children.is_empty() {
            let numbers: Vec<String> = children.iter().map(u32::to_string).collect();
            figures::note(format_args!("{what}: {}", numbers.join(" ")));
        }
    };
    name(
        &found.children,
        "forked children that show no statistics yet: run `pinfold list` again; a child answers when it next allocates or frees, and needs a free file descriptor",
    );
    name(
        &found.filtered,
        "forked children with a seccomp filter, which cannot be asked to show themselves",
    );
    if found.unseen > 0 {
        figures::note(format_args!(
            "{} processes were not looked at, because other processes took more than {} s to read",
            found.unseen,
            LOOK.as_secs()
        ));
    }
    // Root may look at almost all processes, and has no use for the few others.
    // SAFETY: the call has no preconditions.
    let is_root = unsafe { libc::geteuid() } == 0;
    if found.hidden > 0 && (!is_root || rows.is_empty()) {
        let hidden = match found.hidden {
            1 => "1 other process".to_owned(),
            hidden => format!("{hidden} other processes"),
        };
        figures::note(format_args!(
            "{hidden} could not be checked, because the system does not show them to this user; root with CAP_SYS_PTRACE sees most"
        ));
    }
    Ok(ExitCode::SUCCESS)
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
