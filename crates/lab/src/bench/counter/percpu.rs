//! What the kernel's designs share, in user space: per-CPU values and the batch.
//!
//! The kernel updates its CPU's `s32` with preemption disabled. Here a thread may be preempted or
//! moved between reading the index and updating the value, and another thread may then update the
//! same CPU's value. So the value is an atomic.

use crate::Padded;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// An `s32` for each CPU. All zero bytes is its initial state. Only the values of CPUs that count
/// are backed by memory.
pub struct PerCpu {
    values: [Padded<AtomicI32>; pinfold_rseq::MAX_INDEX],
}

impl PerCpu {
    /// Returns the current CPU's value.
    #[inline]
    pub fn this(&self) -> &AtomicI32 {
        // `current` is below MAX_INDEX. The remainder lets the compiler drop the bounds check.
        &self.values[pinfold_rseq::current() % pinfold_rseq::MAX_INDEX].0
    }

    /// Returns the values of all possible CPUs.
    pub fn each(&self) -> impl Iterator<Item = &AtomicI32> {
        let values = self.values.iter().take(pinfold_rseq::possible());
        values.map(|value| &value.0)
    }

    /// Returns the sum over all possible CPUs.
    pub fn sum(&self) -> i64 {
        self.each()
            .map(|value| i64::from(value.load(Acquire)))
            .sum()
    }
}

/// The outcome of an add to a CPU's value.
pub enum Added {
    /// The value holds the sum.
    Here,
    /// The sum would reach the batch, so the value was not changed. Holds the value found.
    Overflows(i32),
}

/// Adds `amount` to the CPU's value unless the result reaches the batch: the common start of the
/// designs' adds.
#[inline]
pub fn add_below(this: &AtomicI32, amount: i64, batch: i64) -> Added {
    let mut old = this.load(Relaxed);
    loop {
        let count = i64::from(old) + amount;
        if count.abs() >= batch {
            return Added::Overflows(old);
        }
        // The cast fits: `count` is smaller than a batch.
        match this.compare_exchange_weak(old, count as i32, Release, Relaxed) {
            Ok(_) => return Added::Here,
            Err(found) => old = found,
        }
    }
}

/// The largest batch that fits the per-CPU values: the value and one more add stay below 2^31.
pub const MAX_BATCH: i64 = 1 << 30;

/// Returns the kernel's `percpu_counter_batch`.
pub fn kernel_batch() -> i64 {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    (2 * cpus as i64).max(32)
}
