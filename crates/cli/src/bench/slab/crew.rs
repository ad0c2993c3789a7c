//! The threads: one on each CPU. The first is the calling thread, which plays slab_test's CPU 0.

use crate::bench::{Padded, cpus, spin_until};
use anyhow::{Context, Result, anyhow};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize};
use std::thread;

/// The threads' CPUs, and the arrays for objects' addresses. Made once, so that no measured loop
/// allocates for itself.
pub struct Crew {
    cpus: Vec<usize>,
    desks: Vec<Desk>,
}

/// A thread's objects. Relaxed accesses compile to plain loads and stores.
pub struct Desk {
    pub slots: Box<[AtomicPtr<u8>]>,
    /// Number of objects handed over to this thread.
    pub handed_over: Padded<AtomicUsize>,
}

const WAIT: u8 = 0;
const GO: u8 = 1;
const QUIT: u8 = 2;

impl Crew {
    /// Makes a crew for all CPUs that this process may use, with room for `calls` objects per
    /// thread. Pins the calling thread, the crew's first, to the first CPU.
    pub fn new(calls: usize) -> Result<Crew> {
        let cpus = cpus::allowed()?;
        let first = cpus.first().context("this process may use no CPU")?;
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

    /// Returns the number of threads.
    pub fn len(&self) -> usize {
        self.cpus.len()
    }

    /// Returns the desks, one for each thread.
    pub fn desks(&self) -> &[Desk] {
        &self.desks
    }

    /// Returns the number of objects per desk.
    pub fn calls(&self) -> usize {
        self.desks[0].slots.len()
    }

    /// Runs `job` in every thread at once, each with its number. Returns the results in their
    /// order.
    pub fn run<T: Send>(&self, job: impl Fn(usize) -> T + Sync) -> Result<Vec<T>> {
        let (gate, job) = (AtomicU8::new(WAIT), &job);
        let enter = |worker| {
            spin_until(|| gate.load(Acquire) != WAIT);
            (gate.load(Acquire) == GO).then(|| job(worker))
        };
        let enter = &enter;
        thread::scope(|scope| {
            let start = |worker: usize| {
                // The new thread inherits this CPU.
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
                results.push(
                    joined.ok_or_else(|| {
                        anyhow!("a measuring thread panicked; please report this")
                    })?,
                );
            }
            Ok(results)
        })
    }
}

/// A point where a crew's threads wait for each other. They spin, so that they leave it within a
/// few cycles of each other.
pub struct Barrier {
    size: usize,
    arrived: AtomicUsize,
    generation: AtomicUsize,
}

impl Barrier {
    /// Makes a barrier for all threads of `crew`.
    pub fn new(crew: &Crew) -> Barrier {
        Barrier {
            size: crew.len(),
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
        }
    }

    /// Waits until all threads have called this. What a thread did before is visible to all threads
    /// afterwards: each increment of `arrived` synchronises with the last one, and the last
    /// thread's increment of `generation` with the loads of the others.
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
