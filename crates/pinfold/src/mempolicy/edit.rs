//! Builds a new version of the range tree, copy-on-write. The published version stays as it is.
//!
//! A change of the pages `start..end` concerns the ranges between two *paths* from the root to a
//! leaf: the left path leads to the last range that starts before `start`, the right path to the
//! last that starts at `end` or before it. From the leaves up, a change
//!
//! 1. keeps the entries left of the left path and right of the right path,
//! 2. retires the nodes on the paths and everything between them,
//! 3. writes what was kept and what is new between them to at most three new nodes, whose entries
//!    are what is new one level further up.
//!
//! So a change writes O(log n) nodes, and visits each range that it removes.

use super::RangeError;
use super::chunks::{Chunks, Pool};
use super::parts::{MOST_NODES, MOST_PIECES, Made, Parts};
use super::tree::{
    Entry, FANOUT, MAX_DEPTH, Node, Root, Words, as_inner, is_inner, load_all, untagged,
};
use core::ptr::null_mut;
use core::sync::atomic::Ordering::Relaxed;

/// The fewest entries that a change leaves in a node that has a neighbour below the same parent.
const FEWEST: usize = FANOUT / 4;

/// The units of a map. Only the holder of the writer's lock uses them.
pub(super) struct Pools<const WORDS: usize> {
    words: Pool<Words<WORDS>>,
    leaves: Pool<Node>,
    inners: Pool<Node>,
    roots: Pool<Root<WORDS>>,
    pub(super) chunks: Chunks,
}

/// The result of a change.
pub(super) struct Changed {
    pub(super) top: *mut Node,
    /// Ranges that the new tree has and the old one has not, and the reverse.
    pub(super) added: usize,
    pub(super) dropped: usize,
}

/// A node on a path, and the number of its entry that the path follows.
#[derive(Clone, Copy)]
struct Step {
    node: *mut Node,
    at: usize,
}

/// The nodes from the root to a leaf.
struct Path {
    steps: [Step; MAX_DEPTH],
    depth: usize,
}

/// The pieces that a change makes of the ranges around it, and what it drops for them.
struct Cut {
    pieces: [Entry; MOST_PIECES],
    count: usize,
    /// Entries of the left leaf before this one are kept.
    kept_before: usize,
    /// Entries of the right leaf from this one on are kept.
    kept_from: usize,
}

/// Returns the node at an address in the tree.
pub(super) fn node<'t>(at: *mut Node) -> &'t Node {
    // SAFETY: the callers pass addresses that they found in the tree that they change, which are
    // nodes of the map. The map borrows its pools for the change, so its memory stays mapped.
    unsafe { &*untagged(at) }
}

impl Path {
    /// Follows the last entry of each node that `count` counts, or the first if it counts none.
    fn new(top: *mut Node, count: impl Fn(&Node) -> usize) -> Result<Path, RangeError> {
        let none = Step {
            node: null_mut(),
            at: 0,
        };
        let mut path = Path {
            steps: [none; MAX_DEPTH],
            depth: 0,
        };
        let mut next = top;
        while !next.is_null() {
            // A tree of this depth cannot grow.
            let step = path.steps.get_mut(path.depth);
            let step = step.ok_or(RangeError::OutOfMemory)?;
            path.depth += 1;
            *step = Step {
                node: next,
                at: count(node(next)).saturating_sub(1),
            };
            let entry = node(next).entry(step.at);
            next = match (is_inner(next), entry) {
                (true, Some(entry)) => entry.below,
                _ => null_mut(),
            };
        }
        Ok(path)
    }

    /// Returns the node `up` levels above the leaf.
    fn up(&self, up: usize) -> Option<Step> {
        self.steps.get(self.depth.checked_sub(up + 1)?).copied()
    }
}

impl<const WORDS: usize> Pools<WORDS> {
    pub(super) const fn new() -> Self {
        Pools {
            words: Pool::new(),
            leaves: Pool::new(),
            inners: Pool::new(),
            roots: Pool::new(),
            chunks: Chunks::new(),
        }
    }

