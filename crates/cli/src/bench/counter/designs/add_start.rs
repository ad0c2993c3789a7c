//! `add-start`: Shaohua Li's reply. The shared count is an atomic; adds that reach the batch and sums keep out of each
//! other's way: an add announces itself in `add_start`, backs out when a sum runs and waits for its end; a sum announces
//! itself in `sum_start` and waits for the adds that have begun.
//!
//! With preemption disabled the kernel sets the CPU's value to 0 by a plain store after it was added to the count. Here
//! another thread may have changed the value in between, so that what was added is subtracted instead.

use super::{Design, Shared};
use crate::bench::counter::percpu::{Added, PerCpu, add_below};
use crate::bench::counter::shared::Zeroed;
use crate::bench::spin_until;
use crate::bench::{Padded, Spinlock};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicI64};

pub struct AddStart {
    /// All in one structure, as in the patch.
    shared: Padded<Fields>,
    batch: i64,
    counters: PerCpu,
}

struct Fields {
    sum_start: AtomicI32,
    add_start: AtomicI32,
    count: AtomicI64,
    /// One sum at a time.
    lock: Spinlock,
}

// SAFETY: made of integers and atomics whose zero means unlocked and none.
unsafe impl Zeroed for AddStart {}

impl Shared for AddStart {
    fn set_batch(&mut self, batch: i64) {
        self.batch = batch;
    }
}

impl Fields {
    /// Keeps sums out until `add_start` is taken back.
    #[inline]
    fn start_add(&self) {
        loop {
            // Sequentially consistent, with the sum's pair: not both may miss each other.
            self.add_start.fetch_add(1, SeqCst);
            if self.sum_start.load(SeqCst) == 0 {
                return;
            }
            self.add_start.fetch_sub(1, Release);
            spin_until(|| self.sum_start.load(Acquire) == 0);
        }
    }
}

impl Design for AddStart {
    #[inline]
    fn add(&self, n: i64) {
        let this = self.counters.this();
        if let Added::Overflows(here) = add_below(this, n, self.batch) {
            let shared = &self.shared.0;
            shared.start_add();
            shared.count.fetch_add(i64::from(here) + n, AcqRel);
            if here != 0 {
                this.fetch_sub(here, Release);
            }
            shared.add_start.fetch_sub(1, Release);
        }
    }

    fn sum(&self) -> i64 {
        let shared = &self.shared.0;
        shared.lock.with(|| {
            shared.sum_start.fetch_add(1, SeqCst);
            spin_until(|| shared.add_start.load(SeqCst) == 0);
            let sum = shared.count.load(Acquire) + self.counters.sum();
            shared.sum_start.fetch_sub(1, Release);
            sum
        })
    }
}
