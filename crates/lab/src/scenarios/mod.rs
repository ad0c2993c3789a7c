//! What is done with the objects: slab_test's six scenarios.
//!
//! Every scenario makes the same number of untimed passes for every subject, and then a timed one.
//! The figure is the cycles of the timed pass divided by its operations. It includes the loop and
//! the array of addresses, which are the same for every subject.

mod one_to_n;
mod own;
mod remote;

use crate::{Pool, Subject, cycles};
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::ptr::null_mut;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

/// Number of different depths that [`at_depth`] uses.
const DEPTHS: usize = 8;

crate::names! {
    /// The scenarios, in slab_test's order. The command line and the rows use these names.
    pub enum Scenario {
        /// One thread allocates all objects, then frees all
        Single = "single",
        /// One thread frees each object right after allocating it
        Pair = "pair",
        /// Single, in a thread on each CPU at once
        Concurrent = "concurrent",
        /// Pair, in a thread on each CPU at once
        ConcurrentPair = "concurrent_pair",
        /// The threads of all CPUs but the first allocate; the first CPU's thread frees all
        Remote = "remote",
        /// The first CPU's thread allocates for the others, which free at the same time
        OneToN = "one_to_n",
    }
}

impl Scenario {
    /// Returns the timed operations.
    pub fn operations(self) -> &'static [Op] {
        match self {
            Scenario::Pair | Scenario::ConcurrentPair => &[Op::Pair],
            _ => &[Op::Alloc, Op::Free],
        }
    }

    /// Returns how many of `workers` threads take part.
    pub fn threads(self, workers: usize) -> usize {
        match self {
            Scenario::Single | Scenario::Pair => 1,
            _ => workers,
        }
    }

    /// Returns the fewest threads that the scenario needs.
    pub fn least_threads(self) -> usize {
        match self {
            Scenario::Remote | Scenario::OneToN => 2,
            _ => 1,
        }
    }

    /// Returns whether a thread frees each object right after allocating it.
    pub fn is_pair(self) -> bool {
        matches!(self.operations(), [Op::Pair])
    }

    /// Measures the scenario once. A thread that makes pairs holds `depth` other objects at the
    /// same time, as in [`at_depth`].
    ///
    /// # Errors
    ///
    /// Fails if a worker panics.
    pub fn measure<S: Subject>(
        self,
        pool: &Pool,
        subject: &S,
        depth: usize,
    ) -> Result<Vec<Timing>> {
        let threads = self.threads(pool.len());
        match self {
            Scenario::Single | Scenario::Concurrent => own::all(pool, threads, subject),
            Scenario::Pair | Scenario::ConcurrentPair => own::pairs(pool, threads, subject, depth),
            Scenario::Remote => remote::measure(pool, subject),
            Scenario::OneToN => one_to_n::measure(pool, subject),
        }
    }
}

/// A subject behind dynamic dispatch. Only a whole scenario is one dynamic call.
pub trait Measurable {
    /// Measures a scenario once, in a round.
    ///
    /// # Errors
    ///
    /// Fails if a worker panics.
    fn measure(&self, scenario: Scenario, pool: &Pool, round: usize) -> Result<Vec<Timing>>;
}

impl<S: Subject> Measurable for S {
    fn measure(&self, scenario: Scenario, pool: &Pool, round: usize) -> Result<Vec<Timing>> {
        scenario.measure(pool, self, round)
    }
}

crate::names! {
    /// A timed operation.
    pub enum Op {
        /// Allocating an object and writing a byte of it.
        Alloc = "alloc",
        /// Freeing an object.
        Free = "free",
        /// Allocating an object and freeing it.
        Pair = "pair",
    }
}

/// The cycles of an operation: the mean over a pass and over the threads that made it.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Timing {
    /// The operation.
    pub op: Op,
    /// Cycles per operation.
    pub cycles: f64,
}

impl Timing {
    /// Divides the cycles of all threads by the number of operations they made.
    fn new(op: Op, cycles: u64, operations: usize) -> Timing {
        Timing {
            op,
            cycles: cycles as f64 / operations as f64,
        }
    }

    fn both(alloc: u64, free: u64, operations: usize) -> Vec<Timing> {
        let all = [(Op::Alloc, alloc), (Op::Free, free)];
        all.map(|(op, cycles)| Timing::new(op, cycles, operations))
            .into()
    }
}

// Each timed loop is in a function that is not inlined and takes the subject by reference. So the
// loop compiles to the same instructions in every scenario, and in both programs. Within a closure,
// the compiler would read the subject's fields again for every object, because it cannot see that
// nothing changes them.

