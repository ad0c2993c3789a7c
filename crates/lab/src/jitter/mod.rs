//! `pinfold jitter`: Christoph Lameter's test for the kernel's vmstat shepherd, a loop that wants
//! its CPU for itself.

mod interrupts;
mod run;

use crate::Machine;
use crate::bench::seconds;
use crate::cpus;
use crate::figures::{Output, Plot, Progress, Series, Sheet};
use crate::output::{Table, figure};
use anyhow::{Context, Result, ensure};
use interrupts::Interrupts;
use pinfold::internal::topology_below;
use pinfold::topology::{CpuSet, Topology};
use run::{Gaps, Loop, Setup};
use serde::Serialize;
use std::process::ExitCode;
use std::time::Duration;

/// Measure how much a pinned loop notices when its counters are folded: not at all, on its own CPU,
/// or from another CPU by Pinfold
///
/// A loop pinned to one CPU counts and reads the clock. Folding adds what the CPU has counted to
/// the counter's total. Six setups take turns, so that other load on the machine affects all of
/// them alike: without folding (none); a worker thread on the loop's CPU folds every interval,
/// woken by the CPU's own timer, as in the kernel of 2013 (local-worker); Pinfold's background
/// thread, the shepherd, folds from another CPU (pinfold); the worker beside a loop that does not
/// count, so that there is nothing to fold (idle-local-worker); a worker that is woken only while
/// there is something to fold, beside the same loop (idle-on-demand); the first worker again, while
/// the counting loop has the real-time policy SCHED_FIFO, so that the worker cannot take its CPU
/// (fifo). The last needs the right to that policy, and is left out without it.
///
/// Columns: folds; context switches of the loop's thread, which show whatever else ran on its CPU;
/// interrupts of the CPU without its local timer; of these, the interrupts from other CPUs
/// (rescheduling, function calls, TLB shootdowns); interrupts of the local timer; the time between
/// two passes of the loop, in cycles: the median, the 99.9th percentile, the longest; and how many
/// more context switches a fold costs than no folding. docs/jitter.md explains more. The plot shows
/// the distribution of the times between passes.
#[derive(clap::Args)]
pub struct Args {
    /// The loop's CPU; by default the last isolated one that this process may use, or else the last
    /// one
    #[arg(long, value_name = "N")]
    cpu: Option<usize>,

    /// Seconds for each setup, at most a day
    #[arg(long, default_value_t = 60.0, allow_negative_numbers = true, value_parser = |text: &str| seconds(text, 86_400.0))]
    seconds: f64,

    /// Milliseconds between folds
    #[arg(long, default_value_t = 100, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    interval: u64,

    #[command(flatten)]
    output: Output,
}

crate::names! {
    /// The setup: which thread folds.
    enum SubjectName {
        None = "none",
        LocalWorker = "local-worker",
        Pinfold = "pinfold",
        IdleLocalWorker = "idle-local-worker",
        IdleOnDemand = "idle-on-demand",
        Fifo = "fifo",
    }
}

impl SubjectName {
    /// Returns whether the loop counts in this setup.
    fn counts(self) -> bool {
        !matches!(
            self,
            SubjectName::IdleLocalWorker | SubjectName::IdleOnDemand
        )
    }
}

/// The sums over a subject's slices.
#[derive(Clone, Copy, Default)]
struct Totals {
    interrupts: Interrupts,
    context_switches: u64,
    folds: u64,
    seconds: f64,
}

impl Totals {
    fn add(&mut self, slice: Totals) {
        self.interrupts.all += slice.interrupts.all;
        self.interrupts.timer += slice.interrupts.timer;
        self.interrupts.between_cpus += slice.interrupts.between_cpus;
        self.context_switches += slice.context_switches;
        self.folds += slice.folds;
        self.seconds += slice.seconds;
    }
}

#[derive(Serialize)]
struct Row {
    subject: SubjectName,
    cpu: usize,
    interval_ms: u64,
    seconds: f64,
    context_switches: u64,
    interrupts: u64,
    ipis: u64,
    timer_interrupts: u64,
    folds: u64,
    p50_cycles: u64,
    p999_cycles: u64,
    max_cycles: u64,
}

/// Measures what the arguments ask for, and prints or writes the results.
///
/// # Errors
///
/// Fails if something cannot be measured, or the results cannot be written.
pub fn main(args: Args) -> Result<ExitCode> {
    Sheet::deliver("jitter", &args.output, |progress| sheet(&args, progress))?;
    Ok(ExitCode::SUCCESS)
}

/// Measures what the arguments ask for. Prints nothing but notes and the progress.
pub fn sheet(args: &Args, progress: &Progress) -> Result<Sheet> {
    let (cpu, others) = choose_cpu(args.cpu)?;
    // Must run before `allow`: `Machine::read` counts the CPUs that this thread may use, and
    // `allow` removes the measured CPU from them.
    let machine = Machine::read();
    cpus::allow(&others)
        .with_context(|| format!("cannot move this thread off CPU {cpu}, which the loop needs"))?;
    let setup = Setup {
        cpu,
        others: &others,
        interval: Duration::from_millis(args.interval),
    };
    let Measured { rows, gaps, note } = measure(args, setup, progress)?;
    if let Some(note) = note {
        progress.note(&note);
    }
    Sheet::new("jitter", &machine, &rows, &text(&rows), plot(&rows, &gaps))
}

/// Returns the CPUs that the loop may use.
///
/// The kernel leaves isolated CPUs out of every process's affinity (`isolcpus=`), but lets a thread
/// move there. So they count too, unless the affinity also leaves out other CPUs: then the user has
/// chosen it.
fn for_the_loop(machine: &Topology) -> Result<CpuSet> {
    let in_cgroup = topology_below(b"/")
        .context("reading the machine's CPUs")?
        .allowed;
    let is_chosen = !in_cgroup
        .without(&machine.isolated)
        .without(&machine.allowed)
        .is_empty();
    Ok(match is_chosen {
        true => machine.allowed.clone(),
        false => in_cgroup,
    })
}

