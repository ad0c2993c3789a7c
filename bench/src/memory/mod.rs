//! The memory command: how much memory 1,000 threads leave resident after each has allocated 1 MiB
//! and freed it.
//!
//! Each subject and variant has its own process, so that none sees another's memory.

pub mod child;
mod fragmented;

use crate::args::MemoryArgs;
use crate::child::command;
use crate::machine::Machine;
use crate::subjects::SubjectName;
use anyhow::{Context, Result, bail, ensure};
use pinfold_lab::output::Table;
use serde::{Deserialize, Serialize};
use std::process::{Child, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

pinfold_lab::names! {
    /// What the threads do.
    pub enum Variant {
        /// One thread allocates and frees, then the next. Shows what each thread keeps.
        OneByOne = "one_by_one",
        /// All threads allocate, and only then all free. Also shows what was in use at the same
        /// time.
        AtOnce = "at_once",
        /// One thread allocates a million objects of twenty sizes and frees nine in ten, at random.
        Fragmented = "fragmented",
    }
}

impl Variant {
    fn describe(self) -> &'static str {
        match self {
            Variant::OneByOne | Variant::AtOnce => {
                "sleeping threads that each allocated 1 MiB in blocks of 16 to 4096 bytes and freed it"
            }
            Variant::Fragmented => {
                "a thread that allocated a million objects of 20 sizes and freed 9 in 10, at random"
            }
        }
    }
}

/// The results of one process.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Sizes {
    /// Bytes beyond the baseline, as soon as the last thread sleeps.
    pub rss_bytes: u64,
    /// Bytes before any allocation, while all threads sleep.
    pub baseline_bytes: u64,
    /// Bytes beyond the baseline, some seconds later.
    pub settled_rss_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Row {
    subject: SubjectName,
    variant: Variant,
    threads: u32,
    #[serde(flatten)]
    sizes: Sizes,
}

/// Measures as `args` say, and delivers the results.
pub fn run(args: &MemoryArgs) -> Result<()> {
    let mut rows = Vec::new();
    for &variant in &args.variant {
        for &subject in &args.subjects {
            if subject == SubjectName::PinfoldCache || subject.is_pool() {
                eprintln!("note: {subject} is left out: it has objects of one size only");
                continue;
            }
            match start(args, subject, variant) {
                Ok(sizes) => rows.push(Row {
                    subject,
                    variant,
                    threads: args.setup.threads,
                    sizes,
                }),
                Err(error) => eprintln!("note: {subject}, {}: {error:#}", variant.name()),
            }
        }
    }
    (args.output).deliver("memory", &Machine::read(), &rows, || text(args, &rows))
}

fn start(args: &MemoryArgs, subject: SubjectName, variant: Variant) -> Result<Sizes> {
    let mut process = command(subject)?
        .args(["memory-child", "--subject", subject.name()])
        .args(["--variant", variant.name()])
        .args(["--threads", &args.setup.threads.to_string()])
        .args(["--settle", &args.setup.settle.to_string()])
        .stdout(Stdio::piped())
        .spawn()?;
    let limit = Duration::from_secs(u64::from(args.limit + args.setup.settle));
    let status = wait(&mut process, limit)?;
    ensure!(status.success(), "its process failed: {status}");
    let result = process.stdout.take().context("the process has no pipe")?;
    serde_json::from_reader(result).context("its process printed no result")
}

/// Waits for a process to end, and kills it if it takes longer than `limit`. An allocator whose
/// threads spin for a lock may need minutes with many more threads than CPUs.
fn wait(process: &mut Child, limit: Duration) -> Result<ExitStatus> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if let Some(status) = process.try_wait()? {
            return Ok(status);
        }
        thread::sleep(Duration::from_millis(20));
    }
    process.kill()?;
    process.wait()?;
    bail!("no result within {} s; raise --limit", limit.as_secs())
}

fn text(args: &MemoryArgs, rows: &[Row]) -> String {
    let mut text = format!(
        "Resident memory beyond the baseline, which is the same process before any allocation. In KiB; {} threads.\n",
        args.setup.threads
    );
    for &variant in &args.variant {
        let settled = format_args!("after {} s", args.setup.settle);
        let table = Table::of(rows.iter().filter(|row| row.variant == variant))
            .column("subject", |row| row.subject)
            .column("baseline", |row| row.sizes.baseline_bytes / 1024)
            .column("after 0 s", |row| row.sizes.rss_bytes / 1024)
            .column(settled, |row| row.sizes.settled_rss_bytes / 1024)
            .table();
        text += &format!("\n{}: {}\n{table}", variant.name(), variant.describe());
        text += &targets(rows, variant);
    }
    text
}

/// Says whether Pinfold meets its targets for settled memory: at most half of two peers, or 1.15
/// times three peers for fragmented memory.
fn targets(rows: &[Row], variant: Variant) -> String {
    let mut text = String::new();
    const HALF: [SubjectName; 2] = [SubjectName::Mimalloc, SubjectName::Jemalloc];
    const ALL: [SubjectName; 3] = [
        SubjectName::Mimalloc,
        SubjectName::Jemalloc,
        SubjectName::Snmalloc,
    ];
    let (peers, most): (&[SubjectName], f64) = match variant {
        Variant::Fragmented => (&ALL, 1.15),
        _ => (&HALF, 0.5),
    };
    let settled = |subject| {
        let row = (rows.iter()).find(|row| (row.subject, row.variant) == (subject, variant))?;
        Some(row.sizes.settled_rss_bytes as f64)
    };
    for &peer in peers {
        if let (Some(ours), Some(theirs)) = (settled(SubjectName::PinfoldMalloc), settled(peer)) {
            let ratio = ours / theirs;
            let verdict = if ratio <= most { "met" } else { "missed" };
            text +=
                &format!("target pinfold-malloc / {peer}: {ratio:.3}, at most {most}: {verdict}\n");
        }
    }
    text
}
