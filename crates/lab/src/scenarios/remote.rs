//! Scenario 5: the threads of all CPUs but the first allocate at once. After all have their
//! objects, the first CPU's thread frees them, one thread's objects after the other's.
//!
//! `alloc` is the mean over the allocating threads. From the second pass on, these threads allocate
//! the objects that the first thread freed before, however the subject brings them back.

use super::{Timing, free_from, time_alloc};
use crate::{Barrier, Desk, Pool, Subject, cycles};
use anyhow::Result;

pub(super) fn measure<S: Subject>(pool: &Pool, subject: &S) -> Result<Vec<Timing>> {
    let (barrier, desks, passes) = (Barrier::new(pool.len()), pool.desks(), pool.passes());
    let cycles = pool.run(pool.len(), |worker| {
        subject.enter_thread();
        let mut cycles = 0;
        for _ in 0..passes {
            barrier.wait();
            if worker != 0 {
                cycles = time_alloc(subject, &desks[worker].slots);
            }
            barrier.wait();
            if worker == 0 {
                cycles = time_free_all(subject, &desks[1..]);
            }
        }
        cycles
    })?;
    let operations = pool.objects() * (pool.len() - 1);
    let (free, alloc) = (cycles[0], cycles[1..].iter().sum());
    Ok(Timing::both(alloc, free, operations))
}

/// Returns the cycles to free the objects of all `desks`.
#[inline(never)]
fn time_free_all<S: Subject>(subject: &S, desks: &[Desk]) -> u64 {
    cycles::of(|| {
        for desk in desks {
            // SAFETY: the desk's thread allocated the objects, and does not use them after the
            // barrier.
            unsafe { free_from(subject, &desk.slots) };
        }
    })
}
