//! Keeps the reports of faults that a test has planted, and lets the process go on.

use pinfold::slab::KmemCache;
use pinfold::slab::debug::{Kind, Report, Verdict};
use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::time::Duration;

thread_local! {
    /// The reports of this test's thread.
    static REPORTS: RefCell<Vec<(Kind, String)>> = const { RefCell::new(Vec::new()) };
    /// How long this thread's report handler sleeps.
    pub static PAUSE: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// The handler for `on_report`.
pub fn keep(report: &Report<'_>) -> Verdict {
    std::thread::sleep(PAUSE.get());
    REPORTS.with(|reports| reports.borrow_mut().push((report.kind, report.to_string())));
    Verdict::Continue
}

/// Returns this thread's reports since the last call.
pub fn reports() -> Vec<(Kind, String)> {
    REPORTS.with(|reports| reports.borrow_mut().split_off(0))
}

pub fn free(cache: &KmemCache, object: NonNull<u8>) {
    // SAFETY: the object is of this cache, or the free is a planted fault, which the cache reports.
    unsafe { cache.free(object) };
}
