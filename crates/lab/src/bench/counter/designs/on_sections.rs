//! `spinlock-rseq`, `total-rseq` and `overstep-rseq`: simple designs on per-CPU words that
//! restartable sequences protect.
//!
//! The kernel's `this_cpu` operations have no lock prefix, because preemption is disabled. These
//! designs have the same cost: an add is one critical section, which returns the CPU's new value.
//! If that has reached the batch, a second section takes the value, and the thread adds it to the
//! shared count. An add of a batch or more goes to the shared count at once.
//!
//! A read of the shared count has no bound: a thread that is preempted in between holds an amount
//! that is nowhere.

use super::Design;
use crate::Padded;
use crate::bench::Spinlock;
use pinfold::percpu::PerCpu;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

/// `spinlock-rseq`: the kernel's percpu_counter of 2011, and of today. A spinlock protects the
/// shared count.
pub struct SpinlockRseq {
    local: PerCpu<i64>,
    /// The lock and the count share a cache line, as in the kernel's structure.
    shared: Padded<(Spinlock, AtomicI64)>,
    batch: i64,
}

impl SpinlockRseq {
    pub fn new(batch: i64) -> Self {
        SpinlockRseq {
            local: PerCpu::new(),
            shared: Padded((Spinlock::default(), AtomicI64::new(0))),
            batch,
        }
    }

    /// Adds `n` and this CPU's value to the shared count.
    #[cold]
    #[inline(never)]
    fn fold(&self, n: i64) {
        let (lock, count) = &self.shared.0;
        lock.with(|| {
            let here = self.local.xchg(0);
            count.store(count.load(Relaxed) + here + n, Relaxed);
        });
    }
}

impl Design for SpinlockRseq {
    #[inline(always)]
    fn add(&self, n: i64) {
        if n.abs() >= self.batch {
            return self.fold(n);
        }
        if self.local.add_return(n).abs() >= self.batch {
            self.fold(0);
        }
    }

    fn sum(&self) -> i64 {
        let (lock, count) = &self.shared.0;
        lock.with(|| count.load(Relaxed) + self.local.sum())
    }
}

/// `total-rseq`: the shared count is an atomic. `overstep-rseq`: also, a fold leaves half a batch
/// on the other side, as vmstat's does.
pub struct TotalRseq<const OVERSTEP: bool> {
    local: PerCpu<i64>,
    count: Padded<AtomicI64>,
    batch: i64,
}

impl<const OVERSTEP: bool> TotalRseq<OVERSTEP> {
    pub fn new(batch: i64) -> Self {
        TotalRseq {
            local: PerCpu::new(),
            count: Padded(AtomicI64::new(0)),
            batch,
        }
    }

    /// Folds this CPU's value, which has reached the batch as `now`.
    #[cold]
    #[inline(never)]
    fn fold(&self, now: i64) {
        let left = match OVERSTEP {
            true => -now.signum() * (self.batch / 2),
            false => 0,
        };
        let here = self.local.xchg(left);
        self.count.0.fetch_add(here - left, AcqRel);
    }
}

impl<const OVERSTEP: bool> Design for TotalRseq<OVERSTEP> {
    #[inline(always)]
    fn add(&self, n: i64) {
        if n.abs() >= self.batch {
            self.count.0.fetch_add(n, AcqRel);
            return;
        }
        let now = self.local.add_return(n);
        let is_past = match OVERSTEP {
            // As vmstat, which folds beyond the threshold.
            true => now.abs() > self.batch,
            false => now.abs() >= self.batch,
        };
        if is_past {
            self.fold(now);
        }
    }

    fn sum(&self) -> i64 {
        self.count.0.load(Acquire) + self.local.sum()
    }
}
