//! The threads: one on each CPU, of which the first is the measuring thread itself and plays slab_test's CPU 0.

use crate::bench::{Padded, cpus, spin_until};
use anyhow::{Context, Result, anyhow};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize};
use std::thread;

/// Who measures, and where the objects' addresses are kept. Made once, so that no measured loop allocates for itself.
pub struct Crew {
    cpus: Vec<usize>,
    desks: Vec<Desk>,
}

/// A thread's objects. Atomics in relaxed order are plain loads and stores that threads may share.
pub struct Desk {
    pub slots: Box<[AtomicPtr<u8>]>,
    /// How many of them have been handed over to this thread.
    pub handed_over: Padded<AtomicUsize>,
}

const WAIT: u8 = 0;
const GO: u8 = 1;
const QUIT: u8 = 2;

impl Crew {
    /// A crew for all CPUs that this process may use, with desks for `calls` objects. Keeps the calling thread, which from
    /// now on is the crew's first, on the first of them.
    pub fn new(calls: usize) -> Result<Crew> {
        let cpus = cpus::allowed()?;
        let first = cpus.first().context("there is no CPU to run on")?;
        cpus::pin(*first)?;
        let desk = |_| Desk {
            slots: (0..calls).map(|_| AtomicPtr::default()).collect(),
            handed_over: Padded::default(),
        };
        Ok(Crew {
            desks: cpus.iter().map(desk).collect(),
            cpus,
        })
    }

    /// How many threads there are.
    pub fn len(&self) -> usize {
        self.cpus.len()
    }

    /// A desk for each.
    pub fn desks(&self) -> &[Desk] {
        &self.desks
    }

    /// How many objects each holds.
    pub fn calls(&self) -> usize {
        self.desks[0].slots.len()
    }

    /// Runs `job` in every thread, each with its number, at once; the results in their order.
    pub fn run<T: Send>(&self, job: impl Fn(usize) -> T + Sync) -> Result<Vec<T>> {
        let (gate, job) = (AtomicU8::new(WAIT), &job);
        let enter = |worker| {
            spin_until(|| gate.load(Acquire) != WAIT);
            (gate.load(Acquire) == GO).then(|| job(worker))
        };
        let enter = &enter;
        thread::scope(|scope| {
            let start = |worker: usize| {
                // The new thread inherits it.
                cpus::pin(self.cpus[worker])?;
                let thread = thread::Builder::new().spawn_scoped(scope, move || enter(worker));
                thread.with_context(|| format!("starting thread {worker}; raise ulimit -u"))
            };
            let threads: Result<Vec<_>> = (1..self.len()).map(start).collect();
            let back = cpus::pin(self.cpus[0]);
            let all = threads.is_ok() && back.is_ok();
            gate.store(if all { GO } else { QUIT }, Release);
            let threads = threads?;
            back?;
            let mut results = vec![job(0)];
            for thread in threads {
                let joined = thread.join().ok().flatten();
                results.push(joined.ok_or_else(|| anyhow!("a measuring thread panicked"))?);
            }
            Ok(results)
        })
    }
}

/// Where a crew's threads wait for each other; spinning, so that they leave within a few cycles of each other.
pub struct Barrier {
    size: usize,
    arrived: AtomicUsize,
    generation: AtomicUsize,
}

impl Barrier {
    /// For all of `crew`.
    pub fn new(crew: &Crew) -> Barrier {
        Barrier {
            size: crew.len(),
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
        }
    }

    /// Waits until all are here.
    pub fn wait(&self) {
        let generation = self.generation.load(Acquire);
        if self.arrived.fetch_add(1, AcqRel) + 1 == self.size {
            self.arrived.store(0, Relaxed);
            self.generation.fetch_add(1, Release);
        } else {
            spin_until(|| self.generation.load(Acquire) != generation);
        }
    }
}
