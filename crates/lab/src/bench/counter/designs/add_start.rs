//! `add-start`: Shaohua Li's reply. The shared count is an atomic.
//!
//! An add that reaches the batch and a sum exclude each other:
//!
//! - The add increments `add_start`. If a sum is running, the add takes the increment back, waits
//!   until the sum has ended, and tries again.
//! - The sum increments `sum_start` and waits until `add_start` is 0.
//!
//! The kernel disables preemption, adds the CPU's value to the count, and then sets the value to 0
//! by a plain store. Here another thread may change the value in between, so the add subtracts what
//! it has added to the count.

use super::{Design, Shared};
use crate::Padded;
use crate::bench::Spinlock;
use crate::bench::counter::percpu::{Added, PerCpu, add_below};
use crate::bench::counter::shared::Zeroed;
use crate::spin_until;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicI64};

pub struct AddStart {
    /// The patch keeps these fields in one structure too.
    shared: Padded<Fields>,
    batch: i64,
    counters: PerCpu,
}

struct Fields {
    sum_start: AtomicI32,
    add_start: AtomicI32,
    count: AtomicI64,
    /// Held by a sum, so that sums run one at a time.
    lock: Spinlock,
}

// SAFETY: the type holds only integers, padding and atomics, for which zero bytes are valid. A zero
// `Spinlock` is unlocked.
unsafe impl Zeroed for AddStart {}

impl Shared for AddStart {
    fn set_batch(&mut self, batch: i64) {
        self.batch = batch;
    }
}

impl Fields {
    /// Keeps sums out until the caller decrements `add_start`.
    #[inline]
    fn start_add(&self) {
        loop {
            // Both pairs, here and in `sum`, are sequentially consistent: at least one side sees
            // the other's increment.
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
