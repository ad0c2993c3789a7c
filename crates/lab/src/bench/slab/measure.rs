//! Measures all cells of the tables. A cell is a scenario at a size. In each round of a cell, every
//! subject is measured once.

use super::subjects::{Measurable, SubjectName};
use super::{Plan, Row, Test, bulk};
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
    pub rows: Vec<Row>,
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
    let mut rows = Vec::new();
    for &test in &plan.tests {
        match test {
            Test::Of(scenario) => {
                for size in plan.sizes(scenario) {
                    rows.extend(cell(&plan, &pool, scenario, size, progress)?);
                }
            }
            Test::Bulk => rows.extend(bulk_rows(&plan, &pool)?),
        }
    }
    Ok(Measured {
        threads: pool.len(),
        plan,
        rows,
    })
}

/// A subject within a cell.
struct Contender {
    name: SubjectName,
    subject: Box<dyn Measurable>,
    /// The samples by operation, one for each round.
    samples: Vec<(Op, Vec<f64>)>,
}

impl Contender {
    fn new(name: SubjectName, size: usize) -> Result<Contender> {
        Ok(Contender {
            name,
            subject: name.make(size)?,
            samples: Vec::new(),
        })
    }

    fn record(&mut self, op: Op, cycles: f64) {
        match self.samples.iter_mut().find(|samples| samples.0 == op) {
            Some((_, samples)) => samples.push(cycles),
            None => self.samples.push((op, vec![cycles])),
        }
    }
}

/// Measures one cell. It makes its own subjects, so that idle objects of one cell do not take
/// memory from another.
fn cell(
    plan: &Plan,
    pool: &Pool,
    scenario: Scenario,
    size: usize,
    progress: &Progress,
) -> Result<Vec<Row>> {
    let names = plan.subjects.iter();
    let contenders = names.filter(|name| name.takes_part(Test::Of(scenario)));
    let contenders = contenders.map(|&name| Contender::new(name, size));
    let mut contenders = contenders.collect::<Result<Vec<_>>>()?;
    for round in 0..plan.rounds as usize {
        for contender in &mut contenders {
            let timings = contender.subject.measure(scenario, pool, round);
            for timing in timings.with_context(|| contender.name.name())? {
                contender.record(timing.op, timing.cycles);
            }
        }
        progress.step();
    }
    let rows = contenders.iter().flat_map(|contender| {
        contender.samples.iter().map(move |(op, samples)| Row {
            scenario: Test::Of(scenario),
            size,
            op: *op,
            threads: scenario.threads(pool.len()),
            subject: contender.name,
            batch: None,
            cycles: median(samples),
            single_cycles: None,
        })
    });
    Ok(rows.collect())
}

fn bulk_rows(plan: &Plan, pool: &Pool) -> Result<Vec<Row>> {
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
        })
    };
    bulk::BATCHES.into_iter().map(row).collect()
}
