//! The latency command: the times of single calls of malloc and free, under each allocator.
//!
//! A mean hides the few calls that take a thousand times longer: the allocator returns memory,
//! empties its caches, or waits for a lock. But most of the longest calls are not the allocator's
//! doing: the kernel gave the CPU to another thread, or mapped a page. So the load
//! (`bench/loads/latency.c`) times every call, and tells for each long one what else happened
//! during it.
//!
//! 1. `whole` prepares the subjects' libraries. Each run of the load is one process.
//! 2. [`pressure`] makes the kernel reclaim memory, if asked for.
//! 3. [`rows`] takes the medians of the rounds. [`table`] shows them.

mod pressure;
mod rows;
mod table;

use crate::args::LatencyArgs;
use crate::machine::Machine;
use crate::whole::Settings;
use crate::whole::launch;
use crate::whole::prepare::{self, Cache};
use crate::whole::programs::Call;
use crate::whole::subjects::{self, Subject};
use anyhow::{Context, Result, ensure};
use pinfold_lab::stats::turns;
use pressure::Pressure;
use rows::{Report, Row};

pinfold_lab::names! {
    /// What else the machine does.
    pub enum Situation {
        /// Nothing that this command started.
        Idle = "idle",
        /// The kernel must reclaim memory before it gives any out.
        Pressure = "pressure",
    }
}

/// The parameters of a table.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Setup {
    situation: Situation,
    threads: u32,
}

/// Measures as `args` say, and delivers the results.
pub fn run(args: &LatencyArgs) -> Result<()> {
    let (cache, subjects) = subjects::open(&args.preloaded)?;
    ensure!(
        !subjects.is_empty(),
        "nothing is left to measure; the notes above say what was left out and why"
    );
    prepare::compile_load(&cache, "latency", "latency.c", &[])?;
    let machine = Machine::read();
    let mut rows = measure(args, &cache, &subjects, Situation::Idle)?;
    let mut notes = String::new();
    if args.pressure {
        let pressure = Pressure::start(&cache.work)?;
        rows.extend(measure(args, &cache, &subjects, Situation::Pressure)?);
        notes = pressure.stop()?;
    }
    let text = || table::text(&rows, args.rounds) + &notes;
    args.output.deliver("latency", &machine, &rows, text)
}

/// Runs the load under every subject, in rounds. Subjects take turns within a round. A subject that
/// fails has no row, and a note.
fn measure(
    args: &LatencyArgs,
    cache: &Cache,
    subjects: &[Subject],
    situation: Situation,
) -> Result<Vec<Row>> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u32;
    let mut rows = Vec::new();
    for threads in args.threads_per_cpu.iter().map(|each| each * cpus) {
        let mut reports: Vec<Result<Vec<Report>>> = subjects.iter().map(|_| Ok(vec![])).collect();
        for round in 0..args.rounds {
            eprintln!(
                "{situation}, {threads} threads: round {}/{}",
                round + 1,
                args.rounds
            );
            for which in turns(subjects.len(), round as usize) {
                let Ok(so_far) = &mut reports[which] else {
                    continue;
                };
                match once(cache, &subjects[which], threads, args.seconds) {
                    Ok(report) => so_far.push(report),
                    Err(error) => reports[which] = Err(error),
                }
            }
        }
        let setup = Setup { situation, threads };
        for (subject, reports) in subjects.iter().zip(reports) {
            match reports {
                Ok(reports) => rows.extend(rows::of(&subject.name, setup, &reports)?),
                Err(error) => eprintln!("note: {} is left out: {error:#}", subject.name),
            }
        }
    }
    Ok(rows)
}

/// Runs the load once.
fn once(cache: &Cache, subject: &Subject, threads: u32, seconds: u32) -> Result<Report> {
    let call = Call {
        program: cache.bin.join("latency"),
        arguments: vec![threads.to_string(), seconds.to_string()],
        ..Call::default()
    };
    let settings = Settings {
        threads,
        limit: 4 * seconds + 60,
        settle: 0.0,
    };
    let (sample, output) = launch::start(cache, &call, subject, settings)?;
    let mut report: Report =
        serde_json::from_slice(&output).context("reading the load's report; please report this")?;
    report.peak_rss_bytes = sample.peak_rss_bytes;
    Ok(report)
}
