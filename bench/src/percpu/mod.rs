//! The percpu command: what operations on per-CPU data cost, beside the same critical sections in
//! C.
//!
//! All subjects take turns in every round, and each round begins with another subject, so that
//! other load on the machine affects all alike.

mod handles;
mod subjects;

use crate::args::PercpuArgs;
use crate::machine::Machine;
use anyhow::{Result, ensure};
use pinfold_lab::machine::settle_index;
use pinfold_lab::output::{Table, figure};
use pinfold_lab::{Pool, cpus, cycles, stats};
use serde::Serialize;
use subjects::{OPERATIONS, Subject, TURNS};

/// Number of loops in a figure of one round.
const LOOPS: u32 = 64;
/// How often a loop may run again because another index came between.
const TRIES: usize = 100;
/// The most that Pinfold may take, relative to the same section in C.
const LIMIT: f64 = 1.05;

/// One result.
#[derive(Clone, Debug, Serialize)]
struct Row {
    subject: &'static str,
    op: &'static str,
    /// The median of the rounds.
    cycles: f64,
    /// The cycles divided by those of the subject that this one is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    /// How many threads run the operation at once, if the row is of the table of handles.
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<usize>,
    rounds: Vec<f64>,
}

/// A subject, and the number of the subject that it is compared with.
struct Entry {
    name: &'static str,
    subject: &'static Subject,
    beside: Option<usize>,
}

/// Measures as `args` say, and delivers the results.
pub fn run(args: &PercpuArgs) -> Result<()> {
    settle_index();
    // Before this thread is pinned, because the pool's threads take the CPUs that it may use.
    let pool = Pool::new(Some(2), 1, 0)?;
    cpus::pin(cpus::current()?)?;
    // The first operation of Pinfold chooses the backend, which the sections in C follow.
    subjects::PINFOLD.reset();
    let entry = |name, subject, beside| Entry {
        name,
        subject,
        beside,
    };
    let mut entries = vec![entry("pinfold", &subjects::PINFOLD, None)];
    match subjects::in_c() {
        Ok([inlined, pinfold, called]) => {
            entries[0].beside = Some(1);
            entries.push(entry("sections", inlined, None));
            entries.push(entry("pinfold-c", pinfold, Some(3)));
            entries.push(entry("sections-called", called, None));
        }
        Err(why) => eprintln!("left out: the sections in C: {why}"),
    }
    let mut rows = measure(&entries, args.rounds)?;
    let operations = rows.len();
    rows.extend(handles::measure(&pool, args.rounds)?);
    let (of_operations, of_handles) = rows.split_at(operations);
    let text = || text(&entries, of_operations, args.rounds) + &handles::text(of_handles);
    (args.output).deliver("percpu", &Machine::read(), &rows, text)
}

fn measure(entries: &[Entry], rounds: u32) -> Result<Vec<Row>> {
    let mut figures = vec![[const { Vec::new() }; OPERATIONS.len()]; entries.len()];
    for round in 0..=rounds as usize {
        for turn in 0..entries.len() {
            let at = (round + turn) % entries.len();
            let once = once(&entries[at])?;
            // The first round only touches memory and trains the branch predictor.
            if round > 0 {
                for (all, one) in figures[at].iter_mut().zip(once) {
                    all.push(one);
                }
            }
        }
    }
    let median = |at: usize, op: usize| stats::median(&figures[at][op]);
    let mut rows = Vec::new();
    for (op, name) in OPERATIONS.into_iter().enumerate() {
        for (at, entry) in entries.iter().enumerate() {
            rows.push(Row {
                subject: entry.name,
                op: name,
                cycles: rounded(median(at, op)),
                ratio: (entry.beside).map(|other| rounded(median(at, op) / median(other, op))),
                threads: None,
                rounds: figures[at][op].clone(),
            });
        }
    }
    Ok(rows)
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Returns the cycles of each operation of a subject.
fn once(entry: &Entry) -> Result<[f64; OPERATIONS.len()]> {
    let mut cycles = [0; OPERATIONS.len()];
    for _ in 0..LOOPS {
        for (op, cycles) in cycles.iter_mut().enumerate() {
            *cycles += right(entry, op)?;
        }
    }
    Ok(cycles.map(|cycles| cycles as f64 / f64::from(LOOPS * TURNS)))
}

/// Returns the cycles of a loop whose results were right.
///
/// Another thread of the process may take this thread's concurrency id for a moment. The thread
/// then works on another copy, and the results are wrong.
fn right(entry: &Entry, op: usize) -> Result<u64> {
    let mut wrong = 0;
    for _ in 0..TRIES {
        entry.subject.reset();
        let cycles = cycles::of(|| wrong = entry.subject.run(op));
        if wrong == 0 {
            return Ok(cycles);
        }
        // A list that was popped elsewhere keeps its items, so another try would lose them.
        ensure!(
            !OPERATIONS[op].starts_with("list"),
            "{} lost items",
            entry.name
        );
    }
    let (name, op) = (entry.name, OPERATIONS[op]);
    anyhow::bail!("{name}: {wrong} of {TURNS} results of {op} were wrong, {TRIES} times in turn")
}

fn text(entries: &[Entry], rows: &[Row], rounds: u32) -> String {
    let mut table = Table::of(rows.chunks(entries.len())).column("", |row| row[0].op);
    for (at, entry) in entries.iter().enumerate() {
        table = table.column(entry.name, |row| {
            stats::marked(row[at].cycles, 2, &row[at].rounds)
        });
        if entry.beside.is_some() {
            table = table.column("ratio", |row| figure(row[at].ratio, 3));
        }
    }
    let table = table.table();
    let mut text =
        format!("cycles per operation on this CPU's copy: medians of {rounds} rounds\n{table}");
    for entry in entries {
        let Some(other) = entry.beside else { continue };
        let of = rows.iter().filter(|row| row.subject == entry.name);
        let (mut above, mut ratios) = (Vec::new(), Vec::new());
        for row in of {
            let ratio = row.ratio.unwrap_or(f64::NAN);
            ratios.push(ratio);
            if ratio > LIMIT {
                above.push(row.op);
            }
        }
        let mean = stats::geometric_mean(&ratios);
        let (name, other) = (entry.name, entries[other].name);
        let verdict = match above.is_empty() {
            true => format!("none above {LIMIT}"),
            false => format!("above {LIMIT}: {}", above.join(", ")),
        };
        text += &format!("{name} / {other}: {mean:.3} on average, {verdict}\n");
    }
    text
}
