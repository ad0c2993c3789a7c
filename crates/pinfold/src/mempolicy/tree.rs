//! A balanced tree of ranges, which readers search while a writer makes the next one.
//!
//! ```text
//!                     | start child | start child | …            an inner node
//!                      /                    \
//!   | start end words | start end words | …    | start end words | …    leaves
//!                 \
//!                  the words of one range
//! ```
//!
//! All leaves are equally deep. An entry of an inner node has the start of the first range below
//! it. A node has at most [`FANOUT`] entries.
//!
//! A writer never changes a node of the published tree: it copies the nodes from the root to the
//! change, and publishes the new root (`edit`). The nodes that the new tree does not need are
//! recycled by the next change (`chunks`), while readers may still read them. So:
//!
//! * Every word is atomic. A word of a node is 0 or an address of its kind for good: an inner
//!   node's children are nodes, a leaf's are words. The lowest bit of a node's address says which
//!   of the two kinds of nodes it is.
//! * A reader that strays from one tree into another finds only such words. Its steps are bounded
//!   by [`MAX_DEPTH`]. The latch (`latch`) then refuses what it found.
//! * Addresses are stored with release and loaded with acquire. So a reader that strays into a node
//!   of a later tree sees memory that was mapped before.

use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize};

/// Entries that a node has room for. A quarter of it is the fewest that a change leaves in a node
/// that has siblings.
pub(super) const FANOUT: usize = 32;
/// The steps of a search in a node: the halves of [`FANOUT`].
const HALVES: [usize; 5] = [16, 8, 4, 2, 1];
/// A node with at most this many entries is searched from the first entry on. Only roots are so
/// small, so that the processor predicts the branch.
const FEW: usize = 3;
const _: () = assert!(HALVES[0] * 2 == FANOUT);
/// The start in entries that a node does not use. A search finds no range there.
const UNUSED: u64 = u64::MAX;
/// The most levels of nodes. A tree of this depth has more ranges than memory can hold.
pub(super) const MAX_DEPTH: usize = 12;

/// The words of one range.
pub(super) type Words<const WORDS: usize> = [AtomicU64; WORDS];

/// What readers of a tree begin with.
#[repr(C, align(64))]
pub(super) struct Root<const WORDS: usize> {
    top: AtomicPtr<Node>,
    /// The number of ranges.
    len: AtomicUsize,
    /// The words of pages that no range covers, or null.
    default: AtomicPtr<Words<WORDS>>,
}

/// An inner node or a leaf.
#[repr(C, align(64))]
pub(super) struct Node {
    starts: [AtomicU64; FANOUT],
    /// Children of an inner node; the words of a leaf's ranges.
    below: [AtomicPtr<Node>; FANOUT],
    /// The ends of a leaf's ranges, excluded.
    ends: [AtomicU64; FANOUT],
    used: AtomicUsize,
}

/// An entry of a node. `end` is 0 in inner nodes.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) below: *mut Node,
}

/// A copy of a range and its words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Record<const WORDS: usize> {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) words: [u64; WORDS],
}

impl<const WORDS: usize> Root<WORDS> {
    #[inline(always)]
    fn top(&self) -> *mut Node {
        // Acquire pairs with the release in `set`: see the module's documentation.
        self.top.load(Acquire)
    }

    /// Stores the tree below `top`, which has `len` ranges, and the words of all other pages. Only
    /// for the spare root.
    pub(super) fn set(&self, top: *mut Node, len: usize, default: *mut Words<WORDS>) {
        // Release pairs with the acquires in `top` and `Tree::default`: see the module's
        // documentation.
        self.top.store(top, Release);
        self.default.store(default, Release);
        self.len.store(len, Relaxed);
    }
}

