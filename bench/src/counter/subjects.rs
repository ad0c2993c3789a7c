//! The counters: Pinfold's, plain atomics, and the strongest peers, behind one trait.

use clap::ValueEnum;
use pinfold::counter::{EventCounter, PerCpuCounter};
use pinfold::vmstat::{Item, VmStat, Zone};
use serde::Serialize;
use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

/// The subjects.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Name {
    /// `EventCounter::inc`.
    PinfoldEvent,
    /// `PerCpuCounter::inc`.
    Pinfold,
    /// `VmStat::inc`.
    Vmstat,
    /// One `AtomicI64` for all threads.
    Atomic,
    /// An `AtomicI64` for each thread, 128 bytes apart: the cost of a locked add without
    /// contention.
    AtomicOwn,
    /// fast-telemetry's `Counter::inc`.
    FastTelemetry,
    /// fast-counter's `ConcurrentCounter::add`.
    FastCounter,
    /// A `Cell<i64>` of the thread, which no other thread can read: the lower bound.
    ThreadLocal,
}

impl Name {
    /// Returns the name used on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Name::PinfoldEvent => "pinfold-event",
            Name::Pinfold => "pinfold",
            Name::Vmstat => "vmstat",
            Name::Atomic => "atomic",
            Name::AtomicOwn => "atomic-own",
            Name::FastTelemetry => "fast-telemetry",
            Name::FastCounter => "fast-counter",
            Name::ThreadLocal => "thread-local",
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A counter that threads add to.
pub trait Subject: Sync + Sized {
    /// Makes a counter at 0. A peer with shards makes `shards` of them. Pinfold's counters have one
    /// for each possible CPU.
    fn new(shards: usize) -> Self;

    /// Returns the function with which thread number `thread` adds 1.
    fn adder(&self, thread: usize) -> impl Fn();

    /// Called by a thread that has added everything.
    fn finish(&self) {}

    /// Returns the sum of all adds.
    fn sum(&self) -> i64;
}

impl Subject for EventCounter {
    fn new(_: usize) -> Self {
        EventCounter::new()
    }

    #[inline(always)]
    fn adder(&self, _: usize) -> impl Fn() {
        || self.inc()
    }

    #[inline(always)]
    fn sum(&self) -> i64 {
        self.sum().cast_signed()
    }
}

impl Subject for PerCpuCounter {
    fn new(_: usize) -> Self {
        PerCpuCounter::new()
    }

    #[inline(always)]
    fn adder(&self, _: usize) -> impl Fn() {
        || self.inc()
    }

    #[inline(always)]
    fn sum(&self) -> i64 {
        self.sum()
    }
}

/// The only item of [`VmStat`] here.
#[derive(Clone, Copy)]
pub struct Event;

impl Item for Event {
    const NAMES: &'static [&'static str] = &["event"];

    fn index(self) -> usize {
        0
    }
}

impl Subject for VmStat<Event> {
    fn new(_: usize) -> Self {
        VmStat::new()
    }

    #[inline(always)]
    fn adder(&self, _: usize) -> impl Fn() {
        || self.inc(Zone::normal(0), Event)
    }

    #[inline(always)]
    fn sum(&self) -> i64 {
        self.snapshot(Event)
    }
}

impl Subject for AtomicI64 {
    fn new(_: usize) -> Self {
        AtomicI64::new(0)
    }

    #[inline(always)]
    fn adder(&self, _: usize) -> impl Fn() {
        || {
            self.fetch_add(1, Relaxed);
        }
    }

    #[inline(always)]
    fn sum(&self) -> i64 {
        self.load(Relaxed)
    }
}

/// One atomic for all threads, on its own pair of cache lines.
#[repr(align(128))]
pub struct Atomic(AtomicI64);

impl Subject for Atomic {
    fn new(shards: usize) -> Self {
        Atomic(Subject::new(shards))
    }

    #[inline(always)]
    fn adder(&self, thread: usize) -> impl Fn() {
        self.0.adder(thread)
    }

    #[inline(always)]
    fn sum(&self) -> i64 {
        self.0.sum()
    }
}

/// One atomic for each thread.
pub struct AtomicOwn(Vec<Atomic>);

impl Subject for AtomicOwn {
    fn new(shards: usize) -> Self {
        AtomicOwn((0..shards).map(Atomic::new).collect())
    }

    #[inline(always)]
    fn adder(&self, thread: usize) -> impl Fn() {
        self.0[thread].adder(thread)
    }

    #[inline(always)]
    fn sum(&self) -> i64 {
        self.0.iter().map(Atomic::sum).sum()
    }
}

impl Subject for fast_telemetry::Counter {
    fn new(shards: usize) -> Self {
        fast_telemetry::Counter::new(shards)
    }

    #[inline(always)]
    fn adder(&self, _: usize) -> impl Fn() {
        || self.inc()
    }

    #[inline(always)]
    fn sum(&self) -> i64 {
        self.sum() as i64
    }
}

impl Subject for fast_counter::ConcurrentCounter {
    fn new(shards: usize) -> Self {
        fast_counter::ConcurrentCounter::new(shards)
    }

    #[inline(always)]
    fn adder(&self, _: usize) -> impl Fn() {
        || self.add(1)
    }

    #[inline(always)]
    fn sum(&self) -> i64 {
        self.sum() as i64
    }
}

thread_local! {
    static OWN: Cell<i64> = const { Cell::new(0) };
}

/// The lower bound. Threads add their count to the atomic when they finish.
pub struct ThreadLocal(Atomic);

impl Subject for ThreadLocal {
    fn new(shards: usize) -> Self {
        ThreadLocal(Atomic::new(shards))
    }

    #[inline(always)]
    fn adder(&self, _: usize) -> impl Fn() {
        || OWN.with(|own| own.set(own.get() + 1))
    }

    fn finish(&self) {
        self.0.0.fetch_add(OWN.take(), Relaxed);
    }

    fn sum(&self) -> i64 {
        self.0.sum()
    }
}
