//! `pinfold bench vmstat`: cycles per increment of a zone item, as Christoph Lameter measured them
//! for the kernel in 2007. Signals take the place of interrupts.

mod cmpxchg;
mod locked;
mod masked_signals;
mod pinfold;
mod storm;
mod subject;
mod zone;

use crate::figures::{self, Bars, Machine, Series, Table};
use anyhow::{Result, bail};
use pinfold_benchkit::cpus;
use pinfold_benchkit::machine::settle_index;
use pinfold_benchkit::stats::median;
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use storm::Storm;
use subject::{Measurable, Named};

/// The least duration of a round with signals. One short loop would get at most one signal.
const STORM: Duration = Duration::from_millis(1);

/// Measure cycles per increment of a counter in five ways: with a lock, masked signals,
/// compare-exchange, and Pinfold's two
///
/// Subjects: locked (a spinlock per CPU), masked-signals (pthread_sigmask around the increment; to
/// a thread, masked signals are what disabled interrupts are to a CPU), cmpxchg (a locked
/// compare-exchange on the CPU's difference), rseq (an item of Pinfold's VmStat), event (Pinfold's
/// EventCounter, which has no zones, and whose reads visit every CPU). One pinned thread is
/// measured.
///
/// Each subject is also measured while a timer interrupts the thread 20,000 times a second with a
/// signal, whose handler increments the same item. These loops take a millisecond, and their cycles
/// include the signals. Afterwards every total must equal the number of increments.
#[derive(clap::Args)]
pub struct Args {
    /// Number of times each loop is measured, all subjects in turns
    #[arg(long, default_value_t = 101, allow_negative_numbers = true, value_parser = super::at_least_one)]
    rounds: u32,

    /// Number of increments in a loop
    #[arg(long, default_value_t = 10_000, allow_negative_numbers = true, value_parser = super::at_least_one)]
    calls: u32,

    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,

    /// Draw the medians into this SVG file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

#[derive(Serialize)]
struct Row {
    subject: &'static str,
    /// Whether signals interrupted the loops.
    signals: bool,
    /// The median of the rounds.
    cycles: f64,
    /// The least of all rounds.
    min_cycles: f64,
}

/// The results of all rounds.
struct Measured {
    rows: Vec<Row>,
    /// Number of increments by handlers, over all subjects.
    handled: i64,
}

pub fn main(args: &Args) -> Result<()> {
    if let Some(file) = &args.plot {
        figures::check_writable(file)?;
    }
    let measured = super::on_own_thread(|| measure(args.rounds, args.calls))?;
    if args.json {
        figures::json("vmstat", &measured.rows)?;
    } else {
        figures::print(&report(args, &measured))?;
    }
    match &args.plot {
        Some(file) => bars(&measured.rows).write(file),
        None => Ok(()),
    }
}

/// One subject's cycles per call, one sample for each round.
struct Samples {
    quiet: Vec<f64>,
    stormy: Vec<f64>,
}

fn measure(rounds: u32, calls: u32) -> Result<Measured> {
    settle_index();
    cpus::pin(cpus::current()?)?;
    let storm = Storm::new()?;
    let subjects = subject::all();
    let mut samples = [(); 5].map(|()| Samples {
        quiet: Vec::new(),
        stormy: Vec::new(),
    });
    let (mut handled, mut made) = (0, [0; 5]);
    // Round 0 warms up.
    for round in 0..=rounds {
        for (at, Named { subject, .. }) in subjects.iter().enumerate() {
            let quiet = loops(subject.as_ref(), calls, Duration::ZERO);
            let work = || loops(subject.as_ref(), calls, STORM);
            let (stormy, by_handlers) = storm.over(subject.as_ref(), round, work)?;
            if round > 0 {
                samples[at].quiet.push(quiet.cycles_per_call());
                samples[at].stormy.push(stormy.cycles_per_call());
            }
            handled += by_handlers;
            made[at] += quiet.calls + stormy.calls + by_handlers;
        }
    }
    for (Named { name, subject }, made) in subjects.iter().zip(made) {
        check_total(name, subject.total(), made)?;
    }
    let rows = subjects.iter().zip(&samples).flat_map(|(named, samples)| {
        [(false, &samples.quiet), (true, &samples.stormy)]
            .map(|(signals, samples)| row(named.name, signals, samples))
    });
    Ok(Measured {
        rows: rows.collect(),
        handled,
    })
}

/// The cycles and increments of one subject's loops.
#[derive(Default)]
struct Loops {
    cycles: u64,
    calls: i64,
}

impl Loops {
    fn cycles_per_call(&self) -> f64 {
        self.cycles as f64 / self.calls as f64
    }
}

/// Runs one loop, and more loops until `time` is over.
fn loops(subject: &dyn Measurable, calls: u32, time: Duration) -> Loops {
    let start = Instant::now();
    let mut loops = Loops::default();
    loop {
        loops.cycles += subject.cycles(calls);
        loops.calls += i64::from(calls);
        if start.elapsed() >= time {
            return loops;
        }
    }
}

fn check_total(name: &str, total: Option<i64>, made: i64) -> Result<()> {
    match total {
        Some(total) if total == made => Ok(()),
        Some(total) => bail!(
            "{name} counted {total} after {made} increments, so its figures are not valid; please report this"
        ),
        None => bail!(
            "{name}'s total for the zone differs from its total for all zones; please report this"
        ),
    }
}

fn row(subject: &'static str, signals: bool, samples: &[f64]) -> Row {
    Row {
        subject,
        signals,
        cycles: median(samples),
        min_cycles: samples.iter().copied().fold(f64::INFINITY, f64::min),
    }
}

fn report(args: &Args, measured: &Measured) -> String {
    let mut table = Table::new([
        "subject",
        "cycles per call",
        "least",
        "with signals",
        "least",
    ]);
    for pair in measured.rows.chunks_exact(2) {
        let figure = |value: f64| format!("{value:.1}");
        table.row([
            format!("{} x {}", args.calls, pair[0].subject),
            figure(pair[0].cycles),
            figure(pair[0].min_cycles),
            figure(pair[1].cycles),
            figure(pair[1].min_cycles),
        ]);
    }
    format!(
        "{}\nMedians of {}. All totals agree with the number of increments, {} of them made by signal handlers.\n\n{table}",
        Machine::read().describe(),
        figures::rounds(args.rounds),
        measured.handled,
    )
}

fn bars(rows: &[Row]) -> Bars<'static> {
    let series = |name: &str, signals: bool| {
        let rows = rows.iter().filter(|row| row.signals == signals);
        Series {
            name: name.to_owned(),
            points: (rows.enumerate())
                .map(|(key, row)| (key as f64, row.cycles))
                .collect(),
        }
    };
    let keys = rows.iter().filter(|row| !row.signals);
    Bars {
        title: "An increment of a zone item",
        y: "cycles per call, median",
        log_y: true,
        keys: keys.map(|row| row.subject.to_owned()).collect(),
        series: vec![series("quiet", false), series("with signals", true)],
    }
}