/// Returns the cycles to fill `slots` with new objects.
#[inline(never)]
fn time_alloc<S: Subject>(subject: &S, slots: &[AtomicPtr<u8>]) -> u64 {
    cycles::of(|| alloc_into(subject, slots))
}

/// Returns the cycles to free the objects in `slots`.
///
/// # Safety
///
/// All of them are `subject`'s, and no thread uses them any more.
#[inline(never)]
unsafe fn time_free<S: Subject>(subject: &S, slots: &[AtomicPtr<u8>]) -> u64 {
    // SAFETY: the caller promises what `free_from` requires.
    cycles::of(|| unsafe { free_from(subject, slots) })
}

/// Returns the cycles to allocate an object and free it, `calls` times. Nothing is written to the
/// objects.
#[inline(never)]
fn time_pairs<S: Subject>(subject: &S, calls: usize) -> u64 {
    cycles::of(|| {
        for _ in 0..calls {
            let object = subject.alloc();
            if object.is_null() {
                out_of_memory();
            }
            // SAFETY: the call above returned the object, and nothing uses it.
            unsafe { subject.free(object) };
        }
    })
}

/// Fills `slots` with new objects and writes a byte of each, because slab_test also writes to its
/// objects before it frees them.
#[inline(always)]
fn alloc_into<S: Subject>(subject: &S, slots: &[AtomicPtr<u8>]) {
    for slot in slots {
        let object = subject.alloc();
        if object.is_null() {
            out_of_memory();
        }
        // SAFETY: `alloc` returned the object just now, so this thread owns it. It has at least one
        // byte. The write is volatile so that the compiler does not drop it.
        unsafe { object.write_volatile(23) };
        slot.store(object, Relaxed);
    }
}

/// Frees the objects in `slots`.
///
/// # Safety
///
/// All of them are `subject`'s, and no thread uses them any more.
#[inline(always)]
unsafe fn free_from<S: Subject>(subject: &S, slots: &[AtomicPtr<u8>]) {
    for slot in slots {
        // SAFETY: the caller promises that the object is `subject`'s and not in use.
        unsafe { subject.free(slot.load(Relaxed)) };
    }
}

/// Runs `work` while holding `depth` objects, modulo 8. A caller may give the number of the round.
///
/// A pair always uses the same slot of a CPU's array. The processor may mistake the slot's address
/// for that of the array's length for a moment, and then a pair costs three times as much.
/// Different depths keep such a slot from deciding the median.
pub fn at_depth<S: Subject, R>(subject: &S, depth: usize, work: impl FnOnce() -> R) -> R {
    let mut held = [null_mut(); DEPTHS];
    let held = &mut held[..depth % DEPTHS];
    held.fill_with(|| subject.alloc());
    let result = work();
    for &object in held.iter().filter(|object| !object.is_null()) {
        // SAFETY: this function allocated the object and gave it to no other code.
        unsafe { subject.free(object) };
    }
    result
}

/// Ends the program. Returning an error would leave the other threads waiting for this one.
#[cold]
pub fn out_of_memory() -> ! {
    eprintln!(
        "error: no memory for the objects of a benchmark; measure smaller objects, or fewer at a time"
    );
    std::process::exit(2);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CMalloc, PinfoldCache, PinfoldMalloc, cache};

    /// Measures every scenario, also with a number of objects that one_to_n's batches do not
    /// divide.
    #[test]
    fn every_scenario_times_its_operations_and_leaves_no_object() {
        let pool = Pool::new(None, 250, 1).unwrap();
        let cache = PinfoldCache(cache(64).unwrap());
        let malloc = CMalloc::<PinfoldMalloc>::new(64);
        for scenario in Scenario::ALL {
            if pool.len() < scenario.least_threads() {
                continue;
            }
            for depth in [0, 3] {
                let of_cache = scenario.measure(&pool, &cache, depth).unwrap();
                let of_malloc = scenario.measure(&pool, &malloc, depth).unwrap();
                for timings in [of_cache, of_malloc] {
                    let ops: Vec<_> = timings.iter().map(|timing| timing.op).collect();
                    assert_eq!(ops, scenario.operations());
                    assert!(
                        timings.iter().all(|timing| timing.cycles > 0.0),
                        "{timings:?}"
                    );
                }
            }
        }
        cache.0.shrink().unwrap();
        assert_eq!(cache.0.in_use(), 0);
    }
}
