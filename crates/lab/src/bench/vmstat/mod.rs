//! `pinfold bench vmstat`: cycles per change of a zone item, as Christoph Lameter measured them for
//! the kernel in 2007. Signals take the place of interrupts.

mod both;
mod items;
mod peers;
#[cfg(target_arch = "x86_64")]
mod sections;
mod storm;
mod subject;
mod zone;

use crate::Machine;
use crate::cpus;
use crate::figures::{Bars, Output, Progress, Series, Sheet, rounds};
use crate::machine::settle_index;
use crate::output::{Table, figure};
use crate::stats::{distinct, median};
use anyhow::{Result, bail};
use serde::Serialize;
use std::time::{Duration, Instant};
use storm::Storm;
use subject::{Measurable, Named, Op};

/// The least duration of a round with signals. One short loop would get at most one signal.
const STORM: Duration = Duration::from_millis(1);

/// The name under which a program finds the `EventCounter` of the subject `rseq`.
const EVENT: &str = "event";

/// Measure cycles per change of a counter: unprotected, with a lock, masked signals,
/// compare-exchange, and restartable sequences
///
/// Subjects: unprotected (plain loads and stores of a word; what the others take beyond it is the
/// cost of their protection), unprotected-byte (the same with a byte), locked (a spinlock per CPU),
/// masked-signals (pthread_sigmask around the change; to a thread, masked signals are what disabled
/// interrupts are to a CPU), cmpxchg (a locked compare-exchange on the CPU's difference),
/// rseq-cmpxchg (the compare-exchange without a lock prefix, in a critical section), rseq-inc-check
/// (one increment of memory in a critical section, and the test behind it), rseq (an item of
/// Pinfold's VmStat, and its EventCounter), rseq-called (the same by calls of the C API).
///
/// rseq-cmpxchg and rseq-inc-check need x86-64 and restartable sequences. One pinned thread is
/// measured.
///
/// With --json, the subject event repeats rseq's count_vm_event.
///
/// Columns: inc_zone and dec_zone change an item of a zone, count_vm_event counts an event, which
/// has no zones, and whose reads visit every CPU. In the row "unprotected", inc_zone and dec_zone
/// are the kernel's __inc_zone and __dec_zone.
///
/// A second table increments 1, 4 and 16 items in turn, as unprotected bytes that share a cache
/// line, and as items of a VmStat, which take 32 bytes each.
///
/// A third table increments 1, 4 and 16 items after a buffer of 8 MiB has displaced them from the
/// caches: packed 1, 8, 16 and 32 bytes apart by plain code, and as items of a VmStat. It shows
/// what the width of an item costs a program whose other data fills the caches. Its rows
/// cold-cmpxchg and cold-inc-check are the two sections.
///
/// A fourth table increments 1, 4 and 16 items whose lines another CPU has read. In a fifth one two
/// CPUs increment one item at the same time, beside one atomic for both. The last one adds to two
/// counts: by two locked adds, by two sections, and by one section (EventPair).
///
/// Each subject but the unprotected ones is also measured while a timer interrupts the thread
/// 20,000 times a second with a signal, whose handler makes the same change. These loops take a
/// millisecond, and their cycles include the signals. Afterwards every total must equal the number
/// of changes.
#[derive(clap::Args)]
pub struct Args {
    /// Number of times each loop is measured, subjects interleaved
    #[arg(long, default_value_t = 101, allow_negative_numbers = true, value_parser = super::at_least_one)]
    rounds: u32,

    /// Number of changes in a loop
    #[arg(long, default_value_t = 10_000, allow_negative_numbers = true, value_parser = super::at_least_one)]
    calls: u32,

    #[command(flatten)]
    output: Output,
}

#[derive(Serialize)]
struct Row {
    subject: &'static str,
    op: Op,
    /// The number of items that took turns.
    items: usize,
    /// Whether signals interrupted the loops.
    signals: bool,
    /// The number of CPUs that made changes at the same time.
    cpus: usize,
    /// The median of the rounds.
    cycles: f64,
    /// The least of all rounds.
    min_cycles: f64,
}

impl Row {
    fn new(subject: &'static str, op: Op, items: usize, signals: bool, samples: &[f64]) -> Row {
        Row {
            subject,
            op,
            items,
            signals,
            cpus: 1,
            cycles: median(samples),
            min_cycles: samples.iter().copied().fold(f64::INFINITY, f64::min),
        }
    }
}

/// The results of all rounds.
struct Measured {
    rows: Vec<Row>,
    /// Increments of several items in turn, by subject and number of items.
    in_turn: items::Rows,
    /// Increments of items that were displaced from the caches, by form and number of items.
    displaced: items::Rows,
    /// Increments of items whose lines another CPU has read.
    read_elsewhere: items::Rows,
    /// Increments of one item by two CPUs.
    by_cpus: Vec<Row>,
    /// Adds to two counts.
    pairs: Vec<Row>,
    /// Number of changes by handlers, over all subjects.
    handled: i64,
}

