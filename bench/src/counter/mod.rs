//! The counter command: what adding and summing cost, alone and against each other, and how much
//! memory counters need.
//!
//! All subjects take turns in every round, and each round begins with another subject, so that
//! other load on the machine affects all alike. Times of adds are CPU times: time spent waiting for
//! a CPU does not count.

mod goals;
pub mod memory;
mod pass;
mod print;
mod rows;
mod runner;
pub mod subjects;

use crate::args::CounterArgs;
use crate::machine::Machine;
use anyhow::Result;
use pass::{Pass, SPREAD};
use pinfold_lab::cpus;
use pinfold_lab::machine::settle_index;
use pinfold_lab::stats::distinct;
use rows::{Op, Row};
use runner::{Plan, Runner};
use std::time::{Duration, Instant};
use subjects::Name;

/// Number of shards of a sum that is compared with [`ADDS_AGAINST_A_SUM`] adds.
const SHARDS_AGAINST_ADDS: usize = 8;
/// Number of atomic adds that a sum is compared with.
const ADDS_AGAINST_A_SUM: usize = 16;
/// The subject's name in the row of these adds.
const SIXTEEN_ADDS: &str = "atomic-own-16-adds";
const MIN_ROUNDS: usize = 5;

pub struct Measured {
    pub machine: Machine,
    pub subjects: Vec<Name>,
    pub threads: Vec<usize>,
    /// Number of CPUs that this process may use.
    pub cpus: usize,
    /// Number of shards of each of Pinfold's counters.
    pub shards: usize,
    /// Number of threads that added while another one summed.
    pub adders_beside_a_summer: usize,
    pub rows: Vec<Row>,
}

/// Measures as `args` say, and delivers the results.
pub fn run(args: &CounterArgs) -> Result<()> {
    settle_index();
    let measured = measure(args)?;
    print::missing(&measured);
    let text = || print::text(&measured);
    (args.output).deliver("counter", &measured.machine, &measured.rows, text)
}

fn measure(args: &CounterArgs) -> Result<Measured> {
    let cpus = cpus::allowed()?;
    let subjects = distinct(args.subjects.iter().copied());
    let threads = distinct(args.threads.iter().map(|&threads| threads as usize));
    let shards = pinfold_rseq::possible();
    let plan = Plan {
        threads: threads.iter().copied().fold(cpus.len(), usize::max),
        shards: SHARDS_AGAINST_ADDS,
        pinfold_counters: SHARDS_AGAINST_ADDS.div_ceil(shards),
    };
    let mut bench = Bench {
        runners: (subjects.iter())
            .map(|&name| Ok((name, runner::new(name, plan, &cpus)?)))
            .collect::<Result<_>>()?,
        plan,
        shards,
        cpus,
        args,
        rows: Vec::new(),
    };
    let adders_beside_a_summer = bench.cpus.len() - 1;
    // The adds get more than half of the time, because most goals depend on them.
    bench.rounds(0.6, |bench, round| bench.adds(round, &threads))?;
    if adders_beside_a_summer > 0 {
        bench.rounds(0.3, |bench, round| {
            bench.adds_beside_a_summer(round, adders_beside_a_summer)
        })?;
    }
    bench.sums_pinned()?;
    let (mut rows, cpus) = (bench.rows, bench.cpus.len());
    let machine = Machine::read();
    for row in &mut rows {
        row.settle(machine.facts.tsc_hz as f64);
    }
    rows.extend(memory::rows(&subjects, args.counters, cpus)?);
    rows.extend(goals::rows(&rows, &threads));
    Ok(Measured {
        machine,
        subjects,
        threads,
        cpus,
        shards,
        adders_beside_a_summer,
        rows,
    })
}

struct Bench<'a> {
    runners: Vec<(Name, Box<dyn Runner>)>,
    plan: Plan,
    shards: usize,
    cpus: Vec<usize>,
    args: &'a CounterArgs,
    rows: Vec<Row>,
}

