//! The memory of many counters: measured in a process for each subject, or computed for designs
//! that are not built here.

use super::rows::{Op, Row};
use super::subjects::{Name, Subject};
use crate::args::CounterMemoryChildArgs;
use anyhow::{Context, Result, bail, ensure};
use pinfold::counter::{Counters, EventCounter};
use pinfold_lab::cpus;
use std::fs;
use std::ops::Deref;
use std::process::Command;
use std::sync::atomic::AtomicI64;
use std::thread;

/// The subjects whose memory is measured.
const MEASURED: [Name; 5] = [
    Name::Pinfold,
    Name::PinfoldEvent,
    Name::Atomic,
    Name::FastTelemetry,
    Name::FastCounter,
];

/// Bytes of a shard on its own pair of cache lines, because x86-64 fetches lines in pairs.
const PADDED: usize = 128;

/// Bytes of folly's ThreadCachedInt for each thread and counter: a node of 24 bytes (a pointer, the
/// value, a count and a flag), and 16 bytes in the thread's table (the node's pointer and its
/// deleter). The overhead of malloc is not counted.
const FOLLY: usize = 24 + 16;

/// Returns the rows: those among `subjects` that can be measured, and the computed ones.
pub fn rows(subjects: &[Name], counters: u32, cpus: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for subject in MEASURED.into_iter().filter(|name| subjects.contains(name)) {
        let bytes = start(subject, counters).with_context(|| format!("memory of {subject}"))?;
        rows.push(row(subject.name(), counters, "measured", bytes, None));
    }
    let all = counters as usize;
    let computed = |per_counter: usize| (per_counter * all) as u64;
    let padded = computed(PADDED * cpus);
    rows.push(row("padded", counters, "computed", padded, None));
    for threads in [16, 1_000] {
        let bytes = computed(FOLLY * threads);
        rows.push(row("folly", counters, "computed", bytes, Some(threads)));
    }
    Ok(rows)
}

/// Explains the computed rows.
pub fn formulas(cpus: usize) -> String {
    format!(
        "padded: {PADDED} bytes x {cpus} CPUs x counters. folly: ThreadCachedInt's {FOLLY} bytes x threads that ever add x counters \
         (a node of 24, a table entry of 16)."
    )
}

fn row(
    subject: &'static str,
    counters: u32,
    how: &'static str,
    bytes: u64,
    threads: Option<usize>,
) -> Row {
    let mut row = Row::new(subject, Op::Memory);
    row.counters = Some(counters as usize);
    row.how = Some(how);
    row.bytes = Some(bytes);
    row.threads = threads;
    row
}

fn start(subject: Name, counters: u32) -> Result<u64> {
    let output = Command::new(std::env::current_exe()?)
        .args(["counter-memory-child", "--subject", subject.name()])
        .args(["--counters", &counters.to_string()])
        .output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "its process failed: {}",
        errors.trim()
    );
    let text = String::from_utf8(output.stdout)?;
    text.trim().parse().context("its process printed no number")
}

/// Makes the counters, adds to each on every CPU, and prints by how many bytes the process grew.
pub fn child(args: &CounterMemoryChildArgs) -> Result<()> {
    let count = args.counters as usize;
    let grown = match args.subject {
        Name::Pinfold => {
            // The values are allocated and written before the first reading.
            let values = vec![1; count];
            grown(count, |count| Ok(Counters::new(&values[..count], 32)?))?
        }
        Name::PinfoldEvent => several::<EventCounter>(count)?,
        Name::Atomic => several::<AtomicI64>(count)?,
        Name::FastTelemetry => several::<fast_telemetry::Counter>(count)?,
        Name::FastCounter => several::<fast_counter::ConcurrentCounter>(count)?,
        other => bail!("{other} has no memory to measure"),
    };
    println!("{grown}");
    Ok(())
}

/// Calls [`grown`] for counters that are made one by one. Peers get a shard for each CPU.
fn several<S: Subject>(count: usize) -> Result<u64> {
    let cpus = cpus::allowed()?.len();
    grown(count, |count| {
        Ok((0..count).map(|_| S::new(cpus)).collect::<Vec<_>>())
    })
}

/// Returns by how much the resident memory grows while `make` makes `count` counters and every CPU
/// adds to each.
///
/// Before that, one counter is made and used, so that memory needed once, including code, does not
/// count.
fn grown<C, L>(count: usize, make: impl Fn(usize) -> Result<L>) -> Result<u64>
where
    C: Subject,
    L: Deref<Target = [C]>,
{
    let first = make(1)?;
    add_everywhere(&first)?;
    resident()?;
    let before = resident()?;
    let counters = make(count)?;
    add_everywhere(&counters)?;
    Ok(resident()?.saturating_sub(before))
}

/// Adds to all counters from a thread on each CPU, one after the other, because peers choose a
/// shard by the thread.
fn add_everywhere<C: Subject>(counters: &[C]) -> Result<()> {
    for cpu in cpus::allowed()? {
        thread::scope(|scope| {
            let adder = scope.spawn(|| -> Result<()> {
                cpus::pin(cpu)?;
                counters.iter().for_each(|counter| counter.adder(0)());
                Ok(())
            });
            adder.join().expect("an adding thread panicked")
        })?;
    }
    Ok(())
}

/// Returns Rss of /proc/self/smaps_rollup, in bytes.
fn resident() -> Result<u64> {
    let path = "/proc/self/smaps_rollup";
    let rollup = fs::read_to_string(path).context(path)?;
    let line = (rollup.lines().find_map(|line| line.strip_prefix("Rss:")))
        .with_context(|| format!("no Rss in {path}"))?;
    let kib: u64 = (line.trim().trim_end_matches("kB").trim().parse())
        .with_context(|| format!("{path}: Rss is {line:?}"))?;
    Ok(1024 * kib)
}