impl Node {
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.used.load(Relaxed).min(FANOUT)
    }

    /// Sets the number of entries. Only for a node that the writer fills.
    pub(super) fn set_len(&self, len: usize) {
        for start in self.starts.get(len..).unwrap_or_default() {
            start.store(UNUSED, Relaxed);
        }
        self.used.store(len, Relaxed);
    }

    #[inline(always)]
    fn starts(&self) -> &[AtomicU64] {
        self.starts.get(..self.len()).unwrap_or_default()
    }

    /// Returns how many entries, from the first on, have a start for which `is_before` holds.
    ///
    /// Searches among all [`FANOUT`] entries, or among the first [`FEW`]. So the compiler unrolls
    /// the search into loads and comparisons without a branch, and no load waits for the number of
    /// used entries.
    #[inline(always)]
    fn count(&self, is_before: impl Fn(u64) -> bool) -> usize {
        let holds = |at: usize| {
            let start = self.starts.get(at);
            usize::from(start.is_some_and(|start| is_before(start.load(Relaxed))))
        };
        let len = self.len();
        let mut count = 0;
        if len <= FEW {
            count = (0..FEW).map(holds).sum();
        } else {
            for half in HALVES {
                // The bits of `half - 1` are not in `count`, so `|` adds.
                count |= half * holds(count | (half - 1));
            }
            // The steps reach all counts but `FANOUT`.
            count += holds(count);
        }
        // `is_before` may hold for unused entries too, if the page is the last one.
        count.min(len)
    }

    /// Returns how many entries start at `page` or before it.
    #[inline(always)]
    pub(super) fn starting_up_to(&self, page: u64) -> usize {
        self.count(|start| start <= page)
    }

    /// Returns how many entries start before `page`.
    pub(super) fn starting_before(&self, page: u64) -> usize {
        self.count(|start| start < page)
    }

    /// Returns what is below entry `at`.
    #[inline(always)]
    fn below(&self, at: usize) -> Option<*mut Node> {
        // Acquire pairs with the release in `put`: see the module's documentation.
        Some(self.below.get(at)?.load(Acquire))
    }

    /// Returns entry `at`, or `None` past the last.
    #[inline(always)]
    pub(super) fn entry(&self, at: usize) -> Option<Entry> {
        Some(Entry {
            start: self.starts().get(at)?.load(Relaxed),
            end: self.ends.get(at)?.load(Relaxed),
            below: self.below(at)?,
        })
    }

    /// Stores entry `at`, which must be below [`FANOUT`]. Only for a node that the writer fills.
    pub(super) fn put(&self, at: usize, entry: Entry) {
        let places = (self.starts.get(at), self.ends.get(at), self.below.get(at));
        let (Some(start), Some(end), Some(below)) = places else {
            crate::sys::die(format_args!(
                "a node of a map of ranges has too many entries"
            ));
        };
        start.store(entry.start, Relaxed);
        end.store(entry.end, Relaxed);
        // Release pairs with the acquire in `below`: see the module's documentation.
        below.store(entry.below, Release);
    }
}

/// Returns the address of an inner node as its parent holds it.
pub(super) fn as_inner(node: *mut Node) -> *mut Node {
    node.map_addr(|address| address | 1)
}

/// Returns the address of a node without the bit that tells its kind.
#[inline(always)]
pub(super) fn untagged(node: *mut Node) -> *mut Node {
    node.map_addr(|address| address & !1)
}

#[inline(always)]
pub(super) fn is_inner(node: *mut Node) -> bool {
    node.addr() & 1 == 1
}

/// A tree for reading.
#[derive(Clone, Copy)]
pub(super) struct Tree<'t, const WORDS: usize> {
    root: Option<&'t Root<WORDS>>,
}

impl<'t, const WORDS: usize> Tree<'t, WORDS> {
    /// Returns the tree below `root`. It is empty if `root` is null.
    ///
    /// # Safety
    ///
    /// `root` is null or a root of a map whose memory stays mapped for `'t`.
    #[inline(always)]
    pub(super) unsafe fn at(root: *const Root<WORDS>) -> Self {
        // SAFETY: the caller promises that `root` is null or a root that stays mapped. All its
        // fields are atomic.
        let root = unsafe { root.as_ref() };
        Tree { root }
    }

