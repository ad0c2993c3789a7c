//! `unprotected` and `unprotected-byte`: the CPU's difference, changed by plain loads and stores
//! without any protection. The kernel's `__inc_zone_page_state` does this, where its caller has
//! disabled interrupts.
//!
//! The difference of `unprotected` has four bytes. That of `unprotected-byte` has one, as in the
//! kernel. Some CPUs load a word of four or eight bytes faster than a byte if they have just stored
//! it.
//!
//! What another subject takes beyond this one is the cost of its protection. A signal handler that
//! interrupts the change loses counts. So this subject is measured without signals only.

use super::subject::Subject;
use super::zone::{Zone, step};
use crate::Padded;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI8, AtomicI32, AtomicI64};

/// A difference. Each access is a plain load or store; the types are atomics only for Rust's sake.
pub trait Difference: Default + Send + Sync {
    fn get(&self) -> i8;
    fn set(&self, value: i8);
}

impl Difference for AtomicI8 {
    fn get(&self) -> i8 {
        self.load(Relaxed)
    }

    fn set(&self, value: i8) {
        self.store(value, Relaxed);
    }
}

impl Difference for AtomicI32 {
    fn get(&self) -> i8 {
        // A difference is at most the threshold, which fits into a byte.
        self.load(Relaxed) as i8
    }

    fn set(&self, value: i8) {
        self.store(value.into(), Relaxed);
    }
}

#[derive(Default)]
struct Local<D> {
    difference: D,
    events: AtomicI64,
}

pub struct Unprotected<D> {
    threshold: i8,
    zone: Zone,
    locals: Box<[Padded<Local<D>>]>,
}

impl<D: Difference> Unprotected<D> {
    pub fn new(threshold: i8) -> Self {
        Unprotected {
            threshold,
            zone: Zone::default(),
            locals: super::subject::for_each_cpu(),
        }
    }

    fn local(&self) -> &Local<D> {
        &self.locals[pinfold_rseq::current()].0
    }

    #[inline(always)]
    fn change<const BY: i8>(&self) {
        let difference = &self.local().difference;
        let (after, fold) = step::<BY>(difference.get(), self.threshold);
        difference.set(after);
        if fold != 0 {
            self.zone.add(fold);
        }
    }
}

impl<D: Difference> Subject for Unprotected<D> {
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
        events.store(events.load(Relaxed) + 1, Relaxed);
    }

    fn bears_signals(&self) -> bool {
        false
    }

    fn total(&self) -> Option<i64> {
        let differences = self.locals.iter().map(|one| &one.0.difference);
        let sum: i64 = differences.map(|one| i64::from(one.get())).sum();
        Some(self.zone.read()? + sum)
    }

    fn events(&self) -> i64 {
        let events = self.locals.iter().map(|one| &one.0.events);
        events.map(|one| one.load(Relaxed)).sum()
    }
}
