//! Guard pages. The last page of a hardened slab is *closed*: every access to it ends the process.
//! So a program that writes past the slab's end stops there.
//!
//! A closed page in the middle of a mapping splits the mapping, and the kernel allows a process at
//! most `vm.max_map_count` mappings. Without a bound, guard pages could use up all the mappings
//! that the process may have. Then creating a thread, `mmap` and `dlopen` would fail. So guard
//! pages take at most half of the allowed mappings. A slab made while guard pages already take that
//! half gets no guard page.

use crate::arena::GRANULE;
use crate::slab::node::slabs::Slab;
use crate::sys;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// The most mappings that one guard page adds: its own, and the part of the split mapping behind
/// it.
const MAPPINGS: usize = 2;

/// The most mappings that guard pages may take. 0 until the first hardened cache is made.
static MOST: AtomicUsize = AtomicUsize::new(0);
/// Mappings that guard pages take.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Reads the kernel's limit from its file, once. A thread calls this when it makes a hardened
/// cache, because a thread that only allocates must not open files.
pub(crate) fn init() {
    if MOST.load(Relaxed) == 0 {
        MOST.store(sys::mappings_most() / 2, Relaxed);
    }
}

/// Claims the mappings for one guard page. Returns false if too few are left.
fn claim() -> bool {
    let most = MOST.load(Relaxed);
    // Relaxed, because no other memory depends on the number.
    let more = |taken| (taken + MAPPINGS <= most).then_some(taken + MAPPINGS);
    TAKEN.fetch_update(Relaxed, Relaxed, more).is_ok()
}

fn give_back() {
    TAKEN.fetch_sub(MAPPINGS, Relaxed);
}

/// Returns the address of the last page of a run.
fn last_page(start: *mut u8, granules: usize) -> *mut u8 {
    start.wrapping_add(granules * GRANULE - sys::page_size())
}

impl Slab {
    /// Makes the run's last page inaccessible, if guard pages may take more mappings. Otherwise
    /// leaves the page accessible and unused.
    ///
    /// # Safety
    ///
    /// The slab's run has `granules` granules and reads as zeroes. The run's last page is unused,
    /// and no other thread uses the run.
    pub(crate) unsafe fn close_guard(&self, start: *mut u8, granules: usize) {
        if !claim() {
            return;
        }
        let (page, size) = (last_page(start, granules), sys::page_size());
        // When the guard page is opened later, the kernel joins the parts of the mapping only if a
        // page of the mapping was written before the last split. But a write to a mapping that was
        // never split may bring in a huge page. So this function closes the page first, writes to
        // the run, opens the page, and closes it again.
        // SAFETY: the caller promises that no other thread uses the run, and that its last page is
        // unused. The write stores a zero where a zero is already.
        let guarded = unsafe {
            sys::close(page, size) && {
                start.write_volatile(0);
                !sys::commit(page, size) || sys::close(page, size)
            }
        };
        self.guarded.set(guarded);
        if !guarded {
            give_back();
        }
    }

    /// Makes the run's last page accessible again. If the kernel refuses, returns false, and the
    /// page stays closed.
    ///
    /// # Safety
    ///
    /// The slab's run has `granules` granules, and `close_guard` was called for it. No other thread
    /// uses the run.
    pub(crate) unsafe fn open_guard(&self, start: *mut u8, granules: usize) -> bool {
        if !self.guarded.get() {
            return true;
        }
        // SAFETY: `close_guard` closed this page. The caller promises that no other thread uses the
        // run.
        let opened = unsafe { sys::commit(last_page(start, granules), sys::page_size()) };
        if opened {
            self.guarded.set(false);
            give_back();
        }
        opened
    }
}