    #[inline(always)]
    pub(super) fn top(self) -> *mut Node {
        self.root.map_or(null_mut(), Root::top)
    }

    pub(super) fn len(self) -> usize {
        self.root.map_or(0, |root| root.len.load(Relaxed))
    }

    /// Returns the words of pages that no range covers, or null.
    pub(super) fn default(self) -> *mut Words<WORDS> {
        // Acquire pairs with the release in `Root::set`: see the module's documentation.
        self.root
            .map_or(null_mut(), |root| root.default.load(Acquire))
    }

    /// Returns the words of pages that no range covers.
    pub(super) fn otherwise(self) -> Option<&'t Words<WORDS>> {
        self.words(self.default().cast())
    }

    /// Returns the words of the range that covers `page`, or else those of pages that no range
    /// covers.
    #[inline(always)]
    pub(super) fn holding(self, page: u64) -> Option<&'t Words<WORDS>> {
        self.covering(page).or_else(|| self.otherwise())
    }

    /// Returns the node at an address that a root or an inner node holds.
    #[inline(always)]
    fn node(self, at: *mut Node) -> Option<&'t Node> {
        // SAFETY: roots and inner nodes hold null or addresses of nodes, also while they are
        // recycled, and nodes stay mapped for `'t`. All fields are atomic, and zero bytes are
        // valid.
        unsafe { untagged(at).as_ref() }
    }

    /// Returns the entry of the last range that starts at `page` or before it. Stores in `next` the
    /// start of the range behind that one, if there is one.
    #[inline(always)]
    fn descend(self, page: u64, next: &mut Option<u64>) -> Option<Entry> {
        let mut at = self.top();
        for _ in 0..MAX_DEPTH {
            let node = self.node(at)?;
            let count = node.starting_up_to(page);
            if let Some(behind) = node.entry(count) {
                *next = Some(behind.start);
            }
            let entry = node.entry(count.checked_sub(1)?)?;
            if !is_inner(at) {
                return Some(entry);
            }
            at = entry.below;
        }
        None
    }

    /// Returns the words of the range that covers `page`.
    #[inline(always)]
    fn covering(self, page: u64) -> Option<&'t Words<WORDS>> {
        let mut at = self.top();
        for _ in 0..MAX_DEPTH {
            let node = self.node(at)?;
            let place = node.starting_up_to(page).checked_sub(1)?;
            let below = node.below(place)?;
            if !is_inner(at) {
                let end = node.ends.get(place)?.load(Relaxed);
                return (page < end).then(|| self.words(below)).flatten();
            }
            at = below;
        }
        None
    }

    /// Returns the words that a leaf's entry or a root holds.
    #[inline(always)]
    fn words(self, below: *mut Node) -> Option<&'t Words<WORDS>> {
        // SAFETY: leaves and roots hold null or addresses of words, also while they are recycled,
        // and words stay mapped for `'t`. They are atomic.
        unsafe { below.cast::<Words<WORDS>>().as_ref() }
    }

    /// Returns a copy of the range that a leaf's entry holds.
    pub(super) fn record(self, entry: Entry) -> Option<Record<WORDS>> {
        let words = self.words(entry.below)?;
        Some(Record {
            start: entry.start,
            end: entry.end,
            words: load_all(words),
        })
    }

    /// Returns a copy of the first range that has pages from `page` on.
    pub(super) fn next_from(self, page: u64) -> Option<Record<WORDS>> {
        let mut next = None;
        match self.descend(page, &mut next) {
            Some(entry) if page < entry.end => self.record(entry),
            _ => {
                let entry = self.descend(next?, &mut None)?;
                self.record(entry)
            }
        }
    }
}

/// Loads all words of a range.
#[inline(always)]
pub(super) fn load_all<const WORDS: usize>(words: &Words<WORDS>) -> [u64; WORDS] {
    core::array::from_fn(|n| words.get(n).map_or(0, |word| word.load(Relaxed)))
}