    /// Makes a root, which is one of the latch's two buffers.
    pub(super) fn root(&mut self) -> Result<*mut Root<WORDS>, RangeError> {
        let reserved = self.roots.reserve(1, &mut self.chunks);
        reserved.ok_or(RangeError::OutOfMemory)?;
        Ok(self.roots.take())
    }

    /// Returns how many words, leaves and inner nodes are in use.
    #[cfg(test)]
    pub(super) fn in_use(&self) -> [usize; 3] {
        [self.words.in_use, self.leaves.in_use, self.inners.in_use]
    }

    /// Frees the units that the last change retired. The change was published, or never will be.
    pub(super) fn recycle(&mut self) {
        self.words.recycle();
        self.leaves.recycle();
        self.inners.recycle();
    }

    /// Reserves what a change of a tree of this depth needs at most.
    ///
    /// A change that adds a range reserves twice as much. So when there is no memory for another
    /// range, ranges can still be removed.
    fn reserve(&mut self, depth: usize, adds: bool) -> Option<()> {
        let times = if adds { 2 } else { 1 };
        let inners = depth.saturating_sub(1) * MOST_NODES + 1;
        let chunks = &mut self.chunks;
        self.words.reserve(times * MOST_PIECES, chunks)?;
        self.leaves.reserve(times * MOST_NODES, chunks)?;
        self.inners.reserve(times * inners, chunks)
    }

    /// Gives the pages from `start` to before `end` these words, or removes their words, in a new
    /// tree. Returns `None` if the tree stays as it is.
    ///
    /// The tree below `top` is not changed. What the new tree does not need of it is retired. After
    /// an error, nothing is retired. `start` is below `end`.
    pub(super) fn change(
        &mut self,
        top: *mut Node,
        start: u64,
        end: u64,
        words: Option<&[u64; WORDS]>,
    ) -> Result<Option<Changed>, RangeError> {
        let left = Path::new(top, |node| node.starting_before(start))?;
        let right = Path::new(top, |node| node.starting_up_to(end))?;
        let reserved = self.reserve(left.depth, words.is_some());
        reserved.ok_or(RangeError::OutOfMemory)?;
        let leaves = (left.up(0), right.up(0));
        let (one, other) = (leaves.0.map(|s| s.node), leaves.1.map(|s| s.node));
        let cut = self.cut(one, other, start, end, words);
        if words.is_none() && one == other && cut.kept_before == cut.kept_from {
            return Ok(None);
        }
        let mut changed = Changed {
            top: null_mut(),
            added: cut.count,
            dropped: self.drop_between(leaves, cut.kept_before, cut.kept_from),
        };
        let mut made = Made::new();
        let mut kept = (cut.kept_before, cut.kept_from);
        let mut new = (cut.pieces, cut.count);
        for level in 0..left.depth.max(1) {
            let steps = (left.up(level), right.up(level));
            let mut parents = (left.up(level + 1), right.up(level + 1));
            if let (Some(one), Some(other)) = parents {
                changed.dropped += self.drop_between(parents, one.at, other.at + 1);
            }
            let parts = self.parts(steps, kept, new, &mut parents);
            made = self.write(&parts, level > 0);
            // The parents' entries on the paths and between them are replaced.
            if let (Some(one), Some(other)) = parents {
                kept = (one.at, other.at + 1);
            }
            new = (made.entries, made.count);
        }
        changed.top = self.top(made);
        Ok(Some(changed))
    }