/// Returns the loop's CPU, and the CPUs for everything else.
fn choose_cpu(wanted: Option<usize>) -> Result<(usize, Vec<usize>)> {
    let machine = Topology::system().context("reading the machine's CPUs")?;
    let usable = for_the_loop(&machine)?;
    let last = |set: &CpuSet| set.iter().last();
    let isolated = usable.and(&machine.isolated);
    let default = last(&isolated).or_else(|| last(&usable));
    let cpu = wanted.or(default).context("this process may use no CPU")?;
    ensure!(
        usable.contains(cpu),
        "this process may not use CPU {cpu}; give one of {usable} to --cpu"
    );
    let others: Vec<usize> = machine
        .allowed
        .iter()
        .filter(|&other| other != cpu)
        .collect();
    ensure!(
        !others.is_empty(),
        "this process may use only CPU {cpu}, and the shepherd needs another; allow two (taskset, cpuset)"
    );
    Ok((cpu, others))
}

/// The results of the subjects that could be measured, in the same order.
struct Measured {
    rows: Vec<Row>,
    gaps: Vec<Gaps>,
    /// Which subject is left out, and why.
    note: Option<String>,
}

/// Measures slices of all subjects, interleaved.
fn measure(args: &Args, setup: Setup, progress: &Progress) -> Result<Measured> {
    let slices = (args.seconds / 5.0).ceil().max(2.0);
    let time = Duration::from_secs_f64(args.seconds / slices);
    let looping = Loop::start(setup.cpu, SubjectName::ALL.len())?;
    let note = looping.try_fifo().err().map(|why| {
        format!(
            "fifo is left out, because the loop may not have the policy SCHED_FIFO ({why}): run as \
             root, or allow the priority 1 (`ulimit -r 1`, CAP_SYS_NICE)"
        )
    });
    let mut subjects = SubjectName::ALL.to_vec();
    subjects.retain(|&subject| subject != SubjectName::Fifo || note.is_none());
    progress.begin(slices as usize * subjects.len());
    let mut totals = vec![Totals::default(); subjects.len()];
    let mut run = || {
        for _ in 0..slices as u64 {
            for (&subject, totals) in subjects.iter().zip(&mut totals) {
                totals.add(looping.slice(setup, subject, time)?);
                progress.step();
            }
        }
        Ok(())
    };
    let ran: Result<()> = run();
    let mut gaps = looping.end()?;
    ran?;
    gaps.truncate(subjects.len());
    let each = subjects.into_iter().zip(totals).zip(&gaps);
    let rows = each.map(|((subject, totals), gaps)| Row {
        subject,
        cpu: setup.cpu,
        interval_ms: args.interval,
        seconds: totals.seconds,
        context_switches: totals.context_switches,
        interrupts: totals.interrupts.all,
        ipis: totals.interrupts.between_cpus,
        timer_interrupts: totals.interrupts.timer,
        folds: totals.folds,
        p50_cycles: gaps.value_at_quantile(0.5),
        p999_cycles: gaps.value_at_quantile(0.999),
        max_cycles: gaps.max(),
    });
    Ok(Measured {
        rows: rows.collect(),
        gaps,
        note,
    })
}

fn text(rows: &[Row]) -> String {
    let none = &rows[0];
    let a_fold = |row: &Row| {
        let more = row.context_switches as f64 - none.context_switches as f64;
        figure((row.folds > 0).then(|| more / row.folds as f64), 2)
    };
    let table = Table::of(rows)
        .column("shepherd", |row| row.subject)
        .column("folds", |row| row.folds)
        .column("context switches", |row| row.context_switches)
        .column("interrupts", |row| row.interrupts)
        .column("from other CPUs", |row| row.ipis)
        .column("timer", |row| row.timer_interrupts)
        .column("median", |row| row.p50_cycles)
        .column("99.9 %", |row| row.p999_cycles)
        .column("longest", |row| row.max_cycles)
        .column("extra switches per fold", a_fold)
        .table();
    format!(
        "A loop on CPU {} for {:.0} s with each shepherd, folded every {} ms; times between passes in cycles.\n\n{table}",
        none.cpu, none.seconds, none.interval_ms,
    )
}

/// Returns whether two points fall on the same place in a picture with logarithmic axes.
fn is_close(one: (f64, f64), next: (f64, f64)) -> bool {
    let near = |one: f64, next: f64| (next / one).max(one / next) < 1.01;
    near(one.0, next.0) && near(one.1, next.1)
}

/// Draws the distribution of the longest passes: the share of passes that took longer, against
/// their length.
fn plot(rows: &[Row], gaps: &[Gaps]) -> Result<String> {
    let series = rows.iter().zip(gaps).map(|(row, gaps)| {
        let all = gaps.len().max(1) as f64;
        let mut longer = all;
        let mut points: Vec<(f64, f64)> = Vec::new();
        for bucket in gaps.iter_recorded() {
            longer -= bucket.count_at_value() as f64;
            let point = (bucket.value_iterated_to() as f64, longer.max(0.5) / all);
            // A picture cannot show the points between. There would be thousands.
            if points.last().is_none_or(|&last| !is_close(last, point)) {
                points.push(point);
            }
        }
        Series {
            name: row.subject.name().to_owned(),
            points,
        }
    });
    Plot {
        title: "Passes of a pinned loop while its counts are folded",
        x: "cycles",
        y: "share of all passes that took longer",
        log_x: true,
        log_y: true,
        series: series.collect(),
    }
    .svg()
}
