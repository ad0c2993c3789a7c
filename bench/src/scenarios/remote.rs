//! Scenario 5: the threads of all CPUs but CPU 0 allocate [`OBJECTS`] objects each, at once, writing a byte of each;
//! when all have theirs, CPU 0's thread frees every one, a thread's after the other's, in the order they were got.
//!
//! `alloc` is the mean over the allocating threads, `free` CPU 0's. From the second pass on the allocations find what
//! CPU 0 freed, by whatever way the subject brings objects back.

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
                        // SAFETY: the desk's worker allocated them and waits at the barrier from now on.
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
