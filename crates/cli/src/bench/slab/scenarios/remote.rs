//! Scenario 5: the threads of all CPUs but the first allocate at once. After all have their
//! objects, the first CPU's thread frees them, one thread's objects after the other's.
//!
//! `alloc` is the mean over the allocating threads. In the timed pass these threads allocate the
//! objects that the first thread freed in the untimed pass, however the subject brings them back.

use super::{Crew, Op, PASSES, Subject, Timing, alloc_into, free_from, timed};
use crate::bench::slab::crew::Barrier;
use anyhow::Result;

pub fn measure<S: Subject>(crew: &Crew, subject: &S) -> Result<Vec<Timing>> {
    let barrier = Barrier::new(crew);
    let cycles = crew.run(|worker| {
        let mut cycles = 0;
        for _ in 0..PASSES {
            barrier.wait();
            if worker != 0 {
                cycles = timed(|| alloc_into(subject, &crew.desks()[worker].slots));
            }
            barrier.wait();
            if worker == 0 {
                cycles = timed(|| free_all(crew, subject));
            }
        }
        cycles
    })?;
    let operations = crew.calls() * (crew.len() - 1);
    let (free, alloc) = (cycles[0], cycles[1..].iter().sum());
    Ok(vec![
        Timing::new(Op::Alloc, alloc, operations),
        Timing::new(Op::Free, free, operations),
    ])
}

#[inline(always)]
fn free_all<S: Subject>(crew: &Crew, subject: &S) {
    for desk in &crew.desks()[1..] {
        // SAFETY: the desk's thread allocated the objects, and has waited at the barrier since
        // then.
        unsafe { free_from(subject, &desk.slots) };
    }
}
