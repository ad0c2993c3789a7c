//! The counters: Pinfold's, plain atomics, and the strongest peers, behind one trait.

use pinfold::counter::{EventCounter, PerCpuCounter};
use pinfold::vmstat::{Item, VmStat, Zone};
use std::cell::Cell;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

pinfold_lab::names! {
    pub enum Name {
        /// `EventCounter::inc`.
        PinfoldEvent = "pinfold-event",
        /// `PerCpuCounter::inc`.
        Pinfold = "pinfold",
        /// `VmStat::inc`.
        Vmstat = "vmstat",
        /// One `AtomicI64` for all threads.
        Atomic = "atomic",
        /// An `AtomicI64` for each thread, 128 bytes apart: the cost of a locked add without
        /// contention.
        AtomicOwn = "atomic-own",
        /// fast-telemetry's `Counter::inc`.
        FastTelemetry = "fast-telemetry",
        /// fast-counter's `ConcurrentCounter::add`.
        FastCounter = "fast-counter",
        /// A `Cell<i64>` of the thread, which no other thread can read: the lower bound.
        ThreadLocal = "thread-local",
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

    fn sum(&self) -> i64;
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

/// Implements [`Subject`] for a counter: how it is made, how 1 is added, and its sum.
macro_rules! subject {
    ($counter:ty, $shards:pat => $new:expr, $this:ident => $add:expr, $sum:expr) => {
        impl Subject for $counter {
            fn new($shards: usize) -> Self {
                $new
            }

            #[inline(always)]
            fn adder(&self, _: usize) -> impl Fn() {
                let $this = self;
                move || {
                    $add;
                }
            }

            #[inline(always)]
            fn sum(&self) -> i64 {
                let $this = self;
                $sum
            }
        }
    };
}

subject!(
    EventCounter,
    _ => EventCounter::new(),
    this => this.inc(),
    EventCounter::sum(this).cast_signed()
);
subject!(
    PerCpuCounter,
    _ => PerCpuCounter::new(),
    this => this.inc(),
    PerCpuCounter::sum(this)
);
subject!(
    VmStat<Event>,
    _ => VmStat::new(),
    this => this.inc(Zone::normal(0), Event),
    this.sum(Event)
);
subject!(
    AtomicI64,
    _ => AtomicI64::new(0),
    this => this.fetch_add(1, Relaxed),
    this.load(Relaxed)
);
subject!(
    fast_telemetry::Counter,
    shards => fast_telemetry::Counter::new(shards),
    this => this.inc(),
    fast_telemetry::Counter::sum(this) as i64
);
subject!(
    fast_counter::ConcurrentCounter,
    shards => fast_counter::ConcurrentCounter::new(shards),
    this => this.add(1),
    fast_counter::ConcurrentCounter::sum(this) as i64
);

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
