//! How threads wait for each other: by spinning, so that a waiting thread goes on within a few
//! cycles.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// How often a thread checks what it waits for before it yields its CPU.
const TURNS: u32 = 100;
/// The same for a thread that has its CPU to itself. These checks take about as long as a thread
/// may run before the kernel preempts it.
const TURNS_ALONE: u32 = 20_000;

/// Keeps each CPU's part on cache lines of its own: on two, because CPUs fetch lines in pairs.
#[derive(Default)]
#[repr(align(128))]
pub struct Padded<T>(pub T);

/// Waits until `done` returns true. The kernel spins with preemption disabled. Here the thread that
/// this one waits for may have been preempted. So this thread yields its CPU if it has to wait
/// longer.
#[inline]
pub fn spin_until(done: impl Fn() -> bool) {
    spin(TURNS, done);
}

/// Waits until `done` returns true, and yields its CPU much later than [`spin_until`]. For threads
/// on CPUs of their own: the system call that yields would slow down what a thread times after it
/// has waited.
#[inline]
pub fn spin_long_until(done: impl Fn() -> bool) {
    spin(TURNS_ALONE, done);
}

#[inline]
fn spin(turns: u32, done: impl Fn() -> bool) {
    let mut turn = 0;
    while !done() {
        if turn < turns {
            turn += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

/// A point where threads wait for each other. They leave it within a few cycles of each other.
pub struct Barrier {
    size: usize,
    arrived: AtomicUsize,
    generation: AtomicUsize,
}

impl Barrier {
    /// Makes a barrier for `size` threads.
    pub fn new(size: usize) -> Barrier {
        Barrier {
            size,
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
        }
    }

    /// Waits until all threads have called this. What a thread did before is visible to all threads
    /// afterwards: each increment of `arrived` synchronises with the last one, and the last
    /// thread's increment of `generation` with the loads of the others.
    pub fn wait(&self) {
        let generation = self.generation.load(Acquire);
        if self.arrived.fetch_add(1, AcqRel) + 1 == self.size {
            self.arrived.store(0, Relaxed);
            self.generation.fetch_add(1, Release);
        } else {
            spin_long_until(|| self.generation.load(Acquire) != generation);
        }
    }
}
