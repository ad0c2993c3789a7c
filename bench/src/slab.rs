//! The slab command: measures all cells and subjects in rounds, then prints the results.

use crate::args::SlabArgs;
use crate::child::{self, Child};
use crate::machine::Machine;
use crate::report;
use crate::rows::{self, Row, Rows};
use crate::runner::{self, Cell, Runner};
use crate::subjects::SubjectName;
use anyhow::{Result, ensure};
use pinfold_lab::{Pool, Scenario};
use std::rc::Rc;

/// Measures as `args` say, and prints the result.
pub fn run(args: &SlabArgs) -> Result<()> {
    let pool = args.setup.pool()?;
    let cells = cells(args, pool.len());
    ensure!(
        !cells.is_empty(),
        "nothing is left to measure; the notes above say what was left out and why"
    );
    let mut runners = start_all(args, &pool, cells[0])?;

    let mut rows = Rows::new();
    for round in 0..args.rounds as usize {
        for &cell in &cells {
            let threads = cell.scenario.threads(pool.len());
            // Each round begins with another subject and reverses the order of the round before, so
            // that what one subject leaves in the caches does not always affect the same other one.
            let count = runners.len();
            for turn in 0..count {
                let place = match round % 2 {
                    0 => (round + turn) % count,
                    _ => (round + count - turn) % count,
                };
                let (subject, runner) = &mut runners[place];
                for timing in runner.measure(cell)? {
                    rows.add(*subject, cell, timing, threads);
                }
            }
        }
    }
    drop(runners);

    let machine = Machine::read();
    machine.warn();
    if args.save {
        let path = rows::save("slab", &machine, rows.rows())?;
        eprintln!("saved: {}", path.display());
    }
    if args.json {
        let medians: Vec<_> = rows.rows().iter().map(Row::without_rounds).collect();
        rows::print_json("slab", &machine, &medians)
    } else {
        report::print(&machine, &rows, args);
        Ok(())
    }
}

/// Returns the cells in the order of measurement.
fn cells(args: &SlabArgs, workers: usize) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &scenario in &args.scenario {
        if workers < scenario.least_threads() {
            let (name, least) = (scenario.name(), scenario.least_threads());
            eprintln!("note: {name} is left out: it needs {least} CPUs");
            continue;
        }
        for &size in &args.sizes {
            let size = size as usize;
            cells.push(Cell { scenario, size });
        }
    }
    cells
}

type Named = (SubjectName, Box<dyn Runner>);

/// Makes a runner for each subject. Leaves out a subject whose process is not what its name says,
/// with a note.
fn start_all(args: &SlabArgs, pool: &Rc<Pool>, first: Cell) -> Result<Vec<Named>> {
    let mut runners: Vec<Named> = Vec::new();
    for &subject in &args.subjects {
        if runners.iter().any(|(other, _)| *other == subject) {
            continue;
        }
        if subject.environment().is_none() {
            child::ensure_environment(subject)?;
            runners.push((subject, runner::local(subject, pool)));
            continue;
        }
        let mut child = Child::start(subject, args.setup)?;
        match child.ask(first) {
            Ok(_) => runners.push((subject, Box::new(child))),
            Err(error) => eprintln!("note: {subject} is left out: {error:#}"),
        }
    }
    Ok(runners)
}

/// Returns the scenarios among `rows`, each once, in their order of declaration.
pub fn scenarios(rows: &Rows) -> Vec<Scenario> {
    let mut scenarios: Vec<_> = rows.rows().iter().map(|row| row.scenario).collect();
    scenarios.sort_unstable();
    scenarios.dedup();
    scenarios
}
