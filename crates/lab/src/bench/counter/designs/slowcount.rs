//! `slowcount`: Eric Dumazet's patch. The shared count is an atomic.
//!
//! While a sum runs, adds go to a second atomic, `slowcount`, so that the per-CPU values stand
//! still. An add may have passed that check before the sum began. Such an add increments a sequence
//! number, and a sum that sees the number change starts over.
//!
//! Two things differ from the kernel, which has preemption disabled here:
//!
//! - The kernel sets the CPU's value to 0 by a plain store after adding the value to the count.
//!   Here another thread may change the value in between, so the add subtracts what it has added to
//!   the count.
//! - The sequence number is an atomic: a preempted plain increment could store an old number.
//!
//! One error of the patch remains: between these two steps of an add, a sum counts the CPU's value
//! twice.

use super::{Design, Shared};
use crate::Padded;
use crate::bench::counter::percpu::{Added, PerCpu, add_below};
use crate::bench::counter::shared::Zeroed;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32};

pub struct Slowcount {
    /// Apart from what adds write, so that adds do not invalidate this line.
    mostly_read: Padded<MostlyRead>,
    /// The patch's `percpu_counter_rw`, on cache lines of its own.
    written: Padded<Written>,
    counters: PerCpu,
}

struct MostlyRead {
    /// Number of sums that are running.
    sum_cnt: AtomicI32,
    batch: i64,
}

struct Written {
    count: AtomicI64,
    sequence: AtomicU32,
    slowcount: AtomicI64,
}

// SAFETY: the type holds only integers, padding and atomics, for which zero bytes are valid.
unsafe impl Zeroed for Slowcount {}

impl Shared for Slowcount {
    fn set_batch(&mut self, batch: i64) {
        self.mostly_read.0.batch = batch;
    }
}

impl Design for Slowcount {
    #[inline(always)]
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
            // Pairs with the increment in `add`: a sum that sees the new number sees the new count.
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
