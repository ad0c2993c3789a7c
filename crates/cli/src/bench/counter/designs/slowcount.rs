//! `slowcount`: Eric Dumazet's patch. The shared count is an atomic; while a sum is in flight, adds go to another atomic
//! instead, so that the sum sees the values per CPU stand still; a sequence tells the sum that an add was already past
//! that check, and it looks again.
//!
//! With preemption disabled the kernel sets the CPU's value to 0 by a plain store after it was added to the count. Here
//! another thread may have changed the value in between, so that what was added is subtracted instead. The sequence is
//! an atomic for the same reason: a preempted plain increment could take it back. What the sum can get wrong stays as
//! in the patch: between the two steps the value is counted twice.

use super::{Design, Shared};
use crate::bench::Padded;
use crate::bench::counter::percpu::{Added, PerCpu, add_below};
use crate::bench::counter::shared::Zeroed;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32};

pub struct Slowcount {
    /// Mostly read.
    mostly_read: Padded<MostlyRead>,
    /// The patch's percpu_counter_rw: on lines of its own.
    written: Padded<Written>,
    counters: PerCpu,
}

struct MostlyRead {
    /// Sums in flight.
    sum_cnt: AtomicI32,
    batch: i64,
}

struct Written {
    count: AtomicI64,
    sequence: AtomicU32,
    slowcount: AtomicI64,
}

// SAFETY: made of integers and atomics whose zero means none.
unsafe impl Zeroed for Slowcount {}

impl Shared for Slowcount {
    fn set_batch(&mut self, batch: i64) {
        self.mostly_read.0.batch = batch;
    }
}

impl Design for Slowcount {
    #[inline]
    fn add(&self, n: i64) {
        let MostlyRead { sum_cnt, batch } = &self.mostly_read.0;
        let written = &self.written.0;
        if sum_cnt.load(Acquire) != 0 {
            written.slowcount.fetch_add(n, AcqRel);
            return;
        }
        let this = self.counters.this();
        if let Added::Overflows(here) = add_below(this, n, *batch) {
            written.count.fetch_add(i64::from(here) + n, AcqRel);
            written.sequence.fetch_add(1, AcqRel);
            if here != 0 {
                this.fetch_sub(here, Release);
            }
        }
    }

    fn sum(&self) -> i64 {
        let sum_cnt = &self.mostly_read.0.sum_cnt;
        let written = &self.written.0;
        sum_cnt.fetch_add(1, SeqCst);
        let sum = loop {
            let before = written.sequence.load(Acquire);
            let sum =
                written.count.load(Acquire) + self.counters.sum() + written.slowcount.load(Acquire);
            if written.sequence.load(Acquire) == before {
                break sum;
            }
        };
        sum_cnt.fetch_sub(1, AcqRel);
        sum
    }
}
