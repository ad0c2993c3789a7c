//! The free runs of one state, by length and address.
//!
//! A bin holds the runs of one length, or of a range of lengths from 32 granules on. Each bin is a
//! pairing heap ordered by address, so that its root is the run at the lowest address. The links of
//! the heaps are in the runs' first frames. The lock of the node's arena protects heaps and frames.

use super::frame;

/// No granule: the first one of the window is the page map's, and never in a run. With 0 for it the
/// static arenas are all zeroes, and take no room in the file.
pub(super) const NIL: u32 = 0;
/// Runs of fewer granules than this have a bin for each length. Longer ones share eight bins for
/// each doubling.
const EXACT: u32 = 32;
/// Bins: 32 for the short lengths, and eight for each doubling from 32 to 1024 granules.
const BINS: usize = 32 + 8 * 5;
/// How many runs of a shared bin are looked at before a bin of longer runs is asked.
const LOOK_AT: usize = 16;

/// The runs of one state, by length.
pub(super) struct Bins {
    /// The lowest run of each bin: its heap's root.
    roots: [u32; BINS],
    /// The bins that have runs.
    filled: u128,
}

/// The bin of runs of `granules`, which is from 1 to 1023.
fn bin_of(granules: u32) -> usize {
    if granules < EXACT {
        return granules as usize;
    }
    let doubling = granules.ilog2() - EXACT.ilog2();
    let eighth = (granules >> (doubling + 2)) - 8;
    (EXACT + 8 * doubling + eighth) as usize
}

impl Bins {
    pub(super) const fn new() -> Self {
        Bins {
            roots: [NIL; BINS],
            filled: 0,
        }
    }

    /// Puts a run in, whose first frame says its length.
    ///
    /// # Safety
    ///
    /// Here and below: the caller holds the node's lock, and no caller of the arena has the run
    /// or those in the bins.
    pub(super) unsafe fn insert(&mut self, head: u32) {
        // SAFETY: the caller's promise.
        let bin = unsafe {
            let run = &mut *frame(head);
            (run.child, run.next, run.prev) = (NIL, NIL, NIL);
            bin_of(u32::from(run.granules))
        };
        // SAFETY: both are roots: the run's links were cleared above.
        self.roots[bin] = unsafe { merge(self.roots[bin], head) };
        self.filled |= 1 << bin;
    }

    /// Takes a run out.
    ///
    /// # Safety
    ///
    /// As for [`insert`](Self::insert); the run is in these bins.
    pub(super) unsafe fn remove(&mut self, head: u32) {
        // SAFETY: the caller's promise. Links in the heap lead to runs of the heap.
        unsafe {
            let run = &*frame(head);
            let bin = bin_of(u32::from(run.granules));
            let below = merge_children(run.child);
            self.roots[bin] = if self.roots[bin] == head {
                below
            } else {
                unlink(head);
                merge(self.roots[bin], below)
            };
            if self.roots[bin] == NIL {
                self.filled &= !(1 << bin);
            }
        }
    }

    /// Returns a run of at least `granules`: of the bin for this length, or else the lowest run of
    /// the next bin that has any. In a bin of several lengths, looks at [`LOOK_AT`] runs at most.
    /// Costs a few loads.
    ///
    /// # Safety
    ///
    /// As for [`insert`](Self::insert).
    pub(super) unsafe fn find(&self, granules: u32) -> Option<u32> {
        let bin = bin_of(granules);
        let mut at = self.roots[bin];
        for _ in 0..LOOK_AT {
            if at == NIL {
                break;
            }
            // SAFETY: the caller's promise.
            let run = unsafe { &*frame(at) };
            if u32::from(run.granules) >= granules {
                return Some(at);
            }
            at = if at == self.roots[bin] {
                run.child
            } else {
                run.next
            };
        }
        let longer = self.filled & !((2u128 << bin) - 1);
        (longer != 0).then(|| self.roots[longer.trailing_zeros() as usize])
    }
}

/// Makes one heap of two, of which either may be [`NIL`]; returns its root.
///
/// # Safety
///
/// Both are roots, whose `next` and `prev` are [`NIL`].
unsafe fn merge(one: u32, other: u32) -> u32 {
    if one == NIL {
        return other;
    }
    if other == NIL {
        return one;
    }
    let (root, child) = (one.min(other), one.max(other));
    // SAFETY: the caller's promise.
    unsafe {
        let first = (*frame(root)).child;
        (*frame(child)).next = first;
        (*frame(child)).prev = root;
        if first != NIL {
            (*frame(first)).prev = child;
        }
        (*frame(root)).child = child;
    }
    root
}

/// Makes one heap of a run's children: in pairs first, then the pairs from last to first, which
/// keeps the heaps flat.
///
/// # Safety
///
/// `child` is the first child of a run that leaves its heap, or [`NIL`].
unsafe fn merge_children(mut child: u32) -> u32 {
    let mut pairs = NIL;
    while child != NIL {
        // SAFETY: here and below: links in a heap lead to its runs, which the caller may change.
        let second = unsafe { take_from_row(child) };
        let rest = if second == NIL {
            NIL
        } else {
            // SAFETY: as above.
            unsafe { take_from_row(second) }
        };
        // SAFETY: both were taken from the row, and so are roots.
        let pair = unsafe { merge(child, second) };
        // SAFETY: as above. The pairs are a list by `next` meanwhile.
        unsafe { (*frame(pair)).next = pairs };
        pairs = pair;
        child = rest;
    }
    let mut root = NIL;
    while pairs != NIL {
        // SAFETY: as above: each becomes a root again before it is merged.
        unsafe {
            let next = core::mem::replace(&mut (*frame(pairs)).next, NIL);
            root = merge(root, pairs);
            pairs = next;
        }
    }
    root
}

/// Makes a child a root; returns the sibling that followed it.
///
/// # Safety
///
/// As for [`merge_children`].
unsafe fn take_from_row(child: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe {
        let run = &mut *frame(child);
        run.prev = NIL;
        core::mem::replace(&mut run.next, NIL)
    }
}

/// Takes a run, which is no root, out of the row of its siblings.
///
/// # Safety
///
/// The run is in a heap, and not its root.
unsafe fn unlink(head: u32) {
    // SAFETY: the caller's promise; `prev` is the sibling before it, or its parent.
    unsafe {
        let (prev, next) = ((*frame(head)).prev, (*frame(head)).next);
        if (*frame(prev)).child == head {
            (*frame(prev)).child = next;
        } else {
            (*frame(prev)).next = next;
        }
        if next != NIL {
            (*frame(next)).prev = prev;
        }
    }
}