    /// Cuts the ranges that overlap the change, and joins those that touch it and have its words.
    fn cut(
        &mut self,
        left: Option<*mut Node>,
        right: Option<*mut Node>,
        start: u64,
        end: u64,
        words: Option<&[u64; WORDS]>,
    ) -> Cut {
        let mut cut = Cut {
            pieces: [Entry::NONE; MOST_PIECES],
            count: 0,
            kept_before: left.map_or(0, |leaf| node(leaf).starting_before(start)),
            kept_from: right.map_or(0, |leaf| node(leaf).starting_up_to(end)),
        };
        let last = |leaf: Option<*mut Node>, count: usize| {
            let entry = node(leaf?).entry(count.checked_sub(1)?)?;
            // SAFETY: the entry is a leaf's, so it holds the address of words of this map.
            let words = load_all(unsafe { &*entry.below.cast::<Words<WORDS>>() });
            Some((entry, words))
        };
        let (mut from, mut to) = (start, end);
        if let Some((entry, old)) = last(left, cut.kept_before) {
            let joins = words == Some(&old) && entry.end >= start;
            if joins || entry.end > start {
                cut.kept_before -= 1;
            }
            if joins {
                from = entry.start;
            } else if entry.end > start {
                self.piece(&mut cut, entry.start, start, &old);
            }
        }
        let behind = last(right, cut.kept_from).filter(|(entry, _)| entry.end > end);
        let mut rest = None;
        if let Some((entry, old)) = behind {
            if words == Some(&old) {
                to = entry.end;
            } else if entry.start == end {
                cut.kept_from -= 1;
            } else {
                rest = Some((entry.end, old));
            }
        }
        if let Some(words) = words {
            self.piece(&mut cut, from, to, words);
        }
        if let Some((behind, old)) = rest {
            self.piece(&mut cut, end, behind, &old);
        }
        cut
    }

    /// Adds a range with a copy of `words` to the pieces.
    fn piece(&mut self, cut: &mut Cut, start: u64, end: u64, words: &[u64; WORDS]) {
        let at = self.fill(words);
        if let Some(piece) = cut.pieces.get_mut(cut.count) {
            *piece = Entry {
                start,
                end,
                below: at.cast(),
            };
            cut.count += 1;
        }
    }

    /// Returns a copy of `words` in a reserved unit.
    fn fill(&mut self, words: &[u64; WORDS]) -> *mut Words<WORDS> {
        let at = self.words.take();
        // SAFETY: the pool returned a unit of words of this map. They are atomic, and readers drop
        // what they read of a unit that is written.
        let place = unsafe { &*at };
        for (place, word) in place.iter().zip(words) {
            place.store(*word, Relaxed);
        }
        at
    }

    /// Returns a copy of `words` that belongs to no range.
    pub(super) fn copy(&mut self, words: &[u64; WORDS]) -> Result<*mut Words<WORDS>, RangeError> {
        let reserved = self.words.reserve(1, &mut self.chunks);
        reserved.ok_or(RangeError::OutOfMemory)?;
        Ok(self.fill(words))
    }

    /// Retires words that [`copy`](Self::copy) returned. Does nothing if `words` is null.
    pub(super) fn drop_words(&mut self, words: *mut Words<WORDS>) {
        if !words.is_null() {
            // SAFETY: `copy` took the words from this pool, and one root held them, which the
            // caller replaces.
            unsafe { self.words.retire(words) };
        }
    }

    /// Retires what is between two entries of one level: from entry `from` of the left node to
    /// before entry `to` of the right node. Does not retire the nodes on the paths. Returns the
    /// number of ranges that were retired.
    fn drop_between(
        &mut self,
        nodes: (Option<Step>, Option<Step>),
        from: usize,
        to: usize,
    ) -> usize {
        let (Some(left), Some(right)) = nodes else {
            return 0;
        };
        // In inner nodes, the entries that the paths follow lead to nodes that a level further down
        // has replaced, so they are not dropped here.
        let skip = usize::from(is_inner(left.node));
        if left.node == right.node {
            return self.drop_entries(left.node, from + skip, to.saturating_sub(skip));
        }
        self.drop_entries(left.node, from + skip, FANOUT)
            + self.drop_entries(right.node, 0, to.saturating_sub(skip))
    }

    /// Retires the subtrees or ranges below the entries `from..to` of `parent`. Returns how many
    /// ranges it retired.
    fn drop_entries(&mut self, parent: *mut Node, from: usize, to: usize) -> usize {
        let entries = (from..to).map_while(|at| node(parent).entry(at));
        let mut ranges = 0;
        for entry in entries {
            ranges += match is_inner(parent) {
                true => self.drop_tree(entry.below),
                false => {
                    // SAFETY: the entry is a leaf's, and no other entry has its words.
                    unsafe { self.words.retire(entry.below.cast()) };
                    1
                }
            };
        }
        ranges
    }

