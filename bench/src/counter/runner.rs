//! A subject ready to be measured. Only passes are dispatched dynamically, never what is inside a loop.

use super::pass::{Pass, SPREAD};
use super::subjects::{Atomic, AtomicOwn, Event, Name, Subject, ThreadLocal};
use crate::cycles;
use anyhow::{Context, Result};
use pinfold::counter::{EventCounter, PercpuCounter};
use pinfold::vmstat::VmStat;
use std::hint::black_box;

/// Sums in a timed pass.
const SUMS: u32 = 1_000;

/// What can be measured of a subject.
pub trait Runner {
    /// Nanoseconds per add, to one counter or to [`SPREAD`] in turn.
    fn pass(&self, pass: Pass, spread: bool, cpus: &[usize]) -> Result<f64>;

    /// Cycles to sum one counter after the other, `counters` of them with `shards` each, where the subject lets one choose.
    fn sums(&self) -> f64;
}

struct Local<S> {
    added: [S; SPREAD],
    /// Summed, one after the other.
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

/// How the counters are made.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Threads that add at the same time, at most.
    pub threads: usize,
    /// Shards that a sum is to go over, by the peers that can be told.
    pub shards: usize,
    /// Pinfold's counters whose shards together are at least as many.
    pub pinfold_counters: usize,
}

/// Makes a subject, and has every CPU add to what will be summed.
pub fn new(name: Name, plan: Plan, cpus: &[usize]) -> Result<Box<dyn Runner>> {
    match name {
        Name::PinfoldEvent => local::<EventCounter>(plan, plan.pinfold_counters, cpus),
        Name::Pinfold => local::<PercpuCounter>(plan, plan.pinfold_counters, cpus),
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

/// Cycles of sixteen locked adds to memory that nobody else touches.
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
