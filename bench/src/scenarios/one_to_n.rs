//! Scenario 6: the first CPU's thread allocates [`OBJECTS`] objects for each other CPU, writes a
//! byte of each, and hands them over in batches of [`BATCH`], one batch to each CPU in turn. The
//! other threads free their batches while the first goes on.
//!
//! `alloc` is the first thread's time for all objects. `free` is the mean over the other threads of
//! the time they spend freeing. Waiting for the next batch does not count.

use super::{OBJECTS, Op, Pool, Subject, Timing, alloc_into, cycles, free_from};
use crate::pool::{Desk, Patience, Shared};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Number of objects handed over by one store: enough that the store and reading the clock do not
/// matter.
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
            // Keeps workers from resetting a desk before all objects are freed.
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
        // SAFETY: the first thread stored these objects before it raised `handed_over` with release
        // ordering, and does not use them any more.
        timed += cycles::of(|| unsafe { free_from(subject, slots) });
        freed = handed_over;
    }
    timed
}
