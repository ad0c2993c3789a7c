//! Scenarios 3 and 4: scenarios 1 and 2 on the threads of all CPUs at once.
//!
//! Scenario 3: each thread allocates [`OBJECTS`] objects and writes a byte of each, waits for the
//! others, and frees them. Scenario 4: each thread allocates an object and frees it right away.
//! Figures are means over the threads.

use super::{OBJECTS, Op, Pool, Subject, Timing, alloc_into, cycles, free_from, pair};
use std::sync::Arc;

pub(super) fn measure<S: Subject>(pool: &Pool, subject: &Arc<S>) -> Vec<Timing> {
    let (shared, subject, passes) = (pool.shared(), Arc::clone(subject), pool.passes());
    let cycles = pool.run_all(move |worker| {
        S::enter_thread();
        let slots = &shared.desks[worker].slots;
        let (mut alloc, mut free) = (0, 0);
        for _ in 0..passes {
            shared.barrier.wait();
            alloc = cycles::of(|| alloc_into(&*subject, slots));
            shared.barrier.wait();
            // SAFETY: this worker has just allocated the objects in `slots`, and nothing uses them.
            free = cycles::of(|| unsafe { free_from(&*subject, slots) });
        }
        (alloc, free)
    });
    let objects = OBJECTS * pool.len();
    vec![
        Timing::new(Op::Alloc, cycles.iter().map(|of| of.0).sum(), objects),
        Timing::new(Op::Free, cycles.iter().map(|of| of.1).sum(), objects),
    ]
}

pub(super) fn measure_pairs<S: Subject>(pool: &Pool, subject: &Arc<S>) -> Vec<Timing> {
    let (shared, subject, passes) = (pool.shared(), Arc::clone(subject), pool.passes());
    let cycles = pool.run_all(move |_| {
        S::enter_thread();
        let mut timed = 0;
        for _ in 0..passes {
            shared.barrier.wait();
            timed = cycles::of(|| pair::pairs(&*subject));
        }
        timed
    });
    let objects = OBJECTS * pool.len();
    vec![Timing::new(Op::Pair, cycles.iter().sum(), objects)]
}
