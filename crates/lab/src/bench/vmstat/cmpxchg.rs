//! `cmpxchg`: the CPU's difference, changed by a compare-exchange, as the kernel does with
//! `this_cpu_try_cmpxchg`.
//!
//! The kernel's needs no lock prefix: it addresses the CPU's data and exchanges in one instruction.
//! Here the thread may move between reading the index and the exchange, and a thread on another CPU
//! may change the same difference. So the exchange has a lock prefix. `rseq-cmpxchg` is the same
//! without the prefix, in a critical section.

use super::subject::Subject;
use super::zone::{Zone, step};
use crate::Padded;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI8, AtomicI64};

#[derive(Default)]
struct Local {
    difference: AtomicI8,
    events: AtomicI64,
}

pub struct Cmpxchg {
    threshold: i8,
    zone: Zone,
    locals: Box<[Padded<Local>]>,
}

impl Cmpxchg {
    pub fn new(threshold: i8) -> Cmpxchg {
        Cmpxchg {
            threshold,
            zone: Zone::default(),
            locals: super::subject::for_each_cpu(),
        }
    }

    fn local(&self) -> &Local {
        &self.locals[pinfold_rseq::current()].0
    }

    #[inline(always)]
    fn change<const BY: i8>(&self) {
        let difference = &self.local().difference;
        let mut old = difference.load(Relaxed);
        let fold = loop {
            let (new, fold) = step::<BY>(old, self.threshold);
            match difference.compare_exchange_weak(old, new, Relaxed, Relaxed) {
                Ok(_) => break fold,
                Err(found) => old = found,
            }
        };
        if fold != 0 {
            self.zone.add(fold);
        }
    }
}

impl Subject for Cmpxchg {
    #[inline]
    fn inc(&self) {
        self.change::<1>();
    }

    #[inline]
    fn dec(&self) {
        self.change::<-1>();
    }

    #[inline]
    fn event(&self) {
        let events = &self.local().events;
        let mut old = events.load(Relaxed);
        while let Err(found) = events.compare_exchange_weak(old, old + 1, Relaxed, Relaxed) {
            old = found;
        }
    }

    fn total(&self) -> Option<i64> {
        let differences = self.locals.iter().map(|one| &one.0.difference);
        let sum: i64 = differences.map(|one| i64::from(one.load(Relaxed))).sum();
        Some(self.zone.read()? + sum)
    }

    fn events(&self) -> i64 {
        let events = self.locals.iter().map(|one| &one.0.events);
        events.map(|one| one.load(Relaxed)).sum()
    }
}
