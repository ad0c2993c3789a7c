//! Scenario 5: the threads of all CPUs but the first allocate [`OBJECTS`] objects each, at the same
//! time, and write a byte of each. After all have their objects, the first CPU's thread frees them,
//! one thread's objects after the other's, in the order of allocation.
//!
//! `alloc` is the mean over the allocating threads, `free` the first thread's time. From the second
//! pass on, threads allocate the objects that the first thread freed before, however the subject
//! brings them back.

use super::{OBJECTS, Op, Pool, Subject, Timing, alloc_into, cycles, free_from};
use std::sync::Arc;

pub(super) fn measure<S: Subject>(pool: &Pool, subject: &Arc<S>) -> Vec<Timing> {
    let (shared, subject, passes) = (pool.shared(), Arc::clone(subject), pool.passes());
    let cycles = pool.run_all(move |worker| {
        S::enter_thread();
        let mut timed = 0;
        for _ in 0..passes {
            shared.barrier.wait();
            if worker != 0 {
                timed = cycles::of(|| alloc_into(&*subject, &shared.desks[worker].slots));
            }
            shared.barrier.wait();
            if worker == 0 {
                timed = cycles::of(|| {
                    for desk in &shared.desks[1..] {
                        // SAFETY: the desk's worker allocated the objects, and does not use them
                        // after the barrier.
                        unsafe { free_from(&*subject, &desk.slots) };
                    }
                });
            }
        }
        timed
    });
    let objects = OBJECTS * (pool.len() - 1);
    vec![
        Timing::new(Op::Alloc, cycles[1..].iter().sum(), objects),
        Timing::new(Op::Free, cycles[0], objects),
    ]
}
