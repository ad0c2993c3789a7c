//! Scenarios 3 and 4: scenarios 1 and 2 in a thread on each CPU at once.

use super::{Crew, Op, PASSES, Subject, Timing, alloc_into, at_depth, free_from, pairs_of, timed};
use crate::bench::slab::crew::Barrier;
use anyhow::Result;

/// All threads allocate. After all have their objects, each frees its own.
pub fn all<S: Subject>(crew: &Crew, subject: &S) -> Result<Vec<Timing>> {
    let barrier = Barrier::new(crew);
    let cycles = crew.run(|worker| {
        let slots = &crew.desks()[worker].slots;
        let (mut alloc, mut free) = (0, 0);
        for _ in 0..PASSES {
            barrier.wait();
            alloc = timed(|| alloc_into(subject, slots));
            barrier.wait();
            // SAFETY: this thread has just allocated the objects in `slots`, and nothing uses them.
            free = timed(|| unsafe { free_from(subject, slots) });
        }
        (alloc, free)
    })?;
    let operations = crew.calls() * crew.len();
    let alloc = cycles.iter().map(|both| both.0).sum();
    let free = cycles.iter().map(|both| both.1).sum();
    Ok(vec![
        Timing::new(Op::Alloc, alloc, operations),
        Timing::new(Op::Free, free, operations),
    ])
}

/// Each thread frees an object right after it allocated it.
pub fn pairs<S: Subject>(crew: &Crew, subject: &S, round: usize) -> Result<Vec<Timing>> {
    let barrier = Barrier::new(crew);
    let calls = crew.calls();
    let cycles = crew.run(|_| {
        let mut cycles = 0;
        at_depth(subject, round, || {
            for _ in 0..PASSES {
                barrier.wait();
                cycles = timed(|| pairs_of(subject, calls));
            }
        });
        cycles
    })?;
    let cycles = cycles.iter().sum();
    Ok(vec![Timing::new(Op::Pair, cycles, calls * crew.len())])
}
