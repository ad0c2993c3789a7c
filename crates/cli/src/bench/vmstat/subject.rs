//! The ways to increment an item.

use super::cmpxchg::Cmpxchg;
use super::locked::Locked;
use super::masked_signals::MaskedSignals;
use super::pinfold::{Event, FreePages, Rseq};
use crate::figures::cycles;
use pinfold::counter::EventCounter;
use pinfold::vmstat::{VmStat, Zone};

/// An item, and one way to increment it.
pub trait Subject: Sync {
    /// Adds 1; signals may come in between.
    fn inc(&self);

    /// Adds 1 from a handler that may have interrupted [`inc`](Self::inc).
    fn inc_in_handler(&self) {
        self.inc();
    }

    /// What was counted; `None` when the item contradicts itself.
    fn total(&self) -> Option<i64>;
}

/// A subject as the measurement sees it: only whole loops are dispatched dynamically.
pub trait Measurable: Subject {
    /// Cycles that a loop of `calls` increments takes.
    fn cycles(&self, calls: u32) -> u64;
}

impl<S: Subject> Measurable for S {
    fn cycles(&self, calls: u32) -> u64 {
        let before = cycles::now();
        for _ in 0..calls {
            self.inc();
        }
        cycles::now().saturating_sub(before)
    }
}

/// A subject under its name.
pub struct Named {
    pub name: &'static str,
    pub subject: Box<dyn Measurable + Send>,
}

static ITEMS: VmStat<FreePages> = VmStat::new();
static EVENTS: EventCounter = EventCounter::new();

/// All of them. The rivals fold as often as Pinfold does, but a difference of one byte ends at the kernel's 125.
pub fn all() -> [Named; 5] {
    let threshold = i8::try_from(ITEMS.threshold(Zone::normal(0)).min(125)).unwrap_or(125);
    [
        named("locked", Locked::new(threshold)),
        named("masked-signals", MaskedSignals::new(threshold)),
        named("cmpxchg", Cmpxchg::new(threshold)),
        named("rseq", Rseq(&ITEMS)),
        named("event", Event(&EVENTS)),
    ]
}

fn named(name: &'static str, subject: impl Subject + Send + 'static) -> Named {
    Named {
        name,
        subject: Box::new(subject),
    }
}

/// One for each CPU that there can be.
pub fn for_each_cpu<T: Default>() -> Box<[T]> {
    (0..pinfold_rseq::possible())
        .map(|_| T::default())
        .collect()
}