pub fn main(args: &Args) -> Result<()> {
    Sheet::deliver("vmstat", &args.output, |progress| sheet(args, progress))
}

/// Measures what the arguments ask for. Prints and writes nothing but the progress.
pub fn sheet(args: &Args, progress: &Progress) -> Result<Sheet> {
    let measured = super::on_own_thread(|| measure(args.rounds, args.calls, progress))?;
    // The rows of one item are there already.
    let in_turn = measured.in_turn.iter().flatten();
    let in_turn = in_turn.filter(|row| row.items > 1);
    let lines = measured.displaced.iter().chain(&measured.read_elsewhere);
    let rows = measured.rows.iter().chain(in_turn).chain(lines.flatten());
    let rows: Vec<_> = rows
        .chain(&measured.by_cpus)
        .chain(&measured.pairs)
        .collect();
    let (text, picture) = (report(args, &measured), bars(&measured.rows).svg());
    Sheet::new("vmstat", &Machine::read(), &rows, &text, picture)
}

/// Measured cycles and counted changes of one subject.
#[derive(Default)]
struct Samples {
    /// Cycles per call without signals, by operation. One sample for each round.
    quiet: [Vec<f64>; 3],
    /// The same with signals.
    stormy: [Vec<f64>; 3],
    /// The number of changes, by operation.
    made: [i64; 3],
    /// The number of changes by handlers.
    handled: i64,
}

impl Samples {
    /// Measures each operation once without signals and once with signals.
    fn round(
        &mut self,
        subject: &dyn Measurable,
        storm: &Storm,
        round: u32,
        calls: u32,
    ) -> Result<()> {
        for (at, op) in Op::ALL.into_iter().enumerate() {
            let quiet = loops(subject, op, calls, Duration::ZERO);
            self.quiet[at].push(quiet.cycles_per_call());
            self.made[at] += quiet.calls;
            if subject.bears_signals() {
                let work = || loops(subject, op, calls, STORM);
                let (stormy, by_handlers) = storm.over(subject, op, round, work)?;
                self.stormy[at].push(stormy.cycles_per_call());
                self.made[at] += stormy.calls + by_handlers;
                self.handled += by_handlers;
            }
        }
        Ok(())
    }

    fn forget_times(&mut self) {
        self.quiet
            .iter_mut()
            .chain(&mut self.stormy)
            .for_each(Vec::clear);
    }

    /// Fails unless the subject's totals equal the number of changes.
    fn check(&self, (name, subject): &Named) -> Result<()> {
        let [incs, decs, events] = self.made;
        match subject.total() {
            Some(total) if total == incs - decs && subject.events() == events => Ok(()),
            Some(total) => bail!(
                "{name} counted {total} after {incs} increments and {decs} decrements, and {} of {events} events, so its figures are not valid; please report this",
                subject.events(),
            ),
            None => bail!(
                "{name}'s total for the zone differs from its total for all zones; please report this"
            ),
        }
    }

    /// Returns a row for each operation, without signals and with signals.
    fn rows(&self, subject: &'static str) -> impl Iterator<Item = Row> {
        Op::ALL.into_iter().enumerate().flat_map(move |(at, op)| {
            let both = [(false, &self.quiet[at]), (true, &self.stormy[at])];
            let measured = both.into_iter().filter(|(_, samples)| !samples.is_empty());
            measured.map(move |(signals, samples)| Row::new(subject, op, 1, signals, samples))
        })
    }
}

fn measure(rounds: u32, calls: u32, progress: &Progress) -> Result<Measured> {
    settle_index();
    let (here, allowed) = (cpus::current()?, cpus::allowed()?);
    let elsewhere = allowed.into_iter().find(|cpu| *cpu != here);
    cpus::pin(here)?;
    let storm = Storm::new()?;
    let subjects = subject::all();
    let mut samples: Vec<_> = subjects.iter().map(|_| Samples::default()).collect();
    progress.begin(rounds as usize + 1);
    for round in 0..=rounds {
        for ((_, subject), samples) in subjects.iter().zip(&mut samples) {
            samples.round(subject.as_ref(), &storm, round, calls)?;
            // Round 0 warms up. Its changes count for the totals.
            if round == 0 {
                samples.forget_times();
            }
        }
        progress.step();
    }
    let mut measured = Measured {
        rows: Vec::new(),
        in_turn: items::measure_in_turn(rounds, calls)?,
        displaced: items::measure_displaced(rounds)?,
        read_elsewhere: elsewhere.map_or(Ok(items::Rows::new()), |cpu| {
            items::measure_read_elsewhere(rounds, cpu)
        })?,
        by_cpus: Vec::new(),
        pairs: both::measure_pairs(rounds, calls)?,
        handled: 0,
    };
    for (named, samples) in subjects.iter().zip(&samples) {
        samples.check(named)?;
        measured.rows.extend(samples.rows(named.0));
        if named.0 == "rseq" {
            let events = samples.rows(EVENT).filter_map(event_alone);
            measured.rows.extend(events);
        }
        measured.handled += samples.handled;
    }
    if let Some(cpu) = elsewhere {
        measured.by_cpus = both::measure_cpus(rounds, calls, [here, cpu])?;
    }
    Ok(measured)
}

