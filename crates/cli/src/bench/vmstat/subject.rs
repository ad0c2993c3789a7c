//! The ways to increment an item.

use super::cmpxchg::Cmpxchg;
use super::locked::Locked;
use super::masked_signals::MaskedSignals;
use super::pinfold::{Event, FreePages, Rseq};
use pinfold::counter::EventCounter;
use pinfold::vmstat::{VmStat, Zone};
use pinfold_benchkit::cycles;

/// An item together with one way to increment it.
pub trait Subject: Sync {
    /// Adds 1. Signals may arrive in between.
    fn inc(&self);

    /// Adds 1 in a handler that may have interrupted [`inc`](Self::inc).
    fn inc_in_handler(&self) {
        self.inc();
    }

    /// Returns the total. `None` if the item's totals contradict each other.
    fn total(&self) -> Option<i64>;
}

/// A subject behind dynamic dispatch. Only a whole loop is one dynamic call.
pub trait Measurable: Subject {
    /// Returns the cycles of a loop of `calls` increments.
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

/// A subject and its name.
pub struct Named {
    pub name: &'static str,
    pub subject: Box<dyn Measurable + Send>,
}

static ITEMS: VmStat<FreePages> = VmStat::new();
static EVENTS: EventCounter = EventCounter::new();

/// Makes all subjects. The peers fold as often as Pinfold does, except that a difference of one
/// byte allows at most the kernel's threshold of 125.
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

/// Makes one value for each possible CPU.
pub fn for_each_cpu<T: Default>() -> Box<[T]> {
    (0..pinfold_rseq::possible())
        .map(|_| T::default())
        .collect()
}
