//! The slab command: measures all cells and subjects in rounds, then delivers the results.

use crate::args::SlabArgs;
use crate::child::{self, Child};
use crate::machine::Machine;
use crate::runner::{Cell, LARGEST_OF_MANY, Local, OBJECTS, Runner};
use crate::subjects::SubjectName;
use crate::summary;
use anyhow::{Result, ensure};
use pinfold_lab::Pool;
use pinfold_lab::bench::slab::{self, Test, draw, side_by_side, slab_test};
use pinfold_lab::stats::{self, distinct, turns};
use serde::Deserialize;
use std::rc::Rc;

/// The results of all subjects.
pub type Rows = slab::Rows<SubjectName>;

/// Measures as `args` say, and delivers the results.
pub fn run(args: &SlabArgs) -> Result<()> {
    let pool = args.setup.pool()?;
    let cells = cells(args, pool.len());
    ensure!(
        !cells.is_empty(),
        "nothing is left to measure; the notes above say what was left out and why"
    );
    let mut runners = start_all(args, &pool, &cells)?;

    let mut rows = Rows::default();
    for round in 0..args.rounds as usize {
        for &cell in &cells {
            let threads = cell.scenario.threads(pool.len());
            for place in turns(runners.len(), round) {
                let (subject, runner) = &mut runners[place];
                if !subject.has_size(cell.size) {
                    continue;
                }
                for timing in runner.measure(cell)? {
                    let test = Test::Of(cell.scenario);
                    rows.add(*subject, test, cell.size, timing, threads);
                }
            }
        }
    }
    drop(runners);

    (args.output).deliver("slab", &Machine::read(), &rows.0, || text(&rows, args))
}

/// Formats slab_test's tables for Pinfold, then all subjects side by side, then the summary.
fn text(rows: &Rows, args: &SlabArgs) -> String {
    let (rounds, warmup) = (args.rounds, args.setup.warmup);
    let mut text = format!(
        "Medians of {rounds} rounds, {warmup} untimed pass(es) before each; cycles are ticks of the counter.\n"
    );
    text += &slab_test(
        rows,
        SubjectName::PinfoldCache,
        "a KmemCache, inlined",
        OBJECTS,
    );
    text += &slab_test(rows, SubjectName::PinfoldMalloc, "malloc and free", OBJECTS);
    text += &side_by_side(rows, &rows.subjects());
    if rows.0.iter().any(|row| stats::is_doubtful(&row.rounds)) {
        text = text + "\n" + stats::DOUBTFUL;
    }
    text + &summary::text(rows)
}

/// A file that `--save` wrote.
#[derive(Deserialize)]
struct Saved {
    rows: Rows,
}

/// Draws the figures of a saved file, whose text is `run`.
pub fn plot_saved(run: &str) -> Result<String> {
    let saved: Saved = serde_json::from_str(run)?;
    draw(&saved.rows)
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
            if size > LARGEST_OF_MANY && !scenario.is_pair() {
                let name = scenario.name();
                eprintln!(
                    "note: {name} is left out at {size} bytes: its objects need too much memory"
                );
                continue;
            }
            cells.push(Cell { scenario, size });
        }
    }
    cells
}

type Named = (SubjectName, Box<dyn Runner>);

/// Makes a runner for each subject. Leaves out a subject whose process is not what its name says,
/// with a note.
fn start_all(args: &SlabArgs, pool: &Rc<Pool>, cells: &[Cell]) -> Result<Vec<Named>> {
    let mut runners: Vec<Named> = Vec::new();
    for subject in distinct(args.subjects.iter().flat_map(|group| group.0.clone())) {
        let Some(&first) = cells.iter().find(|cell| subject.has_size(cell.size)) else {
            eprintln!("note: {subject} is left out: it has no objects of these sizes");
            continue;
        };
        if !subject.needs_process() {
            child::ensure_environment(subject)?;
            runners.push((subject, Box::new(Local::new(subject, pool))));
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
