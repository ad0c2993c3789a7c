//! Measures all cells of the tables. A cell is a scenario at a size. In each round of a cell, every
//! subject is measured once.

use super::subjects::SubjectName;
use super::{Plan, Row, Rows, Test, bulk};
use crate::figures::Progress;
use crate::machine::settle_index;
use crate::stats::median;
use crate::{Op, PinfoldCache, Pool, Scenario, at_depth, cache};
use anyhow::{Context, Result};
use pinfold_rseq::Backend;

/// Number of untimed passes before each timed one.
const WARMUP: u32 = 1;

/// The results, in the order of the tables.
pub struct Measured {
    pub plan: Plan,
    /// Number of threads in the scenarios for several threads.
    pub threads: usize,
    pub rows: Rows<SubjectName>,
}

/// Measures everything in `plan`.
pub fn measure(mut plan: Plan, progress: &Progress) -> Result<Measured> {
    settle_index();
    if pinfold_rseq::backend() == Backend::Atomic {
        let why = pinfold_rseq::missing();
        let note = format!("Pinfold and rseq run on atomics: restartable sequences are {why}.");
        plan.notes.push(note);
    }
    let pool = Pool::new(None, plan.calls, WARMUP)?;
    progress.begin(plan.cells() * plan.rounds as usize);
    let mut rows = Rows::default();
    for &test in &plan.tests {
        match test {
            Test::Of(scenario) => {
                for size in plan.sizes(scenario) {
                    cell(&plan, &pool, scenario, size, &mut rows, progress)?;
                }
            }
            Test::Bulk => rows.0.extend(bulk_rows(&plan, &pool)?),
        }
    }
    // Only medians are shown.
    rows.0.iter_mut().for_each(|row| row.rounds.clear());
    Ok(Measured {
        threads: pool.len(),
        plan,
        rows,
    })
}

/// Measures one cell. It makes its own subjects, so that idle objects of one cell do not take
/// memory from another.
fn cell(
    plan: &Plan,
    pool: &Pool,
    scenario: Scenario,
    size: usize,
    rows: &mut Rows<SubjectName>,
    progress: &Progress,
) -> Result<()> {
    let (test, threads) = (Test::Of(scenario), scenario.threads(pool.len()));
    let names = plan.subjects.iter().filter(|name| name.takes_part(test));
    let subjects = names.map(|&name| Ok((name, name.make(size)?)));
    let subjects = subjects.collect::<Result<Vec<_>>>()?;
    for round in 0..plan.rounds as usize {
        for (name, subject) in &subjects {
            let timings = subject.measure(scenario, pool, round);
            for timing in timings.with_context(|| name.name())? {
                rows.add(*name, test, size, timing, threads);
            }
        }
        progress.step();
    }
    Ok(())
}

fn bulk_rows(plan: &Plan, pool: &Pool) -> Result<Vec<Row<SubjectName>>> {
    let cache = PinfoldCache(cache(bulk::SIZE)?);
    let row = |batch| {
        let measure = || bulk::measure(&cache.0, batch, plan.calls);
        let rounds = 0..plan.rounds as usize;
        let rounds = pool.run(1, |_| -> (Vec<_>, Vec<_>) {
            rounds
                .clone()
                .map(|round| at_depth(&cache, round, measure))
                .map(|cycles| (cycles.bulk, cycles.single))
                .unzip()
        })?;
        let (bulk, single) = &rounds[0];
        Ok(Row {
            scenario: Test::Bulk,
            size: bulk::SIZE,
            op: Op::Pair,
            threads: 1,
            subject: SubjectName::PinfoldCache,
            batch: Some(batch),
            cycles: median(bulk),
            single_cycles: Some(median(single)),
            rounds: Vec::new(),
        })
    };
    bulk::BATCHES.into_iter().map(row).collect()
}
