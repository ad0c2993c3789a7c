//! What is done with the objects: the scenarios of slab_test, with [`OBJECTS`] objects per thread.
//!
//! Every scenario makes the same number of untimed passes for every subject, and then a timed one.
//! The figure is the cycles of the timed pass divided by the number of objects. It includes the
//! loop and the array, which are the same for every subject.

mod concurrent;
mod one_to_n;
mod pair;
mod remote;
mod single;

use crate::cycles;
use crate::pool::{OBJECTS, Pool};
use crate::subjects::Subject;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The scenarios. The command line and the rows use these names.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Scenario {
    /// One thread allocates all objects, then frees all.
    Single,
    /// One thread frees each object right after allocating it.
    Pair,
    /// The threads of all CPUs allocate all objects at the same time, then free them at the same
    /// time.
    Concurrent,
    /// The threads of all CPUs free each object right after allocating it.
    ConcurrentPair,
    /// The threads of all CPUs but the first allocate; the first CPU's thread frees all.
    Remote,
    /// The first CPU's thread allocates for the others, which free at the same time.
    OneToN,
}

impl Scenario {
    /// Returns the printed name.
    pub fn name(self) -> &'static str {
        match self {
            Scenario::Single => "single",
            Scenario::Pair => "pair",
            Scenario::Concurrent => "concurrent",
            Scenario::ConcurrentPair => "concurrent_pair",
            Scenario::Remote => "remote",
            Scenario::OneToN => "one_to_n",
        }
    }

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
            Scenario::Single | Scenario::Pair => 1,
            _ => 2,
        }
    }

    /// Measures the scenario once.
    pub fn measure<S: Subject>(self, pool: &Pool, subject: &Arc<S>) -> Vec<Timing> {
        match self {
            Scenario::Single => single::measure(pool, subject),
            Scenario::Pair => pair::measure(pool, subject),
            Scenario::Concurrent => concurrent::measure(pool, subject),
            Scenario::ConcurrentPair => concurrent::measure_pairs(pool, subject),
            Scenario::Remote => remote::measure(pool, subject),
            Scenario::OneToN => one_to_n::measure(pool, subject),
        }
    }
}

/// A timed operation.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Allocating an object and writing a byte of it.
    Alloc,
    /// Freeing an object.
    Free,
    /// Allocating an object and freeing it.
    Pair,
}

impl Op {
    /// Returns the printed name.
    pub fn name(self) -> &'static str {
        match self {
            Op::Alloc => "alloc",
            Op::Free => "free",
            Op::Pair => "pair",
        }
    }
}

/// The cycles of an operation: the mean over a pass.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Timing {
    /// The operation.
    pub op: Op,
    /// Cycles per operation.
    pub cycles: f64,
}

impl Timing {
    fn new(op: Op, cycles: u64, objects: usize) -> Timing {
        Timing {
            op,
            cycles: cycles as f64 / objects as f64,
        }
    }
}

/// Fills `slots` with new objects and writes a byte of each. The caller times it.
#[inline(always)]
fn alloc_into<S: Subject>(subject: &S, slots: &[AtomicPtr<u8>]) {
    for slot in slots {
        let object = subject.alloc();
        if object.is_null() {
            out_of_memory();
        }
        // SAFETY: `alloc` returned the object just now, so this thread owns it. It has at least one
        // byte. The write is volatile so that the compiler does not drop it.
        unsafe { object.write_volatile(1) };
        slot.store(object, Ordering::Relaxed);
    }
}

/// Frees the objects in `slots`. The caller times it.
///
/// # Safety
///
/// `slots` hold objects of `subject`, and no thread uses them any more.
#[inline(always)]
unsafe fn free_from<S: Subject>(subject: &S, slots: &[AtomicPtr<u8>]) {
    for slot in slots {
        // SAFETY: the caller promises that the object is `subject`'s and not in use.
        unsafe { subject.free(slot.load(Ordering::Relaxed)) };
    }
}

#[cold]
fn out_of_memory() -> ! {
    eprintln!(
        "pinfold-bench: a subject has no memory for its objects; give smaller --sizes or fewer --threads"
    );
    std::process::exit(1);
}
