//! A subject ready to be measured. A whole pass is one dynamic call, and nothing inside its loop
//! is.

use super::pass::{Pass, SPREAD};
use super::subjects::{Atomic, AtomicOwn, Event, Name, Subject, ThreadLocal};
use anyhow::{Context, Result};
use pinfold::counter::{EventCounter, PerCpuCounter};
use pinfold::vmstat::VmStat;
use pinfold_lab::cycles;
use std::hint::black_box;

/// Number of sums in a timed pass.
const SUMS: u32 = 1_000;

/// The measurements of a subject.
pub trait Runner {
    /// Returns nanoseconds per add, to one counter or to [`SPREAD`] counters in turn.
    fn pass(&self, pass: Pass, spread: bool, cpus: &[usize]) -> Result<f64>;

    /// Returns the cycles to sum all counters made for that, one after the other.
    fn sums(&self) -> f64;
}

struct Local<S> {
    added: [S; SPREAD],
    /// The counters to sum, one after the other.
    summed: Vec<S>,
}

impl<S: Subject> Runner for Local<S> {
    fn pass(&self, pass: Pass, spread: bool, cpus: &[usize]) -> Result<f64> {
        let used = if spread { SPREAD } else { 1 };
        pass.run(&self.added[..used], cpus)
    }

    fn sums(&self) -> f64 {
        let work = || {
            for _ in 0..SUMS {
                for counter in &self.summed {
                    black_box(counter.sum());
                }
            }
        };
        work();
        cycles::of(work) as f64 / f64::from(SUMS)
    }
}

/// The parameters of making counters.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The largest number of threads that add at the same time.
    pub threads: usize,
    /// Number of shards to sum, for peers whose number of shards can be chosen.
    pub shards: usize,
    /// Number of Pinfold's counters that together have at least `shards` shards.
    pub pinfold_counters: usize,
}

/// Makes a subject, and adds on every CPU to the counters that will be summed.
pub fn new(name: Name, plan: Plan, cpus: &[usize]) -> Result<Box<dyn Runner>> {
    match name {
        Name::PinfoldEvent => local::<EventCounter>(plan, plan.pinfold_counters, cpus),
        Name::Pinfold => local::<PerCpuCounter>(plan, plan.pinfold_counters, cpus),
        Name::Vmstat => local::<VmStat<Event>>(plan, plan.pinfold_counters, cpus),
        Name::Atomic => local::<Atomic>(plan, 1, cpus),
        Name::AtomicOwn => local::<AtomicOwn>(plan, 1, cpus),
        Name::FastTelemetry => local::<fast_telemetry::Counter>(plan, 1, cpus),
        Name::FastCounter => local::<fast_counter::ConcurrentCounter>(plan, 1, cpus),
        Name::ThreadLocal => local::<ThreadLocal>(plan, 1, cpus),
    }
}

fn local<S: Subject + 'static>(
    plan: Plan,
    counters: usize,
    cpus: &[usize],
) -> Result<Box<dyn Runner>> {
    let summed: Vec<S> = (0..counters).map(|_| S::new(plan.shards)).collect();
    let touch = Pass {
        threads: cpus.len().min(plan.shards),
        adds: 1,
        summing: false,
    };
    for counter in &summed {
        (touch.run(std::slice::from_ref(counter), cpus)).context("first adds")?;
    }
    Ok(Box::new(Local {
        added: std::array::from_fn(|_| S::new(plan.threads)),
        summed,
    }))
}

/// Returns the cycles of sixteen locked adds to memory that no other thread uses.
pub fn sixteen_adds() -> f64 {
    let own = Atomic::new(1);
    let add = own.adder(0);
    let work = || {
        for _ in 0..SUMS {
            for _ in 0..16 {
                add();
                black_box(());
            }
        }
    };
    work();
    cycles::of(work) as f64 / f64::from(SUMS)
}
