//! `add-start` and `add-start-percpu`: Shaohua Li's reply, without and with what he proposes as the
//! next step: a per-CPU `add_start`, to bounce its cache line less. The shared count is an atomic.
//!
//! An add that reaches the batch and a sum exclude each other:
//!
//! - The add increments `add_start`. If a sum is running, the add takes the increment back, waits
//!   until the sum has ended, and tries again.
//! - The sum increments `sum_start` and waits until `add_start` is 0.
//!
//! The kernel disables preemption, adds the CPU's value to the count, and then sets the value to 0
//! by a plain store. Here another thread may change the value in between, so the add subtracts what
//! it has added to the count. The thread may also move to another CPU during its add. So the add
//! keeps to the counts of the CPU on which it began.

use super::{Design, Shared};
use crate::Padded;
use crate::bench::Spinlock;
use crate::bench::counter::percpu::{Added, PerCpu, add_below};
use crate::bench::counter::shared::Zeroed;
use crate::spin_until;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicI64};

/// The number of adds that are past their batch. Zero bytes are a valid value.
pub trait Starts: Sync {
    /// Returns the count for an add that begins on this CPU.
    fn this(&self) -> &AtomicI32;

    /// Waits until no add is past its batch. An add that begins later finds `sum_start`, and takes
    /// its own count back.
    fn wait(&self);
}

impl Starts for AtomicI32 {
    #[inline]
    fn this(&self) -> &AtomicI32 {
        self
    }

    fn wait(&self) {
        spin_until(|| self.load(SeqCst) == 0);
    }
}

impl Starts for PerCpu {
    #[inline]
    fn this(&self) -> &AtomicI32 {
        PerCpu::this(self)
    }

    fn wait(&self) {
        self.each().for_each(Starts::wait);
    }
}

pub struct AddStart<S> {
    /// The patch keeps these fields in one structure too.
    shared: Padded<Fields<S>>,
    batch: i64,
    counters: PerCpu,
}

struct Fields<S> {
    sum_start: AtomicI32,
    add_start: S,
    count: AtomicI64,
    /// Held by a sum, so that sums run one at a time.
    lock: Spinlock,
}

// SAFETY: the type holds only integers, padding and atomics, for which zero bytes are valid. A zero
// `Spinlock` is unlocked.
unsafe impl<S: Starts> Zeroed for AddStart<S> {}

impl<S: Starts> Shared for AddStart<S> {
    fn set_batch(&mut self, batch: i64) {
        self.batch = batch;
    }
}

impl<S: Starts> Fields<S> {
    /// Keeps sums out until the caller decrements the count that this returns.
    #[inline]
    fn start_add(&self) -> &AtomicI32 {
        let add_start = self.add_start.this();
        loop {
            // Both pairs, here and in `sum`, are sequentially consistent: at least one side sees
            // the other's increment.
            add_start.fetch_add(1, SeqCst);
            if self.sum_start.load(SeqCst) == 0 {
                return add_start;
            }
            add_start.fetch_sub(1, Release);
            spin_until(|| self.sum_start.load(Acquire) == 0);
        }
    }
}

impl<S: Starts> Design for AddStart<S> {
    #[inline(always)]
    fn add(&self, n: i64) {
        let this = self.counters.this();
        if let Added::Overflows(here) = add_below(this, n, self.batch) {
            let shared = &self.shared.0;
            let add_start = shared.start_add();
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
            shared.add_start.wait();
            let sum = shared.count.load(Acquire) + self.counters.sum();
            shared.sum_start.fetch_sub(1, Release);
            sum
        })
    }
}
