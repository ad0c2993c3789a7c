//! `rseq`: an item of Pinfold's `VmStat`, and its `EventCounter`.

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

pub struct Rseq {
    pub items: &'static VmStat<FreePages>,
    pub events: &'static EventCounter,
}

impl Subject for Rseq {
    #[inline]
    fn inc(&self) {
        self.items.inc(Zone::normal(0), FreePages);
    }

    #[inline]
    fn dec(&self) {
        self.items.dec(Zone::normal(0), FreePages);
    }

    #[inline]
    fn event(&self) {
        self.events.inc();
    }

    fn total(&self) -> Option<i64> {
        Some(self.items.sum(FreePages))
    }

    fn events(&self) -> i64 {
        self.events.sum().cast_signed()
    }
}
