//! `add-start-percpu`: Shaohua Li's reply, with what he proposes as the next step: a per-CPU
//! `add_start`, to bounce its cache line less.
//!
//! The adds and the sum work as in [`add_start`](super::add_start), with one difference: an add
//! counts itself in its CPU's `add_start`, and a sum waits until each CPU's `add_start` is 0.
//!
//! The thread may move to another CPU during its add. So the add keeps to the counts of the CPU on
//! which it began.

use super::{Design, Shared};
use crate::Padded;
use crate::bench::Spinlock;
use crate::bench::counter::percpu::{Added, PerCpu, add_below};
use crate::bench::counter::shared::Zeroed;
use crate::spin_until;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicI64};

pub struct AddStartPerCpu {
    shared: Padded<Fields>,
    batch: i64,
    counters: PerCpu,
    /// The number of adds of each CPU that are past their batch.
    add_start: PerCpu,
}

struct Fields {
    sum_start: AtomicI32,
    count: AtomicI64,
    /// Held by a sum, so that sums run one at a time.
    lock: Spinlock,
}

// SAFETY: the type holds only integers, padding and atomics, for which zero bytes are valid. A zero
// `Spinlock` is unlocked.
unsafe impl Zeroed for AddStartPerCpu {}

impl Shared for AddStartPerCpu {
    fn set_batch(&mut self, batch: i64) {
        self.batch = batch;
    }
}

impl Fields {
    /// Keeps sums out until the caller decrements `add_start`.
    #[inline]
    fn start_add(&self, add_start: &AtomicI32) {
        loop {
            // Both pairs, here and in `sum`, are sequentially consistent: at least one side sees
            // the other's increment.
            add_start.fetch_add(1, SeqCst);
            if self.sum_start.load(SeqCst) == 0 {
                return;
            }
            add_start.fetch_sub(1, Release);
            spin_until(|| self.sum_start.load(Acquire) == 0);
        }
    }
}

impl Design for AddStartPerCpu {
    #[inline]
    fn add(&self, n: i64) {
        let this = self.counters.this();
        if let Added::Overflows(here) = add_below(this, n, self.batch) {
            let (shared, add_start) = (&self.shared.0, self.add_start.this());
            shared.start_add(add_start);
            shared.count.fetch_add(i64::from(here) + n, AcqRel);
            if here != 0 {
                this.fetch_sub(here, Release);
            }
            add_start.fetch_sub(1, Release);
        }
    }

    fn sum(&self) -> i64 {
        let shared = &self.shared.0;
        shared.lock.with(|| {
            shared.sum_start.fetch_add(1, SeqCst);
            // An add that begins later finds `sum_start`, and takes its own count back.
            for add_start in self.add_start.each() {
                spin_until(|| add_start.load(SeqCst) == 0);
            }
            let sum = shared.count.load(Acquire) + self.counters.sum();
            shared.sum_start.fetch_sub(1, Release);
            sum
        })
    }
}
