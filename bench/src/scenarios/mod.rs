//! What is done with the objects: the scenarios of slab_test, [`OBJECTS`] objects a thread at a time.
//!
//! Every scenario makes the same untimed passes for every subject, then times one. Cycles are those of all objects
//! divided by their number, loop and array included: the same for every subject.

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

/// The scenarios by name, as the command line and the rows spell them.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Scenario {
    /// One thread allocates all objects, then frees all.
    Single,
    /// One thread frees each object as soon as it has it.
    Pair,
    /// All CPUs' threads allocate all objects at once, then free them at once.
    Concurrent,
    /// All CPUs' threads free each object as soon as they have it.
    ConcurrentPair,
    /// The other CPUs' threads allocate, CPU 0's frees all.
    Remote,
    /// CPU 0's thread allocates for the others, who free at once.
    OneToN,
}

impl Scenario {
    /// The name as it is printed.
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

    /// What is timed.
    pub fn operations(self) -> &'static [Op] {
        match self {
            Scenario::Pair | Scenario::ConcurrentPair => &[Op::Pair],
            _ => &[Op::Alloc, Op::Free],
        }
    }

    /// How many of `workers` threads take part.
    pub fn threads(self, workers: usize) -> usize {
        match self {
            Scenario::Single | Scenario::Pair => 1,
            _ => workers,
        }
    }

    /// The fewest threads that it makes sense with.
    pub fn least_threads(self) -> usize {
        match self {
            Scenario::Single | Scenario::Pair => 1,
            _ => 2,
        }
    }

    /// Measures it once.
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

/// What is timed, as the rows spell it.
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
    /// The name as it is printed.
    pub fn name(self) -> &'static str {
        match self {
            Op::Alloc => "alloc",
            Op::Free => "free",
            Op::Pair => "pair",
        }
    }
}

/// Cycles an operation took, on average over a pass.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Timing {
    /// What was done.
    pub op: Op,
    /// Cycles of one.
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

/// Fills `slots` with new objects, writing a byte of each. Not timed.
#[inline(always)]
fn alloc_into<S: Subject>(subject: &S, slots: &[AtomicPtr<u8>]) {
    for slot in slots {
        let object = subject.alloc();
        if object.is_null() {
            out_of_memory();
        }
        // SAFETY: the object is at least a byte large and ours. Volatile, so that the write is made.
        unsafe { object.write_volatile(1) };
        slot.store(object, Ordering::Relaxed);
    }
}

/// Frees the objects in `slots`. Not timed.
///
/// # Safety
///
/// `slots` hold objects of `subject` that nobody uses any more.
#[inline(always)]
unsafe fn free_from<S: Subject>(subject: &S, slots: &[AtomicPtr<u8>]) {
    for slot in slots {
        // SAFETY: the caller's promise.
        unsafe { subject.free(slot.load(Ordering::Relaxed)) };
    }
}

#[cold]
fn out_of_memory() -> ! {
    eprintln!("pinfold-bench: a subject has no memory for its objects");
    std::process::exit(1);
}
