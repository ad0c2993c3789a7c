//! Scenario 2: one thread allocates an object and frees it right away, [`OBJECTS`] times. Nothing
//! is written to the objects.

use super::{OBJECTS, Op, Pool, Subject, Timing, cycles, out_of_memory};
use std::sync::Arc;

pub(super) fn measure<S: Subject>(pool: &Pool, subject: &Arc<S>) -> Vec<Timing> {
    let (subject, passes) = (Arc::clone(subject), pool.passes());
    pool.run_first(move || {
        S::enter_thread();
        let mut pair = 0;
        for _ in 0..passes {
            pair = cycles::of(|| pairs(&*subject));
        }
        vec![Timing::new(Op::Pair, pair, OBJECTS)]
    })
}

#[inline(always)]
pub(super) fn pairs<S: Subject>(subject: &S) {
    for _ in 0..OBJECTS {
        let object = subject.alloc();
        if object.is_null() {
            out_of_memory();
        }
        // SAFETY: the call above returned the object, and nothing uses it.
        unsafe { subject.free(object) };
    }
}
