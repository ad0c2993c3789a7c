//! Pinfold's peers: items with a difference for each CPU, in the ways of the kernel.

use super::subject::{Op, Subject, for_each_cpu};
use super::zone::{Zone, step};
use crate::Padded;
use crate::bench::{Spinlock, masked};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI8, AtomicI32, AtomicI64};

/// One CPU's difference and events, and a way to change them.
pub trait Local: Default + Send + Sync {
    /// Whether a handler may interrupt a change without loss of counts.
    const BEARS_SIGNALS: bool = true;

    /// Changes the difference by `BY`, which is 1 or -1. Returns what is folded, or 0.
    fn step<const BY: i8>(&self, threshold: i8) -> i64;

    /// Counts an event.
    fn event(&self);

    /// Makes a change. Returns what is folded, or 0.
    #[inline(always)]
    fn change(&self, op: Op, threshold: i8) -> i64 {
        match op {
            Op::Inc => self.step::<1>(threshold),
            Op::Dec => self.step::<-1>(threshold),
            Op::Event => {
                self.event();
                0
            }
        }
    }

    /// Makes a change in a handler that may have interrupted another change.
    fn in_handler(&self, op: Op, threshold: i8) -> i64 {
        self.change(op, threshold)
    }

    /// Returns the difference.
    fn difference(&self) -> i64;

    /// Returns the number of events.
    fn events(&self) -> i64;
}

/// An item whose CPUs change their differences in the way of `L`.
pub struct Peer<L> {
    pub threshold: i8,
    pub zone: Zone,
    pub locals: Box<[Padded<L>]>,
}

impl<L: Local> Peer<L> {
    pub fn new(threshold: i8) -> Self {
        Peer {
            threshold,
            zone: Zone::default(),
            locals: for_each_cpu(),
        }
    }

    #[inline(always)]
    fn local(&self) -> &L {
        &self.locals[pinfold_rseq::current()].0
    }

    #[inline(always)]
    fn fold(&self, fold: i64) {
        if fold != 0 {
            self.zone.add(fold);
        }
    }
}

impl<L: Local> Subject for Peer<L> {
    #[inline(always)]
    fn change(&self, op: Op) {
        self.fold(self.local().change(op, self.threshold));
    }

    fn in_handler(&self, op: Op) {
        self.fold(self.local().in_handler(op, self.threshold));
    }

    fn bears_signals(&self) -> bool {
        L::BEARS_SIGNALS
    }

    fn total(&self) -> Option<i64> {
        let differences = self.locals.iter().map(|local| local.0.difference());
        Some(self.zone.read()? + differences.sum::<i64>())
    }

    fn events(&self) -> i64 {
        self.locals.iter().map(|local| local.0.events()).sum()
    }
}

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

/// `unprotected` and `unprotected-byte`: the words are changed by plain loads and stores without
/// any protection. The kernel's `__inc_zone_page_state` does this, where its caller has disabled
/// interrupts.
///
/// The difference of `unprotected` has four bytes. That of `unprotected-byte` has one, as in the
/// kernel. Some CPUs load a word of four or eight bytes faster than a byte if they have just stored
/// it.
///
/// What another subject takes beyond this one is the cost of its protection. A signal handler that
/// interrupts the change loses counts. So this subject is measured without signals only.
#[derive(Default)]
#[repr(C)]
pub struct Unprotected<D> {
    pub difference: D,
    pub events: AtomicI64,
}

impl<D: Difference> Local for Unprotected<D> {
    const BEARS_SIGNALS: bool = false;

    #[inline(always)]
    fn step<const BY: i8>(&self, threshold: i8) -> i64 {
        let (after, fold) = step::<BY>(self.difference.get(), threshold);
        self.difference.set(after);
        fold
    }

    #[inline(always)]
    fn event(&self) {
        self.events.store(self.events.load(Relaxed) + 1, Relaxed);
    }

    fn difference(&self) -> i64 {
        self.difference.get().into()
    }

    fn events(&self) -> i64 {
        self.events.load(Relaxed)
    }
}

/// `cmpxchg`: the words are changed by a compare-exchange, as the kernel does with
/// `this_cpu_try_cmpxchg`.
///
/// The kernel's needs no lock prefix: it addresses the CPU's data and exchanges in one instruction.
/// Here the thread may move between reading the index and the exchange, and a thread on another CPU
/// may change the same difference. So the exchange has a lock prefix. `rseq-cmpxchg` is the same
/// without the prefix, in a critical section.
#[derive(Default)]
pub struct Cmpxchg(Unprotected<AtomicI8>);

impl Local for Cmpxchg {
    #[inline(always)]
    fn step<const BY: i8>(&self, threshold: i8) -> i64 {
        let difference = &self.0.difference;
        let mut old = difference.load(Relaxed);
        loop {
            let (new, fold) = step::<BY>(old, threshold);
            match difference.compare_exchange_weak(old, new, Relaxed, Relaxed) {
                Ok(_) => return fold,
                Err(found) => old = found,
            }
        }
    }

    #[inline(always)]
    fn event(&self) {
        let events = &self.0.events;
        let mut old = events.load(Relaxed);
        while let Err(found) = events.compare_exchange_weak(old, old + 1, Relaxed, Relaxed) {
            old = found;
        }
    }

    fn difference(&self) -> i64 {
        self.0.difference()
    }

    fn events(&self) -> i64 {
        self.0.events()
    }
}

/// `masked-signals`: the words are changed with all signals masked.
///
/// Masked signals keep handlers off the words, but not other threads. Only one thread is measured.
#[derive(Default)]
pub struct MaskedSignals(Unprotected<AtomicI8>);

impl Local for MaskedSignals {
    #[inline(always)]
    fn step<const BY: i8>(&self, threshold: i8) -> i64 {
        masked(|| self.0.step::<BY>(threshold))
    }

    #[inline(always)]
    fn event(&self) {
        masked(|| self.0.event());
    }

    fn difference(&self) -> i64 {
        self.0.difference()
    }

    fn events(&self) -> i64 {
        self.0.events()
    }
}

/// `locked`: the words behind a spinlock of the CPU.
///
/// A signal handler must not wait for a lock that the interrupted thread holds. A handler that
/// finds the lock taken changes an atomic, `aside`, which reads include.
#[derive(Default)]
pub struct Locked {
    lock: Spinlock,
    words: Unprotected<AtomicI8>,
    /// The changes that handlers could not make behind the lock: of the item, and of the events.
    aside: [AtomicI64; 2],
}

impl Local for Locked {
    #[inline(always)]
    fn step<const BY: i8>(&self, threshold: i8) -> i64 {
        self.lock.with(|| self.words.step::<BY>(threshold))
    }

    #[inline(always)]
    fn event(&self) {
        self.lock.with(|| self.words.event());
    }

    fn in_handler(&self, op: Op, threshold: i8) -> i64 {
        let changed = self.lock.try_with(|| self.words.change(op, threshold));
        changed.unwrap_or_else(|| {
            self.aside[usize::from(op == Op::Event)].fetch_add(op.by(), Relaxed);
            0
        })
    }

    fn difference(&self) -> i64 {
        self.words.difference() + self.aside[0].load(Relaxed)
    }

    fn events(&self) -> i64 {
        self.words.events() + self.aside[1].load(Relaxed)
    }
}
