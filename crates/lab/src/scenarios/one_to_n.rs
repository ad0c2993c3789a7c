//! Scenario 6: the first CPU's thread allocates objects for each other CPU and hands them over in
//! batches of [`BATCH`], one batch to each thread in turn. The other threads free their batches
//! while the first goes on.
//!
//! `alloc` is the first thread's time for all objects. `free` is the mean over the other threads of
//! the time they spend freeing. Waiting for the next batch does not count.

use super::{Timing, alloc_into, time_free};
use crate::{Barrier, Desk, Pool, Subject, cycles, spin_long_until};
use anyhow::Result;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Large enough that handing over and reading the clock do not matter.
const BATCH: usize = 100;

pub(super) fn measure<S: Subject>(pool: &Pool, subject: &S) -> Result<Vec<Timing>> {
    let (barrier, desks, passes) = (Barrier::new(pool.len()), pool.desks(), pool.passes());
    let cycles = pool.run(pool.len(), |worker| {
        subject.enter_thread();
        let desk = &desks[worker];
        let mut cycles = 0;
        for _ in 0..passes {
            // Relaxed is enough: no other thread uses the desk until all have passed the barrier
            // below.
            desk.handed_over.0.store(0, Relaxed);
            barrier.wait();
            cycles = match worker {
                0 => hand_over(subject, &desks[1..]),
                _ => free_as_handed_over(subject, desk),
            };
            // Keeps threads from resetting a desk before all objects are freed.
            barrier.wait();
        }
        cycles
    })?;
    let operations = pool.objects() * (pool.len() - 1);
    let (alloc, free) = (cycles[0], cycles[1..].iter().sum());
    Ok(Timing::both(alloc, free, operations))
}

/// Returns the cycles to allocate the objects of all `desks`.
#[inline(never)]
fn hand_over<S: Subject>(subject: &S, desks: &[Desk]) -> u64 {
    let objects = desks[0].slots.len();
    cycles::of(|| {
        for first in (0..objects).step_by(BATCH) {
            let end = objects.min(first + BATCH);
            for desk in desks {
                alloc_into(subject, &desk.slots[first..end]);
                desk.handed_over.0.store(end, Release);
            }
        }
    })
}

/// Returns the cycles to free the objects of `desk`, as they are handed over.
fn free_as_handed_over<S: Subject>(subject: &S, desk: &Desk) -> u64 {
    let (mut freed, mut cycles) = (0, 0);
    while freed < desk.slots.len() {
        spin_long_until(|| desk.handed_over.0.load(Acquire) != freed);
        let end = desk.handed_over.0.load(Acquire);
        let slots = &desk.slots[freed..end];
        // SAFETY: the first thread stored these objects before it raised `handed_over` with release
        // ordering, and does not use them any more.
        cycles += unsafe { time_free(subject, slots) };
        freed = end;
    }
    cycles
}