    /// Retires a whole tree, which may be empty. Returns the number of its ranges.
    pub(super) fn drop_tree(&mut self, top: *mut Node) -> usize {
        if top.is_null() {
            return 0;
        }
        let ranges = self.drop_entries(top, 0, FANOUT);
        self.retire(top);
        ranges
    }

    /// Retires a node, but not what is below it.
    fn retire(&mut self, at: *mut Node) {
        let pool = match is_inner(at) {
            true => &mut self.inners,
            false => &mut self.leaves,
        };
        // SAFETY: the bit tells which pool the node came from, and the caller takes the node out of
        // the tree, which holds it once.
        unsafe { pool.retire(untagged(at)) };
    }

    /// Returns what the new nodes of a level consist of, and retires the level's old nodes.
    ///
    /// If that would be too few entries for a node, adds the entries of a neighbour. Then the
    /// neighbour's entry in the parent is replaced too: moves `parents` to it.
    fn parts(
        &mut self,
        steps: (Option<Step>, Option<Step>),
        kept: (usize, usize),
        new: ([Entry; MOST_PIECES], usize),
        parents: &mut (Option<Step>, Option<Step>),
    ) -> Parts {
        let none = (null_mut(), 0, 0);
        let mut parts = Parts {
            before: [none, none],
            new: new.0,
            count: new.1,
            behind: [none, none],
        };
        if let (Some(left), Some(right)) = steps {
            parts.before[1] = (left.node, 0, kept.0);
            parts.behind[0] = (right.node, kept.1, node(right.node).len());
            self.retire(left.node);
            if right.node != left.node {
                self.retire(right.node);
            }
        }
        if !(1..FEWEST).contains(&parts.len()) {
            return parts;
        }
        let (Some(left), Some(right)) = parents else {
            return parts;
        };
        let neighbour = |step: &Step, at| node(step.node).entry(at).map(|entry| entry.below);
        if let Some(before) = left.at.checked_sub(1).and_then(|at| neighbour(left, at)) {
            left.at -= 1;
            parts.before[0] = (before, 0, node(before).len());
            self.retire(before);
        } else if let Some(behind) = neighbour(right, right.at + 1) {
            right.at += 1;
            parts.behind[1] = (behind, 0, node(behind).len());
            self.retire(behind);
        }
        parts
    }

    /// Writes the entries to as few new nodes as hold them, evenly.
    fn write(&mut self, parts: &Parts, inner: bool) -> Made {
        let mut made = Made::new();
        let total = parts.len();
        let nodes = total.div_ceil(FANOUT).max(1);
        let (each, larger) = (total / nodes, total % nodes);
        let pool = match inner {
            true => &mut self.inners,
            false => &mut self.leaves,
        };
        let (mut fresh, mut used, mut quota) = (null_mut::<Node>(), 0, 0);
        parts.for_each(|entry| {
            if used == quota {
                fresh = pool.take();
                (used, quota) = (0, each + usize::from(made.count < larger));
                let below = if inner { as_inner(fresh) } else { fresh };
                made.push(Entry {
                    start: entry.start,
                    end: 0,
                    below,
                });
                node(fresh).set_len(quota);
            }
            node(fresh).put(used, entry);
            used += 1;
        });
        made
    }

    /// Returns the root's node above the nodes of the highest level.
    fn top(&mut self, made: Made) -> *mut Node {
        let mut top = match made.count {
            0 => null_mut(),
            1 => made.entries[0].below,
            _ => {
                let none = (null_mut(), 0, 0);
                let parts = Parts {
                    before: [none, none],
                    new: made.entries,
                    count: made.count,
                    behind: [none, none],
                };
                self.write(&parts, true).entries[0].below
            }
        };
        // A root with one child is not needed.
        while is_inner(top) && node(top).len() == 1 {
            self.retire(top);
            top = node(top).entry(0).map_or(null_mut(), |entry| entry.below);
        }
        top
    }
}
