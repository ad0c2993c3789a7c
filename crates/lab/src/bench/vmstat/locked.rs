//! `locked`: the CPU's difference behind a spinlock.
//!
//! A signal handler must not wait for a lock that the interrupted thread holds. A handler that
//! finds the lock taken changes an atomic, `aside`, which reads include.

use super::subject::{Op, Subject};
use super::zone::{Zone, change_plain};
use crate::Padded;
use std::cell::UnsafeCell;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI64};

#[derive(Default)]
struct Local {
    taken: AtomicBool,
    /// Belongs to the thread that set `taken`.
    counts: UnsafeCell<Counts>,
}

#[derive(Default)]
struct Counts {
    difference: i8,
    events: i64,
}

// SAFETY: `counts` is accessed only by the thread that set `taken`, which releases it with release
// ordering.
unsafe impl Sync for Local {}

impl Local {
    fn try_lock(&self) -> bool {
        !self.taken.swap(true, Acquire)
    }

    fn lock(&self) {
        while !self.try_lock() {
            // The holder may be a preempted thread of this CPU. Spinning could last a whole time
            // slice.
            std::thread::yield_now();
        }
    }

    /// Changes the counts and unlocks.
    ///
    /// # Safety
    ///
    /// The caller holds the lock.
    #[inline(always)]
    unsafe fn change<R>(&self, change: impl FnOnce(&mut Counts) -> R) -> R {
        // SAFETY: the caller holds the lock, so no other thread accesses the counts.
        let result = change(unsafe { &mut *self.counts.get() });
        self.taken.store(false, Release);
        result
    }

    #[inline(always)]
    fn with<R>(&self, change: impl FnOnce(&mut Counts) -> R) -> R {
        self.lock();
        // SAFETY: `lock` above took the lock.
        unsafe { self.change(change) }
    }
}

pub struct Locked {
    threshold: i8,
    zone: Zone,
    locals: Box<[Padded<Local>]>,
    /// The changes that handlers could not make behind the lock: of the item, and of the events.
    aside: [AtomicI64; 2],
}

impl Locked {
    pub fn new(threshold: i8) -> Locked {
        Locked {
            threshold,
            zone: Zone::default(),
            locals: super::subject::for_each_cpu(),
            aside: Default::default(),
        }
    }

    fn local(&self) -> &Local {
        &self.locals[pinfold_rseq::current()].0
    }

    #[inline(always)]
    fn apply(&self, op: Op, counts: &mut Counts) {
        match op {
            Op::Inc => change_plain::<1>(&mut counts.difference, self.threshold, &self.zone),
            Op::Dec => change_plain::<-1>(&mut counts.difference, self.threshold, &self.zone),
            Op::Event => counts.events += 1,
        }
    }
}

impl Subject for Locked {
    #[inline]
    fn inc(&self) {
        self.local().with(|counts| self.apply(Op::Inc, counts));
    }

    #[inline]
    fn dec(&self) {
        self.local().with(|counts| self.apply(Op::Dec, counts));
    }

    #[inline]
    fn event(&self) {
        self.local().with(|counts| self.apply(Op::Event, counts));
    }

    fn in_handler(&self, op: Op) {
        let local = self.local();
        if local.try_lock() {
            // SAFETY: `try_lock` above took the lock.
            unsafe { local.change(|counts| self.apply(op, counts)) };
        } else {
            self.aside[usize::from(op == Op::Event)].fetch_add(op.by(), Relaxed);
        }
    }

    fn total(&self) -> Option<i64> {
        let locals = self.locals.iter().map(|local| &local.0);
        let differences = locals.map(|local| local.with(|counts| i64::from(counts.difference)));
        Some(self.zone.read()? + self.aside[0].load(Relaxed) + differences.sum::<i64>())
    }

    fn events(&self) -> i64 {
        let locals = self.locals.iter().map(|local| &local.0);
        let events = locals.map(|local| local.with(|counts| counts.events));
        self.aside[1].load(Relaxed) + events.sum::<i64>()
    }
}
