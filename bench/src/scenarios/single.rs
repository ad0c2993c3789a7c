//! Scenario 1: one thread allocates [`OBJECTS`] objects and writes a byte of each, then frees them
//! in the same order. Allocations and frees are timed apart.

use super::{OBJECTS, Op, Pool, Subject, Timing, alloc_into, cycles, free_from};
use std::sync::Arc;

pub(super) fn measure<S: Subject>(pool: &Pool, subject: &Arc<S>) -> Vec<Timing> {
    let (shared, subject, passes) = (pool.shared(), Arc::clone(subject), pool.passes());
    pool.run_first(move || {
        S::enter_thread();
        let slots = &shared.desks[0].slots;
        let (mut alloc, mut free) = (0, 0);
        for _ in 0..passes {
            alloc = cycles::of(|| alloc_into(&*subject, slots));
            // SAFETY: this worker has just allocated the objects in `slots`, and no other worker
            // has a job now.
            free = cycles::of(|| unsafe { free_from(&*subject, slots) });
        }
        vec![
            Timing::new(Op::Alloc, alloc, OBJECTS),
            Timing::new(Op::Free, free, OBJECTS),
        ]
    })
}
