//! The ways to change an item.

use super::peers::{Cmpxchg, Locked, MaskedSignals, Peer, Unprotected};
#[cfg(target_arch = "x86_64")]
use super::sections;
use crate::cycles;
use pinfold::counter::EventCounter;
use pinfold::vmstat::{Item, VmStat, Zone};
use pinfold_malloc::c::counter::{pinfold_event_create, pinfold_event_inc};
use pinfold_malloc::c::vmstat::{
    CVmStat, pinfold_vmstat_create, pinfold_vmstat_dec, pinfold_vmstat_inc, pinfold_vmstat_sum,
};
use serde::Serialize;
use std::ffi::c_int;
use std::hint::black_box;
use std::sync::atomic::{AtomicI8, AtomicI32};

/// One of the document's three functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// `inc_zone_page_state`
    Inc,
    /// `dec_zone_page_state`
    Dec,
    /// `count_vm_event`: adds 1 to a word of the CPU, without a threshold and without a total.
    Event,
}

impl Op {
    pub const ALL: [Op; 3] = [Op::Inc, Op::Dec, Op::Event];

    /// Returns what the operation adds.
    pub fn by(self) -> i64 {
        match self {
            Op::Inc | Op::Event => 1,
            Op::Dec => -1,
        }
    }
}

/// An item and a count of events, together with one way to change them.
pub trait Subject: Sync {
    /// Makes a change. Signals may arrive in between. `#[inline(always)]`, so that a loop of one
    /// operation is compiled for it.
    fn change(&self, op: Op);

    /// Makes a change in a handler that may have interrupted another change.
    fn in_handler(&self, op: Op) {
        self.change(op);
    }

    /// Returns whether a handler may interrupt a change without loss of counts.
    fn bears_signals(&self) -> bool {
        true
    }

    /// Returns the item's total. `None` if the item's totals contradict each other.
    fn total(&self) -> Option<i64>;

    /// Returns the number of events.
    fn events(&self) -> i64;
}

/// A subject behind dynamic dispatch. Only a whole loop is one dynamic call.
pub trait Measurable: Subject {
    /// Returns the cycles of a loop of `calls` changes.
    fn cycles(&self, op: Op, calls: u32) -> u64;
}

impl<S: Subject> Measurable for S {
    fn cycles(&self, op: Op, calls: u32) -> u64 {
        match op {
            Op::Inc => cycles::of(|| (0..calls).for_each(|_| self.change(Op::Inc))),
            Op::Dec => cycles::of(|| (0..calls).for_each(|_| self.change(Op::Dec))),
            Op::Event => cycles::of(|| (0..calls).for_each(|_| self.change(Op::Event))),
        }
    }
}

/// The most items of a [`VmStat`] here.
pub const MOST: usize = 16;

/// An item of Pinfold's `VmStat`.
#[derive(Clone, Copy)]
pub struct Nth(pub usize);

impl Item for Nth {
    const NAMES: &'static [&'static str] = &["item"; MOST];

    #[inline(always)]
    fn index(self) -> usize {
        self.0
    }
}

/// `rseq`: an item of Pinfold's `VmStat`, and its `EventCounter`.
struct Rseq {
    items: &'static VmStat<Nth>,
    events: &'static EventCounter,
}

impl Subject for Rseq {
    #[inline(always)]
    fn change(&self, op: Op) {
        match op {
            Op::Inc => self.items.inc(Zone::normal(0), Nth(0)),
            Op::Dec => self.items.dec(Zone::normal(0), Nth(0)),
            Op::Event => self.events.inc(),
        }
    }

    fn total(&self) -> Option<i64> {
        Some(self.items.sum(Nth(0)))
    }

    fn events(&self) -> i64 {
        self.events.sum().cast_signed()
    }
}

/// `rseq-called`: an item and an event counter of the C API, by calls that are not inlined.
struct Called {
    items: &'static CVmStat,
    events: &'static EventCounter,
    calls: Calls,
}

/// The functions, which the compiler does not know, so it cannot inline them.
struct Calls {
    inc: unsafe extern "C" fn(&CVmStat, c_int, usize),
    dec: unsafe extern "C" fn(&CVmStat, c_int, usize),
    event: unsafe extern "C" fn(&EventCounter),
}

impl Called {
    /// Returns `None` without memory for the counts. They live as long as the process.
    fn new() -> Option<Called> {
        let items = pinfold_vmstat_create(1, 0);
        let events = pinfold_event_create();
        Some(Called {
            // SAFETY: both are null, or came from their functions and are never destroyed.
            items: unsafe { items.as_ref()? },
            // SAFETY: as above.
            events: unsafe { events.as_ref()? },
            calls: black_box(Calls {
                inc: pinfold_vmstat_inc,
                dec: pinfold_vmstat_dec,
                event: pinfold_event_inc,
            }),
        })
    }
}

impl Subject for Called {
    #[inline(always)]
    fn change(&self, op: Op) {
        // SAFETY: the counts came from the functions that create them, and are never destroyed.
        unsafe {
            match op {
                Op::Inc => (self.calls.inc)(self.items, 0, 0),
                Op::Dec => (self.calls.dec)(self.items, 0, 0),
                Op::Event => (self.calls.event)(self.events),
            }
        }
    }

    fn total(&self) -> Option<i64> {
        // SAFETY: as in `change`.
        Some(unsafe { pinfold_vmstat_sum(self.items, 0) })
    }

    fn events(&self) -> i64 {
        self.events.sum().cast_signed()
    }
}

/// A subject's name, and the subject.
pub type Named = (&'static str, Box<dyn Measurable + Send>);

/// Returns the threshold of Pinfold's items for the peers, whose differences of one byte allow at
/// most the kernel's 125.
pub fn threshold(items: &VmStat<Nth>) -> i8 {
    i8::try_from(items.threshold(Zone::normal(0)).min(125)).unwrap_or(125)
}

/// Makes all subjects.
///
/// `rseq-inc-check` and `rseq-cmpxchg` need x86-64 and restartable sequences.
pub fn all() -> Vec<Named> {
    static ITEMS: VmStat<Nth> = VmStat::new();
    static EVENTS: EventCounter = EventCounter::new();
    let threshold = threshold(&ITEMS);
    let mut all = vec![
        named(
            "unprotected",
            Peer::<Unprotected<AtomicI32>>::new(threshold),
        ),
        named(
            "unprotected-byte",
            Peer::<Unprotected<AtomicI8>>::new(threshold),
        ),
        named("locked", Peer::<Locked>::new(threshold)),
        named("masked-signals", Peer::<MaskedSignals>::new(threshold)),
        named("cmpxchg", Peer::<Cmpxchg>::new(threshold)),
    ];
    #[cfg(target_arch = "x86_64")]
    if let Some(place) = sections::Place::find() {
        all.push(named(
            "rseq-cmpxchg",
            sections::Sectioned::<true>::new(place, threshold),
        ));
        all.push(named(
            "rseq-inc-check",
            sections::Sectioned::<false>::new(place, threshold),
        ));
    }
    let (items, events) = (&ITEMS, &EVENTS);
    all.push(named("rseq", Rseq { items, events }));
    all.extend(Called::new().map(|called| named("rseq-called", called)));
    all
}

pub fn named(name: &'static str, subject: impl Subject + Send + 'static) -> Named {
    (name, Box::new(subject))
}

/// Makes one value for each possible CPU.
pub fn for_each_cpu<T: Default>() -> Box<[T]> {
    let possible = 0..pinfold_rseq::possible();
    possible.map(|_| T::default()).collect()
}
