//! Scenarios 1 to 4: threads that use only their own objects. Scenarios 1 and 2 have one thread, 3
//! and 4 a thread on each CPU.

use super::{Op, Timing, at_depth, time_alloc, time_free, time_pairs};
use crate::{Barrier, Pool, Subject};
use anyhow::Result;

/// Scenarios 1 and 3: all threads allocate all their objects. After all have them, each frees its
/// own, in the same order.
pub(super) fn all<S: Subject>(pool: &Pool, threads: usize, subject: &S) -> Result<Vec<Timing>> {
    let (barrier, desks, passes) = (Barrier::new(threads), pool.desks(), pool.passes());
    let cycles = pool.run(threads, |worker| {
        subject.enter_thread();
        let slots = &desks[worker].slots;
        let (mut alloc, mut free) = (0, 0);
        for _ in 0..passes {
            barrier.wait();
            alloc = time_alloc(subject, slots);
            barrier.wait();
            // SAFETY: this thread has just allocated the objects in `slots`, and nothing uses them.
            free = unsafe { time_free(subject, slots) };
        }
        (alloc, free)
    })?;
    let operations = pool.objects() * threads;
    let alloc = cycles.iter().map(|both| both.0).sum();
    let free = cycles.iter().map(|both| both.1).sum();
    Ok(Timing::both(alloc, free, operations))
}

/// Scenarios 2 and 4: each thread frees an object right after it allocated it.
pub(super) fn pairs<S: Subject>(
    pool: &Pool,
    threads: usize,
    subject: &S,
    depth: usize,
) -> Result<Vec<Timing>> {
    let (barrier, calls, passes) = (Barrier::new(threads), pool.objects(), pool.passes());
    let cycles = pool.run(threads, |_| {
        subject.enter_thread();
        let mut cycles = 0;
        at_depth(subject, depth, || {
            for _ in 0..passes {
                barrier.wait();
                cycles = time_pairs(subject, calls);
            }
        });
        cycles
    })?;
    let cycles = cycles.iter().sum();
    Ok(vec![Timing::new(Op::Pair, cycles, calls * threads)])
}
