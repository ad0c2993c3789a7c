//! `locked`: the CPU's difference behind a spinlock.
//!
//! A signal handler must not wait for a lock that the interrupted thread holds. A handler that
//! finds the lock taken adds its increment to an atomic, `aside`, which reads include.

use super::subject::Subject;
use super::zone::{Zone, increment_plain};
use pinfold_benchkit::Padded;
use std::cell::UnsafeCell;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI64};

#[derive(Default)]
struct Local {
    taken: AtomicBool,
    /// Belongs to the thread that set `taken`.
    difference: UnsafeCell<i8>,
}

// SAFETY: `difference` is accessed only by the thread that set `taken`, which releases it with
// release ordering.
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

    /// Increments the difference and unlocks.
    ///
    /// # Safety
    ///
    /// The caller holds the lock.
    #[inline(always)]
    unsafe fn increment(&self, threshold: i8, zone: &Zone) {
        // SAFETY: the caller holds the lock, so no other thread accesses the difference.
        increment_plain(unsafe { &mut *self.difference.get() }, threshold, zone);
        self.taken.store(false, Release);
    }
}

pub struct Locked {
    threshold: i8,
    zone: Zone,
    locals: Box<[Padded<Local>]>,
    aside: AtomicI64,
}

impl Locked {
    pub fn new(threshold: i8) -> Locked {
        Locked {
            threshold,
            zone: Zone::default(),
            locals: super::subject::for_each_cpu(),
            aside: AtomicI64::new(0),
        }
    }

    fn local(&self) -> &Local {
        &self.locals[pinfold_rseq::current()].0
    }
}

impl Subject for Locked {
    fn inc(&self) {
        let local = self.local();
        local.lock();
        // SAFETY: `lock` above took the lock.
        unsafe { local.increment(self.threshold, &self.zone) };
    }

    fn inc_in_handler(&self) {
        let local = self.local();
        if local.try_lock() {
            // SAFETY: `try_lock` above took the lock.
            unsafe { local.increment(self.threshold, &self.zone) };
        } else {
            self.aside.fetch_add(1, Relaxed);
        }
    }

    fn total(&self) -> Option<i64> {
        let mut total = self.zone.read()? + self.aside.load(Relaxed);
        for local in &self.locals {
            local.0.lock();
            // SAFETY: `lock` above took the lock.
            total += i64::from(unsafe { *local.0.difference.get() });
            local.0.taken.store(false, Release);
        }
        Some(total)
    }
}
