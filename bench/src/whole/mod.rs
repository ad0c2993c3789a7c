//! The whole command: runs complete programs on each allocator by LD_PRELOAD, and measures their
//! time and memory.
//!
//! 1. [`prepare`] makes what a run needs in a cache folder: shared libraries, loads, input.
//! 2. [`launch`] runs one program once under one subject.
//! 3. [`rows`] takes the medians of the rounds. [`table`] shows them.

mod input;
pub mod launch;
pub mod prepare;
pub mod programs;
pub mod redis;
pub mod rows;
pub mod subjects;
pub mod table;

use crate::args::{WholeArgs, WholeSetup};
use crate::machine::Machine;
use anyhow::{Result, ensure};
use launch::Sample;
use pinfold_lab::stats::turns;
use prepare::Cache;
use programs::Program;
use serde::Deserialize;
use std::collections::HashMap;
use std::process::ExitCode;
use subjects::Subject;

/// The parameters of every run.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Number of threads of a load that has several.
    pub threads: u32,
    /// Seconds after which a program is killed.
    pub limit: u32,
    /// Seconds that a load stays after its work, for its settled memory.
    pub settle: f64,
}

/// All results of one program under one subject: a sample for each round, or the reason for the
/// failure.
pub type Results = Result<Vec<Sample>, String>;

/// What is needed to run programs under subjects.
pub struct Prepared {
    pub cache: Cache,
    pub programs: Vec<Program>,
    pub subjects: Vec<Subject>,
    pub settings: Settings,
}

/// Prepares the programs that `names` ask for, and the subjects. Leaves out what it cannot prepare,
/// with notes.
pub fn prepare(names: &[String], setup: &WholeSetup, settle: f64) -> Result<Prepared> {
    let programs = programs::choose(names)?;
    let (cache, subjects) = subjects::open(&setup.preloaded)?;
    let programs = prepare::programs(&cache, programs);
    ensure!(
        !programs.is_empty() && !subjects.is_empty(),
        "nothing is left to measure; the notes above say what was left out and why"
    );
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let settings = Settings {
        threads: setup.threads.unwrap_or(cpus as u32),
        limit: setup.limit,
        settle,
    };
    Ok(Prepared {
        cache,
        programs,
        subjects,
        settings,
    })
}

/// Measures as `args` say, and delivers the results. The exit status is a failure if a program
/// failed under Pinfold.
pub fn run(args: &WholeArgs) -> Result<ExitCode> {
    if args.libraries {
        let (_, subjects) = subjects::open(&args.setup.preloaded)?;
        let line = |one: &Subject| format!("{} {}\n", one.name, one.library.display());
        pinfold_lab::output::print(&subjects.iter().map(line).collect::<String>())?;
        return Ok(ExitCode::SUCCESS);
    }
    let rounds = args.setup.rounds;
    let Prepared {
        cache,
        programs,
        subjects,
        settings,
    } = prepare(&args.programs, &args.setup, args.settle)?;
    let results = measure(&cache, &programs, &subjects, settings, rounds);
    let rows = rows::all(&programs, &subjects, settings.threads, &results);
    let text = || table::text(&rows, rounds);
    (args.output).deliver("whole", &Machine::read(), &rows, text)?;
    let failed = rows.iter().any(|row| row.is_pinfold && row.error.is_some());
    Ok(ExitCode::from(u8::from(failed)))
}

/// A file that `--save` or `--json` wrote.
#[derive(Deserialize)]
struct Saved {
    rows: Vec<SavedRow>,
}

#[derive(Deserialize)]
struct SavedRow {
    subject: String,
    program: String,
    seconds: Option<f64>,
    peak_rss_bytes: Option<u64>,
}

/// Draws the figures of a saved file, whose text is `run`.
pub fn plot_saved(run: &str) -> Result<String> {
    let saved: Saved = serde_json::from_str(run)?;
    ensure!(
        saved.rows.iter().any(|row| row.subject == rows::BASE),
        "a plot shows ratios to {0}: measure with {0} among --subjects",
        rows::BASE
    );
    let rows = saved.rows.into_iter().map(|row| rows::Row {
        subject: row.subject,
        // The process ends after the plot.
        program: row.program.leak(),
        seconds: row.seconds,
        peak_rss_bytes: row.peak_rss_bytes,
        ..rows::Row::default()
    });
    table::plot(&rows.collect::<Vec<_>>())
}

/// Runs every program under every subject, `rounds` times. Subjects take turns within a round.
fn measure(
    cache: &Cache,
    programs: &[Program],
    subjects: &[Subject],
    settings: Settings,
    rounds: u32,
) -> HashMap<(usize, usize), Results> {
    let mut results: HashMap<_, Results> = HashMap::new();
    for round in 0..rounds {
        // Memory settles alike in every round, so only the first round waits for it.
        let settle = if round == 0 { settings.settle } else { 0.0 };
        for (at, program) in programs.iter().enumerate() {
            eprintln!("round {}/{rounds}: {}", round + 1, program.name);
            for which in turns(subjects.len(), round as usize) {
                let so_far = results.entry((at, which)).or_insert(Ok(Vec::new()));
                let Ok(samples) = so_far else { continue };
                let settings = Settings { settle, ..settings };
                match launch::once(cache, program, &subjects[which], settings) {
                    Ok(sample) => samples.push(sample),
                    Err(error) => *so_far = Err(format!("{error:#}")),
                }
            }
        }
    }
    results
}
