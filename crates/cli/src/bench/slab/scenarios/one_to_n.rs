//! Scenario 6: the first CPU's thread allocates objects for each other CPU and hands them over in
//! batches of [`BATCH`], one batch to each thread in turn. The other threads free their batches
//! while the first goes on.
//!
//! `free` is the mean over the other threads of the time they spend freeing. Waiting for the next
//! batch does not count.

use super::{Crew, Desk, Op, PASSES, Subject, Timing, alloc_into, free_from, timed};
use crate::bench::slab::crew::Barrier;
use crate::bench::spin_until;
use anyhow::Result;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Large enough that handing over and reading the clock do not matter.
const BATCH: usize = 100;

pub fn measure<S: Subject>(crew: &Crew, subject: &S) -> Result<Vec<Timing>> {
    let barrier = Barrier::new(crew);
    let cycles = crew.run(|worker| {
        let desk = &crew.desks()[worker];
        let mut cycles = 0;
        for _ in 0..PASSES {
            // Relaxed is enough: no other thread uses the desk until all have passed the barrier
            // below.
            desk.handed_over.0.store(0, Relaxed);
            barrier.wait();
            cycles = match worker {
                0 => timed(|| hand_over(crew, subject)),
                _ => free_as_handed_over(subject, desk),
            };
            barrier.wait();
        }
        cycles
    })?;
    let operations = crew.calls() * (crew.len() - 1);
    let (alloc, free) = (cycles[0], cycles[1..].iter().sum());
    Ok(vec![
        Timing::new(Op::Alloc, alloc, operations),
        Timing::new(Op::Free, free, operations),
    ])
}

#[inline(always)]
fn hand_over<S: Subject>(crew: &Crew, subject: &S) {
    let calls = crew.calls();
    for first in (0..calls).step_by(BATCH) {
        let end = calls.min(first + BATCH);
        for desk in &crew.desks()[1..] {
            alloc_into(subject, &desk.slots[first..end]);
            desk.handed_over.0.store(end, Release);
        }
    }
}

#[inline(always)]
fn free_as_handed_over<S: Subject>(subject: &S, desk: &Desk) -> u64 {
    let (mut freed, mut cycles) = (0, 0);
    while freed < desk.slots.len() {
        spin_until(|| desk.handed_over.0.load(Acquire) != freed);
        let end = desk.handed_over.0.load(Acquire);
        let slots = &desk.slots[freed..end];
        // SAFETY: the first thread stored these objects before it raised `handed_over` with release
        // ordering, and does not use them any more.
        cycles += timed(|| unsafe { free_from(subject, slots) });
        freed = end;
    }
    cycles
}
