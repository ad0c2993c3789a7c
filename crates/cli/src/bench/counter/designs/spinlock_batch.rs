//! `spinlock-batch`: the kernel's percpu_counter before the patch. An add that reaches the batch takes the lock around the
//! shared count.
//!
//! The kernel's value per CPU is plain; here it is an atomic (see [`percpu`](crate::bench::counter::percpu)), which is taken
//! by an exchange under the lock. That is skipped when nothing is there: with adds above the batch there never is.

use super::{Design, Shared};
use crate::bench::counter::percpu::{Added, PerCpu, add_below};
use crate::bench::counter::shared::Zeroed;
use crate::bench::{Padded, Spinlock};
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

pub struct SpinlockBatch {
    /// Lock and count share a line, as in the kernel's structure.
    shared: Padded<Locked>,
    batch: i64,
    counters: PerCpu,
}

struct Locked {
    lock: Spinlock,
    /// Only changed under the lock.
    count: AtomicI64,
}

// SAFETY: made of integers and atomics whose zero means unlocked and none.
unsafe impl Zeroed for SpinlockBatch {}

impl Shared for SpinlockBatch {
    fn set_batch(&mut self, batch: i64) {
        self.batch = batch;
    }
}

impl Design for SpinlockBatch {
    #[inline]
    fn add(&self, n: i64) {
        let this = self.counters.this();
        if let Added::Overflows(_) = add_below(this, n, self.batch) {
            let Locked { lock, count } = &self.shared.0;
            lock.with(|| {
                let here = match this.load(Relaxed) {
                    0 => 0,
                    _ => this.swap(0, AcqRel),
                };
                count.store(count.load(Relaxed) + i64::from(here) + n, Relaxed);
            });
        }
    }

    fn sum(&self) -> i64 {
        let Locked { lock, count } = &self.shared.0;
        lock.with(|| count.load(Relaxed) + self.counters.sum())
    }
}
