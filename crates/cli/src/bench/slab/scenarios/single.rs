//! Scenarios 1 and 2: only the calling thread.

use super::{Crew, Op, PASSES, Subject, Timing, alloc_into, at_depth, free_from, pairs_of, timed};

/// Allocates all objects, then frees them in the same order. Times both apart.
pub fn all<S: Subject>(crew: &Crew, subject: &S) -> Vec<Timing> {
    let slots = &crew.desks()[0].slots;
    let (mut alloc, mut free) = (0, 0);
    for _ in 0..PASSES {
        alloc = timed(|| alloc_into(subject, slots));
        // SAFETY: the line above allocated the objects in `slots`, and nothing uses them.
        free = timed(|| unsafe { free_from(subject, slots) });
    }
    vec![
        Timing::new(Op::Alloc, alloc, slots.len()),
        Timing::new(Op::Free, free, slots.len()),
    ]
}

/// Frees each object right after allocating it.
pub fn pairs<S: Subject>(crew: &Crew, subject: &S, round: usize) -> Vec<Timing> {
    let calls = crew.calls();
    let mut cycles = 0;
    at_depth(subject, round, || {
        for _ in 0..PASSES {
            cycles = timed(|| pairs_of(subject, calls));
        }
    });
    vec![Timing::new(Op::Pair, cycles, calls)]
}
