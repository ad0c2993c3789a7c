//! The ways to change an item.

use super::cmpxchg::Cmpxchg;
use super::locked::Locked;
use super::masked_signals::MaskedSignals;
use super::pinfold::{FreePages, Rseq};
#[cfg(target_arch = "x86_64")]
use super::sections;
use super::unprotected::Unprotected;
use crate::cycles;
use pinfold::counter::EventCounter;
use pinfold::vmstat::{VmStat, Zone};
use serde::Serialize;
use std::sync::atomic::{AtomicI8, AtomicI32};

/// One of the document's three functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// `inc_zone_page_state`
    Inc,
    /// `dec_zone_page_state`
    Dec,
    /// `count_vm_event`
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
    /// Adds 1 to the item. Signals may arrive in between.
    fn inc(&self);

    /// Subtracts 1 from the item.
    fn dec(&self);

    /// Counts an event: adds 1 to a word of the CPU, without a threshold and without a total.
    fn event(&self);

    /// Makes a change in a handler that may have interrupted another change.
    fn in_handler(&self, op: Op) {
        match op {
            Op::Inc => self.inc(),
            Op::Dec => self.dec(),
            Op::Event => self.event(),
        }
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
            Op::Inc => timed(calls, || self.inc()),
            Op::Dec => timed(calls, || self.dec()),
            Op::Event => timed(calls, || self.event()),
        }
    }
}

#[inline(always)]
fn timed(calls: u32, change: impl Fn()) -> u64 {
    let before = cycles::now();
    for _ in 0..calls {
        change();
    }
    cycles::now().saturating_sub(before)
}

/// A subject and its name.
pub struct Named {
    pub name: &'static str,
    pub subject: Box<dyn Measurable + Send>,
}

static ITEMS: VmStat<FreePages> = VmStat::new();
static EVENTS: EventCounter = EventCounter::new();

/// Makes all subjects. The peers have Pinfold's threshold, except that a difference of one byte
/// allows at most the kernel's 125.
///
/// `rseq-inc-check` and `rseq-cmpxchg` need x86-64 and restartable sequences.
pub fn all() -> Vec<Named> {
    let threshold = i8::try_from(ITEMS.threshold(Zone::normal(0)).min(125)).unwrap_or(125);
    let mut all = vec![
        named("unprotected", Unprotected::<AtomicI32>::new(threshold)),
        named("unprotected-byte", Unprotected::<AtomicI8>::new(threshold)),
        named("locked", Locked::new(threshold)),
        named("masked-signals", MaskedSignals::new(threshold)),
        named("cmpxchg", Cmpxchg::new(threshold)),
    ];
    #[cfg(target_arch = "x86_64")]
    if let Some(place) = sections::Place::find() {
        let threshold = threshold.into();
        all.push(named(
            "rseq-cmpxchg",
            sections::Cmpxchg::new(place, threshold),
        ));
        all.push(named(
            "rseq-inc-check",
            sections::IncCheck::new(place, threshold),
        ));
    }
    all.push(named(
        "rseq",
        Rseq {
            items: &ITEMS,
            events: &EVENTS,
        },
    ));
    all
}

fn named(name: &'static str, subject: impl Subject + Send + 'static) -> Named {
    Named {
        name,
        subject: Box::new(subject),
    }
}

/// Makes one value for each possible CPU.
pub fn for_each_cpu<T: Default>() -> Box<[T]> {
    (0..pinfold_rseq::possible())
        .map(|_| T::default())
        .collect()
}
