//! `pinfold bench counter`: the benchmark of the 2011 discussion between Shaohua Li and Eric
//! Dumazet about scaling the kernel's percpu_counter. It measures the designs that they proposed
//! and Pinfold's counters.

mod designs;
mod hand_over;
mod percpu;
mod report;
mod run;
mod shared;
mod truth;
pub(super) mod workers;

use super::seconds;
use crate::Machine;
use crate::figures::{Output, Progress, Sheet};
use crate::machine::settle_index;
use crate::stats::median;
use anyhow::{Context, Result, ensure};
use pinfold_rseq::Index;
use run::{Contender, Outcome, Setup, contender};
use serde::Serialize;
use std::time::Duration;
use workers::Wave;

/// Measure a shared page counter around mmap and munmap, in the designs proposed for the kernel
///
/// Each worker loops: add a mapping's pages to the counter, map that much, unmap it, subtract the
/// pages. If the amount is below the batch, a worker adds two batches before it subtracts them, so
/// that the adds reach the shared count. Without `--mmap`, it makes at least 64 adds before it
/// subtracts. The figures are nanoseconds for an add with its
/// subtraction: the time of the run, and the CPU time in the program (user) and in the kernel
/// (sys), divided by the pairs of all workers. With `--summing yes`, one more thread sums the
/// counter all the time. The error of a sum is its distance, in pages, from the values that the
/// counter can have had while the sum ran. After each run the counter must be 0.
///
/// With `--hand-over`, the workers form pairs: one worker adds, and the other one then subtracts
/// the same amount on another CPU. So the counter is always between 0 and one amount for each pair.
/// The pairs sleep after every 64 hand-overs, so compare the user column. The error column shows
/// whose sums are exact.
///
/// Subjects on locked instructions: spinlock-batch (percpu_counter before the patches: a spinlock
/// around the shared count), slowcount (Eric Dumazet's patch), add-start (Shaohua Li's reply),
/// add-start-percpu (the same with the per-CPU add_start that the reply proposes). On restartable
/// sequences, which cost what the kernel's this_cpu operations cost: spinlock-rseq (percpu_counter
/// again), total-rseq (an atomic shared count), overstep-rseq (the same, and a fold leaves half a
/// batch on the other side), pinfold-batch (Pinfold's PerCpuCounter). All have the same batch.
/// Atomic (one atomic integer) has none. Beside them stands pinfold: a PerCpuCounter that chooses
/// its batch itself, and whose cheap reads may be off by 64 mappings per CPU. Its workers add two
/// of its own batches. The column `bound` says how far a cheap read may be off. `-` means that it
/// has no bound, because a preempted thread may hold an amount. With `--processes` the designs on
/// sequences are left out, and pinfold-shared takes Pinfold's place: counters in shared memory,
/// which have no batch. The plot has bars, or lines if several numbers of workers are given.
#[derive(clap::Args)]
pub struct Args {
    /// Number of workers; several numbers, separated by commas, are measured one after the other
    #[arg(long, default_value = "16", allow_negative_numbers = true, value_delimiter = ',', value_parser = threads)]
    threads: Vec<u32>,

    /// Make the workers processes that share the counter, as in 2011: as many as given here, or as
    /// --threads says. Pinfold then counts in shared memory
    #[arg(long, num_args = 0..=1, value_name = "NUMBER", allow_negative_numbers = true, value_parser = threads)]
    processes: Option<Option<u32>>,

    /// Pages per add, and per mapping; several numbers, separated by commas, are measured one after
    /// the other
    #[arg(long, default_value = "32768,8", allow_negative_numbers = true, value_delimiter = ',', value_parser = amount)]
    amount: Vec<u32>,

    /// How far a CPU's value may go before it is added to the shared count [default: the kernel's,
    /// 32 or twice the number of CPUs]
    #[arg(long, allow_negative_numbers = true, value_parser = batch)]
    batch: Option<u32>,

    /// Seconds of each run
    #[arg(long, default_value_t = 0.3, allow_negative_numbers = true, value_parser = |text: &str| seconds(text, 3600.0))]
    seconds: f64,

    /// Number of runs of each subject, interleaved; times are medians, errors are maxima
    #[arg(long, default_value_t = 3, allow_negative_numbers = true, value_parser = super::at_least_one)]
    rounds: u32,

    /// Whether workers map and unmap memory between the adds
    #[arg(long, value_enum, default_value_t = Choice::Both)]
    mmap: Choice,

