//! The free runs of one state, by length and address.
//!
//! If an arena handed out an arbitrary run that fits, its allocated blocks would scatter over its
//! whole address range, and few long free runs would form. So the arena takes the run at the lowest
//! address among those of a fitting length. A bin holds the runs of one length. From 32 granules
//! on, a bin holds the runs of a range of lengths. Each bin is a pairing heap ordered by address,
//! whose root is the run at the lowest address. Each run's heap links are stored in the frame of
//! its first granule. The lock of the node's arena protects heaps and frames.

use super::{State, frame};

/// Means "no granule". The window's first granule holds the page map, so it is never in a run.
/// Because `NIL` is 0, the static arenas are all zeroes, and take no room in the library's file.
pub(super) const NIL: u32 = 0;
/// Runs of fewer granules than this have a bin for each length. Longer runs share eight bins for
/// each doubling.
const EXACT: u32 = 32;
/// The number of bins: 32 for the short lengths, and eight for each doubling from 32 to 1024
/// granules.
const BINS: usize = 32 + 8 * 5;
/// Maximum number of runs that a search looks at. After that, a search of a shared bin goes on to
/// longer runs.
pub(super) const LOOK_AT: usize = 16;

/// The runs of one state, by length.
pub(super) struct Bins {
    /// The lowest run of each bin: the root of its heap.
    roots: [u32; BINS],
    /// A bit for each bin that has runs.
    filled: u128,
}

/// Returns the bin of runs of `granules`, from 1 to 1023.
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

    /// Puts a run into its bin. The run's first frame has its length.
    ///
    /// # Safety
    ///
    /// The caller holds the lock of the node's arena. The run, and all runs in the bins, are free.
    pub(super) unsafe fn insert(&mut self, head: u32) {
        // SAFETY: the run is free and the lock is held, so only this thread uses the run's frame.
        let bin = unsafe {
            let run = &mut *frame(head);
            debug_assert!(head != NIL && run.granules > 0);
            debug_assert!(run.state != State::Busy, "a run in a bin is free");
            (run.child, run.next, run.prev) = (NIL, NIL, NIL);
            bin_of(u32::from(run.granules))
        };
        debug_assert_eq!(self.is_filled(bin), self.roots[bin] != NIL);
        // SAFETY: both are roots: the first by `roots`, and the run because its links were cleared
        // above.
        self.roots[bin] = unsafe { merge(self.roots[bin], head) };
        self.filled |= 1 << bin;
    }

    /// Takes a run out of its bin.
    ///
    /// # Safety
    ///
    /// The caller holds the lock of the node's arena. The run is in these bins.
    pub(super) unsafe fn remove(&mut self, head: u32) {
        // SAFETY: the run is in these bins, and the lock is held. Each link in a heap is `NIL`, or
        // names a free run of the same heap.
        unsafe {
            let run = &*frame(head);
            let bin = bin_of(u32::from(run.granules));
            debug_assert!(self.is_filled(bin) && self.roots[bin] <= head);
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

    /// Returns whether a bin has runs, as its bit says.
    fn is_filled(&self, bin: usize) -> bool {
        self.filled & 1 << bin != 0
    }

    /// Returns a run of at least `granules`: a run of the bin for this length, or else the lowest
    /// run of the next bin that has runs. In a bin of several lengths, looks at [`LOOK_AT`] runs at
    /// most. Costs a few loads.
    ///
    /// # Safety
    ///
    /// The caller holds the lock of the node's arena.
    pub(super) unsafe fn find(&self, granules: u32) -> Option<u32> {
        let bin = bin_of(granules);
        let mut at = self.roots[bin];
        for _ in 0..LOOK_AT {
            if at == NIL {
                break;
            }
            // SAFETY: the lock is held. `at` is not `NIL`, so it names a free run of the bin's
            // heap.
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

/// Merges two heaps, of which either may be [`NIL`]. Returns the root.
///
/// # Safety
///
/// Both are [`NIL`] or roots of heaps, whose `next` and `prev` are [`NIL`]. The caller holds the
/// lock of the node's arena.
unsafe fn merge(one: u32, other: u32) -> u32 {
    if one == NIL {
        return other;
    }
    if other == NIL {
        return one;
    }
    let (root, child) = (one.min(other), one.max(other));
    debug_assert!(root != child);
    // SAFETY: both are roots of heaps, and the caller holds the lock that protects their frames.
    unsafe {
        debug_assert!([root, child].iter().all(|&run| (*frame(run)).prev == NIL));
        debug_assert!([root, child].iter().all(|&run| (*frame(run)).next == NIL));
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

/// Merges the children of a run into one heap: first merges them in pairs, then merges the
/// resulting heaps from last to first. This order keeps the heap shallow.
///
/// # Safety
///
/// `child` is [`NIL`], or the first child of a run that leaves its heap. The caller holds the lock
/// of the node's arena.
unsafe fn merge_children(mut child: u32) -> u32 {
    let mut pairs = NIL;
    while child != NIL {
        // SAFETY: `child` is in the row of children, and the caller holds the lock.
        let second = unsafe { take_from_row(child) };
        let rest = if second == NIL {
            NIL
        } else {
            // SAFETY: `second` is in the row of children, and the caller holds the lock.
            unsafe { take_from_row(second) }
        };
        // SAFETY: both were taken from the row, and so are roots, or `second` is `NIL`.
        let pair = unsafe { merge(child, second) };
        // SAFETY: `pair` is a root that is in no heap, so its `next` is unused. Until the second
        // loop, `next` links the pairs.
        unsafe { (*frame(pair)).next = pairs };
        pairs = pair;
        child = rest;
    }
    let mut root = NIL;
    while pairs != NIL {
        // SAFETY: each pair was linked by the loop above. It becomes a root again before it is
        // merged.
        unsafe {
            let next = core::mem::replace(&mut (*frame(pairs)).next, NIL);
            root = merge(root, pairs);
            pairs = next;
        }
    }
    root
}

/// Makes a child a root. Returns the sibling that followed it.
///
/// # Safety
///
/// `child` is in a row of children, and the caller holds the lock of the node's arena.
unsafe fn take_from_row(child: u32) -> u32 {
    // SAFETY: the caller holds the lock that protects the frame of `child`.
    unsafe {
        let run = &mut *frame(child);
        run.prev = NIL;
        core::mem::replace(&mut run.next, NIL)
    }
}

/// Takes a run that is not a root out of the row of its siblings.
///
/// # Safety
///
/// The run is in a heap and not its root. The caller holds the lock of the node's arena.
unsafe fn unlink(head: u32) {
    // SAFETY: the run is no root, so `prev` is the sibling before it, or its parent. The caller
    // holds the lock that protects their frames.
    unsafe {
        let (prev, next) = ((*frame(head)).prev, (*frame(head)).next);
        if (*frame(prev)).child == head {
            (*frame(prev)).child = next;
        } else {
            debug_assert_eq!((*frame(prev)).next, head, "a sibling names the next one");
            (*frame(prev)).next = next;
        }
        if next != NIL {
            (*frame(next)).prev = prev;
        }
    }
}