impl Bench<'_> {
    /// Makes rounds until `share` of the time is over.
    fn rounds(
        &mut self,
        share: f64,
        mut round: impl FnMut(&mut Self, usize) -> Result<()>,
    ) -> Result<()> {
        let time = Duration::from_secs(u64::from(self.args.seconds)).mul_f64(share);
        let start = Instant::now();
        let mut number = 0;
        while number < MIN_ROUNDS || start.elapsed() < time {
            round(self, number)?;
            number += 1;
        }
        Ok(())
    }

    /// Returns the subjects in this round's order.
    fn turns(&self, round: usize) -> impl Iterator<Item = usize> + use<> {
        let count = self.runners.len();
        (0..count).map(move |at| (at + round) % count)
    }

    fn adds(&mut self, round: usize, threads: &[usize]) -> Result<()> {
        for &threads in threads {
            for at in self.turns(round) {
                let pass = Pass {
                    threads,
                    adds: self.args.adds.next_multiple_of(SPREAD as u32),
                    summing: false,
                };
                self.pass(at, pass, None, false)?;
                // `ThreadLocal` has only one count per thread. More threads than CPUs would add no
                // information.
                if threads <= self.cpus.len() && self.runners[at].0 != Name::ThreadLocal {
                    self.pass(at, pass, None, true)?;
                }
            }
        }
        Ok(())
    }

    fn adds_beside_a_summer(&mut self, round: usize, threads: usize) -> Result<()> {
        for at in self.turns(round) {
            // Another thread cannot sum a thread's own count.
            if self.runners[at].0 == Name::ThreadLocal {
                continue;
            }
            for summing in [false, true] {
                let pass = Pass {
                    threads,
                    adds: self.args.adds.next_multiple_of(SPREAD as u32),
                    summing,
                };
                self.pass(at, pass, Some(summing), false)?;
            }
        }
        Ok(())
    }

    fn pass(&mut self, at: usize, pass: Pass, summing: Option<bool>, spread: bool) -> Result<()> {
        let (name, runner) = &self.runners[at];
        let ns = runner.pass(pass, spread, &self.cpus)?;
        let mut row = Row::new(name.name(), Op::Add);
        row.counters = Some(if spread { SPREAD } else { 1 });
        (row.threads, row.summing) = (Some(pass.threads), summing);
        self.add(row, ns);
        Ok(())
    }

    /// Measures the sums on one CPU. Allows all CPUs again afterwards, because new threads inherit
    /// the pinning.
    fn sums_pinned(&mut self) -> Result<()> {
        let before = self.cpus.clone();
        cpus::pin(before[0])?;
        let result = self.rounds(0.1, |bench, round| {
            bench.sums(round);
            Ok(())
        });
        cpus::allow(&before)?;
        result
    }

    fn sums(&mut self, round: usize) {
        self.add(Row::new(SIXTEEN_ADDS, Op::Sum), runner::sixteen_adds());
        for at in self.turns(round) {
            let (name, runner) = &self.runners[at];
            let (counters, shards) = match name {
                Name::PinfoldEvent | Name::Pinfold | Name::Vmstat => (
                    self.plan.pinfold_counters,
                    self.plan.pinfold_counters * self.shards,
                ),
                Name::FastTelemetry | Name::FastCounter => (1, self.plan.shards),
                _ => continue,
            };
            let mut row = Row::new(name.name(), Op::Sum);
            (row.counters, row.shards) = (Some(counters), Some(shards));
            let cycles = runner.sums();
            self.add(row, cycles);
        }
    }

    /// Adds a round's value to the row that has the same key as `new`.
    fn add(&mut self, new: Row, value: f64) {
        let key = |row: &Row| (row.subject, row.op, row.threads, row.counters, row.summing);
        let known = self.rows.iter().position(|row| key(row) == key(&new));
        let at = known.unwrap_or_else(|| {
            self.rows.push(new);
            self.rows.len() - 1
        });
        self.rows[at].rounds.push(value);
    }
}
