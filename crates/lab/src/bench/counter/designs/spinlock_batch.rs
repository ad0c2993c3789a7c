//! `spinlock-batch`: the kernel's percpu_counter before the patch. An add that reaches the batch
//! takes the lock of the shared count.
//!
//! The kernel's per-CPU value is a plain integer. Here it is an atomic (see
//! [`percpu`](crate::bench::counter::percpu)), and the lock's holder takes it by an exchange. The
//! holder skips the exchange if the value is 0. With adds above the batch it always is.

use super::{Design, Shared};
use crate::Padded;
use crate::bench::Spinlock;
use crate::bench::counter::percpu::{Added, PerCpu, add_below};
use crate::bench::counter::shared::Zeroed;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

pub struct SpinlockBatch {
    /// The lock and the count share a cache line, as in the kernel's structure.
    shared: Padded<Locked>,
    batch: i64,
    counters: PerCpu,
}

struct Locked {
    lock: Spinlock,
    /// Changed only by the lock's holder.
    count: AtomicI64,
}

// SAFETY: the type holds only integers, padding and atomics, for which zero bytes are valid. A zero
// `Spinlock` is unlocked.
unsafe impl Zeroed for SpinlockBatch {}

impl Shared for SpinlockBatch {
    fn set_batch(&mut self, batch: i64) {
        self.batch = batch;
    }
}

impl Design for SpinlockBatch {
    #[inline(always)]
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