/// Returns the row of an `EventCounter`, whose only change is its increment.
fn event_alone(row: Row) -> Option<Row> {
    let op = Op::Inc;
    (row.op == Op::Event).then_some(Row { op, ..row })
}

/// The cycles and changes of one subject's loops.
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
fn loops(subject: &dyn Measurable, op: Op, calls: u32, time: Duration) -> Loops {
    let start = Instant::now();
    let mut loops = Loops::default();
    loop {
        loops.cycles += subject.cycles(op, calls);
        loops.calls += i64::from(calls);
        if start.elapsed() >= time {
            return loops;
        }
    }
}

fn report(args: &Args, measured: &Measured) -> String {
    let cycles = |subject: &str, op: Op, signals: bool| {
        let found = (measured.rows.iter())
            .find(|row| row.subject == subject && row.op == op && row.signals == signals);
        found.map(|row| row.cycles)
    };
    let plain = cycles("unprotected", Op::Inc, false);
    let quiet = |subject, op| figure(cycles(subject, op, false), 1);
    let protection = |subject: &str| {
        let protected = !subject.starts_with("unprotected");
        let beyond = cycles(subject, Op::Inc, false).filter(|_| protected);
        figure(beyond.zip(plain).map(|(cycles, plain)| cycles - plain), 1)
    };
    let table = Table::of(subjects(&measured.rows))
        .column("cycles per call", |subject| {
            format!("{} x {subject}", args.calls)
        })
        .column("inc_zone", |subject| quiet(subject, Op::Inc))
        .column("dec_zone", |subject| quiet(subject, Op::Dec))
        .column("count_vm_event", |subject| quiet(subject, Op::Event))
        .column("protection", protection)
        .column("inc_zone with signals", |subject| {
            figure(cycles(subject, Op::Inc, true), 1)
        })
        .table();
    let mut text = format!(
        "Medians of {}. All totals agree with the number of changes, {} of them made by signal handlers.\nprotection: inc_zone beyond that of the row \"unprotected\".\n\n{table}",
        rounds(args.rounds),
        measured.handled,
    );
    let more = [
        items("inc_zone of several items in turn", &measured.in_turn),
        items(
            "inc_zone of displaced items, one after the other",
            &measured.displaced,
        ),
        items(
            "inc_zone of items that another CPU has read",
            &measured.read_elsewhere,
        ),
        cycles_of("inc_zone by two CPUs at once", &measured.by_cpus),
        cycles_of("adds to two counts", &measured.pairs),
    ];
    // Two of them need another CPU.
    for table in more.iter().filter(|table| !table.is_empty()) {
        text += &format!("\n{table}");
    }
    text
}

/// Returns a table of increments of several items.
fn items(heading: &str, rows: &items::Rows) -> Table {
    let mut table = Table::of(rows).column(heading, |row| row[0].subject);
    for (at, items) in items::ITEMS.into_iter().enumerate() {
        table = table.column(items, |row| format!("{:.1}", row[at].cycles));
    }
    table.table()
}

/// Returns a table of the rows' cycles.
fn cycles_of(heading: &str, rows: &[Row]) -> Table {
    Table::of(rows)
        .column(heading, |row| row.subject)
        .column("cycles", |row| format!("{:.1}", row.cycles))
        .table()
}

/// Returns each subject's name once, in the order of the rows, without [`EVENT`].
fn subjects(rows: &[Row]) -> Vec<&'static str> {
    let names = rows.iter().map(|row| row.subject);
    distinct(names.filter(|name| *name != EVENT))
}

fn bars(rows: &[Row]) -> Bars<'static> {
    let subjects = subjects(rows);
    let series = |(name, op, signals): (&str, Op, bool)| Series {
        name: name.to_owned(),
        points: (rows.iter())
            .filter(|row| row.op == op && row.signals == signals)
            .filter_map(|row| {
                let key = subjects.iter().position(|name| *name == row.subject)?;
                Some((key as f64, row.cycles))
            })
            .collect(),
    };
    let all = [
        ("inc_zone", Op::Inc, false),
        ("dec_zone", Op::Dec, false),
        ("count_vm_event", Op::Event, false),
        ("inc_zone with signals", Op::Inc, true),
    ];
    Bars {
        title: "A change of a zone item",
        y: "cycles per call, median",
        log_y: true,
        series: all.map(series).into(),
        keys: subjects.iter().map(|name| (*name).to_owned()).collect(),
    }
}
