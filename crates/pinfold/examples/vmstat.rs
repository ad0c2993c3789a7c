//! Statistics by item and zone, as in `/proc/vmstat`:
//! `cargo run --release -p pinfold --example vmstat`.
//!
//! A [`VmStat`] counts items that go up and down, for each node and page size. [`VmEvents`] count
//! what only goes up. Both print the lines of `/proc/vmstat`.

use pinfold::vmstat::{VmEvents, VmStat, Zone};
use std::thread;

pinfold::vmstat_items! {
    /// The pages of a buffer pool.
    enum Page {
        Free = "nr_free_pages",
        Dirty = "nr_dirty",
    }
}

pinfold::vmstat_items! {
    /// What happens in the pool.
    enum Event {
        Write = "pgwrite",
    }
}

static PAGES: VmStat<Page> = VmStat::new();
static EVENTS: VmEvents<Event> = VmEvents::new();

/// Takes a free page of the first node and writes to it.
fn write() {
    let zone = Zone::normal(0);
    PAGES.dec(zone, Page::Free);
    PAGES.inc(zone, Page::Dirty);
    EVENTS.inc(Event::Write);
}

fn main() {
    PAGES.add(Zone::normal(0), Page::Free, 100_000);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..20_000).for_each(|_| write()));
        }
    });

    // `read` is a few loads for each zone, and may be off by `error_bound`. `sum` is exact.
    let (about, bound) = (PAGES.read(Page::Free), PAGES.error_bound(Page::Free));
    assert!(about.abs_diff(PAGES.sum(Page::Free)) <= bound);
    // The comparison takes the exact sum only if the cheap read cannot decide.
    assert!(PAGES.compare(Page::Free, 1000).is_gt());
    print!("{PAGES}{EVENTS}");
}
