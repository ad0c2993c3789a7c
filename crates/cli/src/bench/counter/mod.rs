//! `pinfold bench counter`: the benchmark of the 2011 discussion between Shaohua Li and Eric
//! Dumazet about scaling the kernel's percpu_counter. It measures the designs that they proposed
//! and Pinfold's counters.

mod designs;
mod percpu;
mod report;
mod run;
mod shared;
mod truth;
mod workers;

use crate::figures;
use anyhow::{Context, Result, ensure};
use pinfold_benchkit::machine::settle_index;
use pinfold_benchkit::stats::median;
use pinfold_rseq::Index;
use run::{Contender, Setup, contender};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

/// Measure a shared page counter around mmap and munmap of 128 MiB, in the designs proposed for the
/// kernel
///
/// Each worker loops: add 32768 pages to the counter, map 128 MiB, unmap them, subtract the pages.
/// The figure is the time of the run divided by the loops of all workers, in nanoseconds. With
/// `--summing yes`, one more thread sums the counter all the time. The error of a sum is its
/// distance, in pages, from the values that the counter can have had while the sum ran. After each
/// run the counter must be 0.
///
/// Subjects: spinlock-batch (percpu_counter before the patches: a spinlock around the shared
/// count), slowcount (Eric Dumazet's patch), add-start (Shaohua Li's reply), atomic (one atomic
/// integer), pinfold (Pinfold's PercpuCounter, whose cheap reads may be off by 64 mappings per CPU,
/// so that adds stay on their CPU), pinfold-batch (PercpuCounter with the kernel's batch). All but
/// atomic and pinfold use the kernel's batch, max(32, 2 x CPUs), which each add exceeds.
#[derive(clap::Args)]
pub struct Args {
    /// Number of workers; several numbers, separated by commas, are measured one after the other
    #[arg(long, default_value = "16", allow_negative_numbers = true, value_delimiter = ',', value_parser = threads)]
    threads: Vec<u32>,

    /// Make the workers processes that share the counter, as in 2011. Pinfold's counters belong to
    /// one process, so they are left out
    #[arg(long)]
    processes: bool,

    /// Seconds of each run
    #[arg(long, default_value_t = 0.3, allow_negative_numbers = true, value_parser = seconds)]
    seconds: f64,

    /// Number of runs of each subject, in turns; times are medians, errors are maxima
    #[arg(long, default_value_t = 3, allow_negative_numbers = true, value_parser = super::at_least_one)]
    rounds: u32,

    /// Whether workers map and unmap memory between the adds
    #[arg(long, value_enum, default_value_t = Choice::Both)]
    mmap: Choice,

    /// Whether one more thread sums the counter
    #[arg(long, value_enum, default_value_t = Choice::Both)]
    summing: Choice,

    /// Measure only these subjects, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', value_name = "SUBJECT")]
    subject: Vec<SubjectName>,

    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,

    /// Draw the results into this SVG file: bars, or lines if several numbers of workers are given
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// The measured designs, in the order of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum SubjectName {
    SpinlockBatch,
    Slowcount,
    AddStart,
    Atomic,
    Pinfold,
    PinfoldBatch,
}

impl SubjectName {
    const ALL: [SubjectName; 6] = [
        SubjectName::SpinlockBatch,
        SubjectName::Slowcount,
        SubjectName::AddStart,
        SubjectName::Atomic,
        SubjectName::Pinfold,
        SubjectName::PinfoldBatch,
    ];

    fn name(self) -> &'static str {
        match self {
            SubjectName::SpinlockBatch => "spinlock-batch",
            SubjectName::Slowcount => "slowcount",
            SubjectName::AddStart => "add-start",
            SubjectName::Atomic => "atomic",
            SubjectName::Pinfold => "pinfold",
            SubjectName::PinfoldBatch => "pinfold-batch",
        }
    }

    /// Returns whether the design can count in memory shared by processes.
    fn is_shareable(self) -> bool {
        !matches!(self, SubjectName::Pinfold | SubjectName::PinfoldBatch)
    }
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Choice {
    Both,
    Yes,
    No,
}

