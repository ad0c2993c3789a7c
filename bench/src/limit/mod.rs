//! The limit command: how far each allocator is from the least time and memory that any allocator
//! could need for a program.
//!
//! For each program:
//!
//! 1. [`replay`] runs the program under a recorder, which writes down its calls. [`recording`]
//!    reads them.
//! 2. [`plan`] computes an address for each object. It knows all sizes and lifetimes. [`packed`]
//!    and [`slots`] are two ways to choose addresses.
//! 3. [`replay`] runs the program under an oracle, which hands out these addresses and does nothing
//!    else. A program whose calls differ from run to run has only the allocator without bookkeeping
//!    instead (`bench/limit/lists.c`). The fastest time is the floor. The subjects run in the same
//!    rounds.
//! 4. [`rows`] divides each subject's time by the floor, and its heap's memory by the peak of live
//!    bytes. [`table`] shows the ratios.
//!
//! `bench/limit/record.c` and `oracle.c` are the libraries; both say at their beginning how they
//! work.

mod packed;
mod plan;
mod recording;
mod replay;
mod rows;
mod slots;
mod table;
#[cfg(test)]
mod tests;

use crate::args::LimitArgs;
use crate::machine::Machine;
use crate::whole::launch;
use crate::whole::prepare::Cache;
use crate::whole::programs::Program;
use crate::whole::rows as whole_rows;
use crate::whole::subjects::Subject;
use crate::whole::{Prepared, Results, Settings, prepare};
use anyhow::Result;
use pinfold_lab::stats::turns;
use replay::{Libraries, Oracle, Recorded, Served};
use rows::Row;
use std::collections::HashMap;
use std::process::ExitCode;

pub use table::plot_saved;

/// Measures as `args` say, and delivers the results. The exit status is a failure if a program
/// failed under Pinfold.
pub fn run(args: &LimitArgs) -> Result<ExitCode> {
    let rounds = args.setup.rounds;
    let Prepared {
        cache,
        programs,
        subjects,
        settings,
    } = prepare(&args.programs, &args.setup, 0.0)?;
    let libraries = Libraries::prepare(&cache)?;
    let mut rows = Vec::new();
    for program in &programs {
        eprintln!("{}: recording", program.name);
        let recorded = replay::record(&cache, &libraries, program, settings)?;
        rows.extend(measure(
            &cache, program, &subjects, settings, rounds, &recorded,
        ));
    }
    let text = || table::text(&rows, rounds);
    (args.output).deliver("limit", &Machine::read(), &rows, text)?;
    let failed = rows.iter().any(|row| row.is_pinfold && row.error.is_some());
    Ok(ExitCode::from(u8::from(failed)))
}

/// Runs a program `rounds` times under every subject and every oracle, which take turns.
fn measure(
    cache: &Cache,
    program: &Program,
    subjects: &[Subject],
    settings: Settings,
    rounds: u32,
    recorded: &Recorded,
) -> Vec<Row> {
    let oracles = &recorded.oracles;
    let all: Vec<_> = (subjects.iter())
        .chain(oracles.iter().map(|oracle| &oracle.subject))
        .cloned()
        .collect();
    let mut served: Vec<Vec<Served>> = vec![Vec::new(); oracles.len()];
    let mut results: HashMap<_, Results> = HashMap::new();
    for round in 0..rounds {
        eprintln!("{}: round {}/{rounds}", program.name, round + 1);
        for which in turns(all.len(), round as usize) {
            let so_far = results.entry((0, which)).or_insert(Ok(Vec::new()));
            let Ok(samples) = so_far else { continue };
            let is_off_plan = |at: usize| {
                let mut served = served[at].iter();
                served.any(|one| one.share < rows::MIN_SHARE)
            };
            // An oracle that has left its plan gives no floor.
            if which.checked_sub(subjects.len()).is_some_and(is_off_plan) {
                continue;
            }
            let sample = match which.checked_sub(subjects.len()) {
                None => launch::once(cache, program, &all[which], settings),
                Some(at) => (oracles[at].once(cache, program, settings, recorded.allocations)).map(
                    |(sample, report)| {
                        served[at].push(report);
                        sample
                    },
                ),
            };
            match sample {
                Ok(sample) => samples.push(sample),
                Err(error) => *so_far = Err(format!("{error:#}")),
            }
        }
    }
    recorded.remove();
    let programs = std::slice::from_ref(program);
    let mut rows = whole_rows::all(programs, &all, settings.threads, &results);
    let replays = rows.split_off(subjects.len());
    let names: Vec<_> = oracles.iter().map(Oracle::name).collect();
    rows::all(program, rows, recorded, &replays, &names, &served)
}