    /// Let the workers of a pair take turns: one adds, and the other one subtracts. Without mmap
    #[arg(long)]
    hand_over: bool,

    /// Whether one more thread sums the counter
    #[arg(long, value_enum, default_value_t = Choice::Both)]
    summing: Choice,

    /// Measure only these subjects, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', value_name = "SUBJECT")]
    subject: Vec<SubjectName>,

    #[command(flatten)]
    output: Output,
}

impl Args {
    /// Returns the numbers of workers.
    fn workers(&self) -> &[u32] {
        match &self.processes {
            Some(Some(processes)) => std::slice::from_ref(processes),
            _ => &self.threads,
        }
    }
}

crate::names! {
    /// The measured designs, in the order of the tables.
    enum SubjectName {
        SpinlockBatch = "spinlock-batch",
        Slowcount = "slowcount",
        AddStart = "add-start",
        AddStartPercpu = "add-start-percpu",
        SpinlockRseq = "spinlock-rseq",
        TotalRseq = "total-rseq",
        OverstepRseq = "overstep-rseq",
        Atomic = "atomic",
        PinfoldBatch = "pinfold-batch",
        Pinfold = "pinfold",
        PinfoldShared = "pinfold-shared",
    }
}

impl SubjectName {
    /// Returns whether the design has the batch that the command chose.
    fn has_batch(self) -> bool {
        !matches!(
            self,
            SubjectName::Atomic | SubjectName::Pinfold | SubjectName::PinfoldShared
        )
    }

    /// Returns whether the design can count in memory shared by processes.
    fn is_shareable(self) -> bool {
        use SubjectName::{OverstepRseq, Pinfold, PinfoldBatch, SpinlockRseq, TotalRseq};
        !matches!(
            self,
            Pinfold | PinfoldBatch | SpinlockRseq | TotalRseq | OverstepRseq
        )
    }

