//! What is done with the objects: slab_test's six scenarios.
//!
//! Each makes an untimed pass and then a timed one, the same for every subject. Cycles are those of a pass divided by its
//! operations, with the loop and the array of addresses.

mod concurrent;
mod one_to_n;
mod remote;
mod single;

use super::crew::{Crew, Desk};
use super::subjects::Subject;
use crate::figures::cycles;
use anyhow::Result;
use serde::Serialize;
use std::ptr::null_mut;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

/// Passes of a measurement: one to warm up, and the timed one.
const PASSES: usize = 2;
/// See [`at_depth`].
const DEPTHS: usize = 8;

/// By name, as the command line and the rows spell them; in slab_test's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Scenario {
    /// One thread allocates all objects, then frees all
    Single,
    /// One thread frees each object as soon as it has it
    Pair,
    /// Single, in a thread on each CPU at once
    Concurrent,
    /// Pair, in a thread on each CPU at once
    ConcurrentPair,
    /// The other CPUs' threads allocate, CPU 0's frees all
    Remote,
    /// CPU 0's thread allocates for the others, who free at once
    OneToN,
    /// One thread allocates and frees several objects by a call
    Bulk,
}

impl Scenario {
    pub const ALL: [Scenario; 7] = [
        Scenario::Single,
        Scenario::Pair,
        Scenario::Concurrent,
        Scenario::ConcurrentPair,
        Scenario::Remote,
        Scenario::OneToN,
        Scenario::Bulk,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Scenario::Single => "single",
            Scenario::Pair => "pair",
            Scenario::Concurrent => "concurrent",
            Scenario::ConcurrentPair => "concurrent_pair",
            Scenario::Remote => "remote",
            Scenario::OneToN => "one_to_n",
            Scenario::Bulk => "bulk",
        }
    }

    /// How many of a crew take part.
    pub fn threads(self, crew: &Crew) -> usize {
        match self {
            Scenario::Single | Scenario::Pair | Scenario::Bulk => 1,
            _ => crew.len(),
        }
    }

    /// The fewest threads that it makes sense with.
    pub fn least_threads(self) -> usize {
        match self {
            Scenario::Remote | Scenario::OneToN => 2,
            _ => 1,
        }
    }

    /// Whether slab_test goes up to 16384 bytes here; else to 4096.
    pub fn has_large_sizes(self) -> bool {
        matches!(self, Scenario::Single | Scenario::Pair)
    }

    /// Measures it once. What is allocated in bulk is no subject's: that has a measurement of its own.
    pub fn measure<S: Subject>(
        self,
        crew: &Crew,
        subject: &S,
        round: usize,
    ) -> Result<Vec<Timing>> {
        match self {
            Scenario::Single => Ok(single::all(crew, subject)),
            Scenario::Pair => Ok(single::pairs(crew, subject, round)),
            Scenario::Concurrent => concurrent::all(crew, subject),
            Scenario::ConcurrentPair => concurrent::pairs(crew, subject, round),
            Scenario::Remote => remote::measure(crew, subject),
            Scenario::OneToN => one_to_n::measure(crew, subject),
            Scenario::Bulk => Ok(Vec::new()),
        }
    }
}

/// What is timed, as the rows spell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    Alloc,
    Free,
    Pair,
}

impl Op {
    pub fn name(self) -> &'static str {
        match self {
            Op::Alloc => "alloc",
            Op::Free => "free",
            Op::Pair => "pair",
        }
    }
}

/// Cycles of an operation, on average over a pass and over the threads that made it.
#[derive(Clone, Copy)]
pub struct Timing {
    pub op: Op,
    pub cycles: f64,
}

impl Timing {
    /// From the cycles of all, and how many operations they made.
    fn new(op: Op, cycles: u64, operations: usize) -> Timing {
        Timing {
            op,
            cycles: cycles as f64 / operations as f64,
        }
    }
}

/// Cycles that `work` takes.
#[inline(always)]
pub fn timed(work: impl FnOnce()) -> u64 {
    let before = cycles::now();
    work();
    cycles::now().saturating_sub(before)
}

/// Fills `slots` with new objects, writing a byte of each: slab_test frees nothing that it has not touched.
#[inline(always)]
fn alloc_into<S: Subject>(subject: &S, slots: &[AtomicPtr<u8>]) {
    for slot in slots {
        let object = subject.alloc();
        if object.is_null() {
            out_of_memory();
        }
        // SAFETY: the object is ours and has a byte. Volatile, so that the write is made.
        unsafe { object.write_volatile(23) };
        slot.store(object, Relaxed);
    }
}

/// Frees the objects in `slots`.
///
/// # Safety
///
/// They are `subject`'s, and nobody uses them any more.
#[inline(always)]
unsafe fn free_from<S: Subject>(subject: &S, slots: &[AtomicPtr<u8>]) {
    for slot in slots {
        // SAFETY: the caller's promise.
        unsafe { subject.free(slot.load(Relaxed)) };
    }
}

/// Runs `work` with some objects in hand, another number in each of [`DEPTHS`] rounds.
///
/// Pairs always use the same slot of a CPU's array. Its address and that of the array's length may be ones that the CPU
/// takes for the same for a moment, and then a pair costs three times as much: that shall not decide a median.
pub fn at_depth<S: Subject, R>(subject: &S, round: usize, work: impl FnOnce() -> R) -> R {
    let mut held = [null_mut(); DEPTHS];
    let held = &mut held[..round % DEPTHS];
    held.fill_with(|| subject.alloc());
    let result = work();
    for &object in held.iter().filter(|object| !object.is_null()) {
        // SAFETY: allocated above, and not used.
        unsafe { subject.free(object) };
    }
    result
}

/// Allocates an object and frees it, `calls` times; nothing is written to it.
#[inline(always)]
fn pairs_of<S: Subject>(subject: &S, calls: usize) {
    for _ in 0..calls {
        let object = subject.alloc();
        if object.is_null() {
            out_of_memory();
        }
        // SAFETY: allocated just above, and not used.
        unsafe { subject.free(object) };
    }
}

/// Ends the command: the other threads wait for this one, and would for ever.
#[cold]
pub fn out_of_memory() -> ! {
    eprintln!("pinfold: no memory for the objects; give fewer --calls or smaller --size");
    std::process::exit(2);
}
