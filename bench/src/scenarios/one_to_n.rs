//! Scenario 6: CPU 0's thread allocates [`OBJECTS`] objects for each other CPU, writing a byte of each, and hands them
//! over in batches of [`BATCH`], a batch to each CPU in turn; the others free what they are handed while CPU 0 goes on.
//!
//! `alloc` is CPU 0's time for all objects. `free` is the mean over the other threads of the time they spend freeing,
//! not of the time they wait for the next batch.

use super::{OBJECTS, Op, Pool, Subject, Timing, alloc_into, cycles, free_from};
use crate::pool::{Desk, Patience, Shared};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Objects handed over by one store: enough that neither the store nor the reading of the clock counts.
const BATCH: usize = 100;

const _: () = assert!(OBJECTS.is_multiple_of(BATCH));

pub(super) fn measure<S: Subject>(pool: &Pool, subject: &Arc<S>) -> Vec<Timing> {
    let (shared, subject, passes) = (pool.shared(), Arc::clone(subject), pool.passes());
    let cycles = pool.run_all(move |worker| {
        S::enter_thread();
        let desk = &shared.desks[worker];
        let mut timed = 0;
        for _ in 0..passes {
            desk.handed_over.0.store(0, Ordering::Relaxed);
            shared.barrier.wait();
            timed = match worker {
                0 => cycles::of(|| hand_over(&*subject, &shared)),
                _ => free_as_handed_over(&*subject, desk),
            };
            // Nobody resets a desk before all objects are freed.
            shared.barrier.wait();
        }
        timed
    });
    let objects = OBJECTS * (pool.len() - 1);
    vec![
        Timing::new(Op::Alloc, cycles[0], objects),
        Timing::new(Op::Free, cycles[1..].iter().sum(), objects),
    ]
}

#[inline(always)]
fn hand_over<S: Subject>(subject: &S, shared: &Shared) {
    for first in (0..OBJECTS).step_by(BATCH) {
        for desk in &shared.desks[1..] {
            alloc_into(subject, &desk.slots[first..first + BATCH]);
            desk.handed_over.0.store(first + BATCH, Ordering::Release);
        }
    }
}

#[inline(always)]
fn free_as_handed_over<S: Subject>(subject: &S, desk: &Desk) -> u64 {
    let (mut freed, mut timed) = (0, 0);
    let mut patience = Patience::default();
    while freed < OBJECTS {
        let handed_over = desk.handed_over.0.load(Ordering::Acquire);
        if handed_over == freed {
            patience.spin();
            continue;
        }
        let slots = &desk.slots[freed..handed_over];
        // SAFETY: CPU 0's thread stored them before it raised the mark, and does not use them any more.
        timed += cycles::of(|| unsafe { free_from(subject, slots) });
        freed = handed_over;
    }
    timed
}
