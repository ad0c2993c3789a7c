//! `rseq` and `event`: an item of Pinfold's `VmStat`, and its `EventCounter`.

use super::subject::Subject;
use pinfold::counter::EventCounter;
use pinfold::vmstat::{Item, VmStat, Zone};

/// The only counted item.
#[derive(Clone, Copy)]
pub struct FreePages;

impl Item for FreePages {
    const NAMES: &'static [&'static str] = &["nr_free_pages"];

    fn index(self) -> usize {
        0
    }
}

pub struct Rseq(pub &'static VmStat<FreePages>);

impl Subject for Rseq {
    #[inline]
    fn inc(&self) {
        self.0.inc(Zone::normal(0), FreePages);
    }

    fn total(&self) -> Option<i64> {
        Some(self.0.snapshot(FreePages))
    }
}

pub struct Event(pub &'static EventCounter);

impl Subject for Event {
    #[inline]
    fn inc(&self) {
        self.0.inc();
    }

    fn total(&self) -> Option<i64> {
        i64::try_from(self.0.sum()).ok()
    }
}