    /// Returns the batch that this design's adds must reach, if the command's is `batch`.
    fn batch_to_reach(self, batch: i64) -> i64 {
        match self {
            SubjectName::Pinfold => designs::largest_batch(),
            _ => batch,
        }
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
    /// Whether the workers were processes.
    processes: bool,
    amount: u32,
    /// `None` for a subject without a batch of the command's.
    batch: Option<u32>,
    summing: bool,
    mmap: bool,
    /// Whether one worker of a pair added, and the other one subtracted.
    hand_over: bool,
    /// The time of the run divided by the adds of all workers that have their subtraction: the
    /// median of the rounds.
    ns_per_op: f64,
    /// The CPU time in the program and in the kernel, divided in the same way.
    user_ns_per_op: f64,
    sys_ns_per_op: f64,
    /// In pages. `None` without a summing thread.
    sum_error_max: Option<u64>,
    /// How far a cheap read may be off, in pages. `None` for a design without a bound.
    error_bound: Option<u64>,
    /// Number of sums behind `sum_error_max`.
    #[serde(skip)]
    sums: u64,
}

fn threads(text: &str) -> Result<u32, String> {
    super::count(text, 4096)
}

fn amount(text: &str) -> Result<u32, String> {
    super::count(text, 1 << 24)
}

fn batch(text: &str) -> Result<u32, String> {
    super::count(text, percpu::MAX_BATCH as u32)
}

pub fn main(args: &Args) -> Result<()> {
    Sheet::deliver("counter", &args.output, |progress| sheet(args, progress))
}

/// Measures what the arguments ask for. Prints and writes nothing but the progress.
pub fn sheet(args: &Args, progress: &Progress) -> Result<Sheet> {
    let subjects = subjects(args)?;
    check_hand_over(args)?;
    if args.processes.is_some() {
        // Concurrency ids are per process: two processes on two CPUs could use the same one.
        pinfold_rseq::init(Index::Cpu);
    } else {
        settle_index();
    }
    let rows = measure(args, &subjects, progress)?;
    let (text, picture) = (report::text(args, &rows), report::plot(args, &rows));
    Sheet::new("counter", &Machine::read(), &rows, &text, picture)
}

fn subjects(args: &Args) -> Result<Vec<SubjectName>> {
    let asked = |name: &SubjectName| args.subject.is_empty() || args.subject.contains(name);
    let mut subjects: Vec<_> = SubjectName::ALL.into_iter().filter(asked).collect();
    if args.subject.is_empty() && args.processes.is_none() {
        subjects.retain(|name| *name != SubjectName::PinfoldShared);
    }
    if args.processes.is_some() {
        let own = args.subject.iter().find(|name| !name.is_shareable());
        ensure!(
            own.is_none(),
            "{} counts in one process only; leave out --processes, or name pinfold-shared",
            own.map_or("", |name| name.name())
        );
        subjects.retain(|name| name.is_shareable());
    }
    Ok(subjects)
}

/// Refuses what `--hand-over` cannot do.
fn check_hand_over(args: &Args) -> Result<()> {
    let odd = args.workers().iter().find(|workers| *workers % 2 != 0);
    ensure!(
        !args.hand_over || odd.is_none(),
        "--hand-over needs pairs of workers; give an even number instead of {}",
        odd.unwrap_or(&0)
    );
    ensure!(
        !args.hand_over || !matches!(args.mmap, Choice::Yes),
        "--hand-over maps no memory; leave out --mmap yes"
    );
    Ok(())
}

/// Measures all requested combinations. Within one, each subject runs once per round.
fn measure(args: &Args, subjects: &[SubjectName], progress: &Progress) -> Result<Vec<Row>> {
    let batch = args.batch.map_or_else(percpu::kernel_batch, i64::from);
    let made = subjects
        .iter()
        .map(|&name| Ok((name, contender(name, batch)?)));
    let contenders = made.collect::<Result<Vec<_>>>()?;
    let mut cells = Vec::new();
    let mmap = if args.hand_over {
        Choice::No
    } else {
        args.mmap
    };
    for &threads in args.workers() {
        for &amount in &args.amount {
            for &mmap in mmap.values() {
                for &summing in args.summing.values() {
                    cells.push(Setup {
                        threads: threads as usize,
                        processes: args.processes.is_some(),
                        mmap,
                        hand_over: args.hand_over,
                        summing,
                        time: Duration::from_secs_f64(args.seconds),
                        wave: match args.hand_over {
                            true => Wave::hand_over(i64::from(amount)),
                            false => Wave::new(i64::from(amount), batch, mmap),
                        },
                    });
                }
            }
        }
    }
    progress.begin(cells.len() * args.rounds as usize * contenders.len());
    let each = cells.into_iter().map(|setup| {
        let batch = batch as u32;
        measure_cell(&contenders, setup, batch, args.rounds, progress)
    });
    Ok(each.collect::<Result<Vec<_>>>()?.concat())
}

fn measure_cell(
    contenders: &[(SubjectName, Contender)],
    setup: Setup,
    batch: u32,
    rounds: u32,
    progress: &Progress,
) -> Result<Vec<Row>> {
    let mut outcomes: Vec<_> = contenders.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for ((name, contender), outcomes) in contenders.iter().zip(&mut outcomes) {
            let wave = match setup.hand_over {
                true => setup.wave,
                false => Wave::new(
                    setup.wave.amount,
                    name.batch_to_reach(i64::from(batch)),
                    setup.mmap,
                ),
            };
            let outcome = contender(Setup { wave, ..setup }).with_context(|| name.name())?;
            outcomes.push(outcome);
            progress.step();
        }
    }
    let rows = contenders
        .iter()
        .zip(outcomes)
        .map(|((name, _), outcomes)| {
            let middle = |figure: fn(&Outcome) -> f64| {
                median(&outcomes.iter().map(figure).collect::<Vec<_>>())
            };
            let errors = outcomes.iter().map(|outcome| outcome.sum_error_max);
            Row {
                subject: *name,
                threads: setup.threads as u32,
                processes: setup.processes,
                amount: setup.wave.amount as u32,
                batch: name.has_batch().then_some(batch),
                summing: setup.summing,
                mmap: setup.mmap,
                hand_over: setup.hand_over,
                ns_per_op: middle(|outcome| outcome.ns_per_op),
                user_ns_per_op: middle(|outcome| outcome.user_ns_per_op),
                sys_ns_per_op: middle(|outcome| outcome.sys_ns_per_op),
                sum_error_max: errors.max().filter(|_| setup.summing),
                error_bound: outcomes
                    .iter()
                    .filter_map(|outcome| outcome.error_bound)
                    .max(),
                sums: outcomes.iter().map(|outcome| outcome.sums).sum(),
            }
        });
    Ok(rows.collect())
}
