//! What is done with the objects: slab_test's six scenarios.
//!
//! Each scenario makes an untimed pass and then a timed one, the same for every subject. The figure
//! is the cycles of the timed pass divided by its operations. It includes the loop and the array of
//! addresses.

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

/// Number of passes of a measurement: one to warm up, and the timed one.
const PASSES: usize = 2;
/// Number of different depths that [`at_depth`] uses.
const DEPTHS: usize = 8;

/// The scenarios, in slab_test's order. The command line and the rows use these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Scenario {
    /// One thread allocates all objects, then frees all
    Single,
    /// One thread frees each object right after allocating it
    Pair,
    /// Single, in a thread on each CPU at once
    Concurrent,
    /// Pair, in a thread on each CPU at once
    ConcurrentPair,
    /// The threads of all CPUs but the first allocate; the first CPU's thread frees all
    Remote,
    /// The first CPU's thread allocates for the others, which free at the same time
    OneToN,
    /// One thread allocates and frees several objects per call
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

    /// Returns how many threads of a crew take part.
    pub fn threads(self, crew: &Crew) -> usize {
        match self {
            Scenario::Single | Scenario::Pair | Scenario::Bulk => 1,
            _ => crew.len(),
        }
    }

    /// Returns the fewest threads that the scenario needs.
    pub fn least_threads(self) -> usize {
        match self {
            Scenario::Remote | Scenario::OneToN => 2,
            _ => 1,
        }
    }

    /// Returns whether slab_test measures up to 16384 bytes here, instead of 4096.
    pub fn has_large_sizes(self) -> bool {
        matches!(self, Scenario::Single | Scenario::Pair)
    }

    /// Measures the scenario once. Returns nothing for `Bulk`, which [`bulk`](super::bulk)
    /// measures.
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

/// A timed operation.
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

/// The cycles of an operation: the mean over a pass and over the threads that made it.
#[derive(Clone, Copy)]
pub struct Timing {
    pub op: Op,
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
}

/// Returns the cycles that `work` takes.
#[inline(always)]
pub fn timed(work: impl FnOnce()) -> u64 {
    let before = cycles::now();
    work();
    cycles::now().saturating_sub(before)
}

/// Fills `slots` with new objects and writes a byte to each, because slab_test also writes to its
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

/// Runs `work` while holding some objects: another number of them in each of [`DEPTHS`] rounds.
///
/// A pair always uses the same slot of a CPU's array. The processor may mistake the slot's address
/// for that of the array's length for a moment, and then a pair costs three times as much.
/// Different depths keep such a slot from deciding the median.
pub fn at_depth<S: Subject, R>(subject: &S, round: usize, work: impl FnOnce() -> R) -> R {
    let mut held = [null_mut(); DEPTHS];
    let held = &mut held[..round % DEPTHS];
    held.fill_with(|| subject.alloc());
    let result = work();
    for &object in held.iter().filter(|object| !object.is_null()) {
        // SAFETY: this function allocated the object and gave it to no other code.
        unsafe { subject.free(object) };
    }
    result
}

/// Allocates an object and frees it, `calls` times. Nothing is written to the objects.
#[inline(always)]
fn pairs_of<S: Subject>(subject: &S, calls: usize) {
    for _ in 0..calls {
        let object = subject.alloc();
        if object.is_null() {
            out_of_memory();
        }
        // SAFETY: the call above returned the object, and nothing uses it.
        unsafe { subject.free(object) };
    }
}

/// Ends the command. Returning an error would leave the other threads waiting for this one.
#[cold]
pub fn out_of_memory() -> ! {
    eprintln!(
        "pinfold: the system has no memory for the objects; give fewer --calls or a smaller --size"
    );
    std::process::exit(2);
}
