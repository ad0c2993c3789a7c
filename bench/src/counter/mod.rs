//! The counter command: what adding and summing cost, alone and against each other, and what many counters occupy.
//!
//! All subjects take turns in every round, beginning with another one each time, so that whatever else the machine does
//! meets all alike. Times of adds are CPU times: a thread that waits for a CPU does not count.

mod goals;
pub mod memory;
mod pass;
mod print;
mod rows;
mod runner;
pub mod subjects;

use crate::args::CounterArgs;
use crate::machine::Machine;
use crate::pool::{allowed_cpus, pin};
use anyhow::Result;
use pass::{Pass, SPREAD};
use pinfold::counter::EventCounter;
use rows::{Op, Row};
use runner::{Plan, Runner};
use std::time::{Duration, Instant};
use subjects::Name;

/// A sum of so many shards
const SHARDS_AGAINST_ADDS: usize = 8;
/// is compared with so many atomic adds,
const ADDS_AGAINST_A_SUM: usize = 16;
/// whose row has this name.
const SIXTEEN_ADDS: &str = "atomic-own-16-adds";
const ROUNDS_LEAST: usize = 5;

/// All that was measured.
pub struct Measured {
    pub machine: Machine,
    pub subjects: Vec<Name>,
    pub threads: Vec<usize>,
    /// CPUs that this process may run on.
    pub cpus: usize,
    /// Shards of each of Pinfold's counters.
    pub shards: usize,
    /// Threads that added while another one summed.
    pub adders_beside_a_summer: usize,
    pub rows: Vec<Row>,
}

/// Measures as `args` say and prints the result.
pub fn run(args: &CounterArgs) -> Result<()> {
    // Before anything else of Pinfold's: the first counter chooses how all per-CPU memory of the process is reached.
    EventCounter::new().inc();
    let measured = measure(args)?;
    measured.machine.warn();
    print::missing(&measured);
    if args.save {
        let path = crate::rows::save("counter", &measured.machine, &measured.rows)?;
        eprintln!("saved: {}", path.display());
    }
    if args.json {
        let rows: Vec<_> = measured.rows.iter().map(Row::without_rounds).collect();
        crate::rows::print_json("counter", &measured.machine, &rows)
    } else {
        print::print(&measured);
        Ok(())
    }
}

fn measure(args: &CounterArgs) -> Result<Measured> {
    let cpus = allowed_cpus()?;
    let (subjects, threads) = (
        without_repetitions(&args.subjects),
        without_repetitions(&args.threads),
    );
    let threads: Vec<usize> = threads.iter().map(|&threads| threads as usize).collect();
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
    // More than half of the time for the adds, which most goals rest on.
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
        row.settle(machine.tsc_hz as f64);
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

fn without_repetitions<T: Copy + PartialEq>(all: &[T]) -> Vec<T> {
    let mut once = Vec::new();
    for &one in all {
        if !once.contains(&one) {
            once.push(one);
        }
    }
    once
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
    /// Rounds until `share` of the time is over.
    fn rounds(
        &mut self,
        share: f64,
        mut round: impl FnMut(&mut Self, usize) -> Result<()>,
    ) -> Result<()> {
        let time = Duration::from_secs(u64::from(self.args.seconds)).mul_f64(share);
        let start = Instant::now();
        let mut number = 0;
        while number < ROUNDS_LEAST || start.elapsed() < time {
            round(self, number)?;
            number += 1;
        }
        Ok(())
    }

    /// The subjects in this round's order.
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
                // A thread has one count of its own here, and more threads than CPUs say nothing new.
                if threads <= self.cpus.len() && self.runners[at].0 != Name::ThreadLocal {
                    self.pass(at, pass, None, true)?;
                }
            }
        }
        Ok(())
    }

    fn adds_beside_a_summer(&mut self, round: usize, threads: usize) -> Result<()> {
        for at in self.turns(round) {
            // A thread's own count cannot be summed by another.
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

    /// On one CPU for so long: threads that are started later would be kept there too.
    fn sums_pinned(&mut self) -> Result<()> {
        let before = self.cpus.clone();
        pin(before[0])?;
        let result = self.rounds(0.1, |bench, round| {
            bench.sums(round);
            Ok(())
        });
        crate::pool::allow(&before)?;
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

    /// Adds what a round gave to the row that is like `new`.
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