impl Choice {
    fn values(self) -> &'static [bool] {
        match self {
            Choice::Both => &[true, false],
            Choice::Yes => &[true],
            Choice::No => &[false],
        }
    }
}

#[derive(Clone, Serialize)]
struct Row {
    subject: SubjectName,
    threads: u32,
    summing: bool,
    mmap: bool,
    /// The time of the run divided by the loops of all workers: the median of the rounds.
    ns_per_op: f64,
    /// In pages. `None` without a summing thread.
    sum_error_max: Option<u64>,
    /// Number of sums behind `sum_error_max`.
    #[serde(skip)]
    sums: u64,
}

fn threads(text: &str) -> Result<u32, String> {
    super::count(text, 4096)
}

fn seconds(text: &str) -> Result<f64, String> {
    const MOST: f64 = 3600.0;
    match text.parse() {
        Ok(seconds) if seconds > 0.0 && seconds <= MOST => Ok(seconds),
        _ => Err(format!("give a number above 0 and up to {MOST}")),
    }
}

pub fn main(args: &Args) -> Result<()> {
    let subjects = subjects(args)?;
    if let Some(file) = &args.plot {
        figures::check_writable(file)?;
    }
    if args.processes {
        // Concurrency ids are per process: two processes on two CPUs could use the same one.
        pinfold_rseq::init(Index::Cpu);
    } else {
        settle_index();
    }
    let rows = measure(args, &subjects)?;
    if args.json {
        figures::json("counter", &rows)?;
    } else {
        figures::print(&report::text(args, &rows))?;
    }
    match &args.plot {
        Some(file) => report::plot(args, &rows, file),
        None => Ok(()),
    }
}

fn subjects(args: &Args) -> Result<Vec<SubjectName>> {
    let asked = |name: &SubjectName| args.subject.is_empty() || args.subject.contains(name);
    let mut subjects: Vec<_> = SubjectName::ALL.into_iter().filter(asked).collect();
    if args.processes {
        let own = args.subject.iter().find(|name| !name.is_shareable());
        ensure!(
            own.is_none(),
            "{} counts in one process only; leave out --processes, or name other subjects",
            own.map_or("", |name| name.name())
        );
        subjects.retain(|name| name.is_shareable());
    }
    Ok(subjects)
}

/// Measures all requested combinations. Within one, each subject runs once per round.
fn measure(args: &Args, subjects: &[SubjectName]) -> Result<Vec<Row>> {
    let made = subjects.iter().map(|&name| Ok((name, contender(name)?)));
    let contenders = made.collect::<Result<Vec<_>>>()?;
    let mut rows = Vec::new();
    for &threads in &args.threads {
        for &mmap in args.mmap.values() {
            for &summing in args.summing.values() {
                let setup = Setup {
                    threads: threads as usize,
                    processes: args.processes,
                    mmap,
                    summing,
                    time: Duration::from_secs_f64(args.seconds),
                };
                rows.extend(measure_cell(&contenders, setup, args.rounds)?);
            }
        }
    }
    Ok(rows)
}

fn measure_cell(
    contenders: &[(SubjectName, Box<dyn Contender>)],
    setup: Setup,
    rounds: u32,
) -> Result<Vec<Row>> {
    let mut outcomes: Vec<_> = contenders.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for ((name, contender), outcomes) in contenders.iter().zip(&mut outcomes) {
            let outcome = contender.run(setup).with_context(|| name.name())?;
            outcomes.push(outcome);
        }
    }
    let rows = contenders
        .iter()
        .zip(outcomes)
        .map(|((name, _), outcomes)| {
            let times: Vec<f64> = outcomes.iter().map(|outcome| outcome.ns_per_op).collect();
            let errors = outcomes.iter().map(|outcome| outcome.sum_error_max);
            Row {
                subject: *name,
                threads: setup.threads as u32,
                summing: setup.summing,
                mmap: setup.mmap,
                ns_per_op: median(&times),
                sum_error_max: errors.max().filter(|_| setup.summing),
                sums: outcomes.iter().map(|outcome| outcome.sums).sum(),
            }
        });
    Ok(rows.collect())
}
