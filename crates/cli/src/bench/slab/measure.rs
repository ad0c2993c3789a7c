//! Measures all cells of the tables. A cell is a scenario at a size. In each round of a cell, every
//! subject is measured once.

use super::crew::Crew;
use super::scenarios::{Op, Scenario, at_depth};
use super::subjects::{Inlined, Measurable, SubjectName, cache};
use super::{Plan, Row, bulk};
use crate::figures::median;
use anyhow::{Context, Result};
use pinfold_rseq::Backend;

/// The results, in the order of the tables.
pub struct Measured {
    pub plan: Plan,
    /// Number of threads in the scenarios for several threads.
    pub threads: usize,
    pub rows: Vec<Row>,
}

/// Measures everything in `plan`, on this thread and others. Pins this thread.
pub fn measure(mut plan: Plan) -> Result<Measured> {
    crate::bench::settle_index();
    if pinfold_rseq::backend() == Backend::Atomic {
        let why = pinfold_rseq::missing();
        let note = format!("Pinfold and rseq run on atomics: restartable sequences are {why}.");
        plan.notes.push(note);
    }
    let crew = Crew::new(plan.calls)?;
    let mut rows = Vec::new();
    for &scenario in &plan.scenarios {
        if scenario == Scenario::Bulk {
            rows.extend(bulk_rows(&plan)?);
            continue;
        }
        for size in plan.sizes(scenario) {
            rows.extend(cell(&plan, &crew, scenario, size)?);
        }
    }
    Ok(Measured {
        threads: crew.len(),
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
fn cell(plan: &Plan, crew: &Crew, scenario: Scenario, size: usize) -> Result<Vec<Row>> {
    let names = plan.subjects.iter();
    let contenders = names.filter(|name| name.takes_part(scenario));
    let contenders = contenders.map(|&name| Contender::new(name, size));
    let mut contenders = contenders.collect::<Result<Vec<_>>>()?;
    for round in 0..plan.rounds as usize {
        for contender in &mut contenders {
            let timings = contender.subject.measure(scenario, crew, round);
            for timing in timings.with_context(|| contender.name.name())? {
                contender.record(timing.op, timing.cycles);
            }
        }
    }
    let rows = contenders.iter().flat_map(|contender| {
        contender.samples.iter().map(move |(op, samples)| Row {
            scenario,
            size,
            op: *op,
            threads: scenario.threads(crew),
            subject: contender.name,
            batch: None,
            cycles: median(samples),
            single_cycles: None,
        })
    });
    Ok(rows.collect())
}

fn bulk_rows(plan: &Plan) -> Result<Vec<Row>> {
    let cache = Inlined(cache(bulk::SIZE)?);
    let row = |batch| {
        let rounds = (0..plan.rounds as usize)
            .map(|round| at_depth(&cache, round, || bulk::measure(&cache.0, batch, plan.calls)));
        let (bulk, single): (Vec<_>, Vec<_>) =
            rounds.map(|cycles| (cycles.bulk, cycles.single)).unzip();
        Row {
            scenario: Scenario::Bulk,
            size: bulk::SIZE,
            op: Op::Pair,
            threads: 1,
            subject: SubjectName::PinfoldCache,
            batch: Some(batch),
            cycles: median(&bulk),
            single_cycles: Some(median(&single)),
        }
    };
    Ok(bulk::BATCHES.into_iter().map(row).collect())
}
