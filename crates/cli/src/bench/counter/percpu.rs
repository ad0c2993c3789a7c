//! What the kernel's designs are made of, in user space: values per CPU, and the batch.
//!
//! The kernel updates its CPU's `s32` with preemption disabled. Here a thread may be preempted or moved between reading
//! the index and the update, and another one may then update the same CPU's value: it has to be an atomic.

use crate::bench::Padded;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// An `s32` for each CPU. All zeroes is its initial state; memory is only used for CPUs that count.
pub struct PerCpu {
    values: [Padded<AtomicI32>; pinfold_rseq::MAX_INDEX],
}

impl PerCpu {
    /// The current CPU's value.
    #[inline]
    pub fn this(&self) -> &AtomicI32 {
        // `current` is below MAX_INDEX; the remainder tells the compiler.
        &self.values[pinfold_rseq::current() % pinfold_rseq::MAX_INDEX].0
    }

    /// The sum over all CPUs that there can be.
    pub fn sum(&self) -> i64 {
        let values = self.values.iter().take(pinfold_rseq::possible());
        values.map(|value| i64::from(value.0.load(Acquire))).sum()
    }
}

/// What an add to a CPU's value comes to.
pub enum Added {
    /// It stayed there.
    Here,
    /// The value would reach the batch: nothing was changed; this was there.
    Overflows(i32),
}

/// The common start of the designs' adds: `count = *this + amount`, which stays unless it reaches the batch.
#[inline]
pub fn add_below(this: &AtomicI32, amount: i64, batch: i64) -> Added {
    let mut old = this.load(Relaxed);
    loop {
        let count = i64::from(old) + amount;
        if count.abs() >= batch {
            return Added::Overflows(old);
        }
        // Fits: it is smaller than a batch.
        match this.compare_exchange_weak(old, count as i32, Release, Relaxed) {
            Ok(_) => return Added::Here,
            Err(found) => old = found,
        }
    }
}

/// The kernel's `percpu_counter_batch`.
pub fn kernel_batch() -> i64 {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    (2 * cpus as i64).max(32)
}
