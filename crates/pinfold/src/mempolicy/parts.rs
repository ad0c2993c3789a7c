//! What the new nodes of one level of a tree consist of, and the entries for their parent.

use super::edit::node;
use super::tree::{Entry, Node};
use core::ptr::null_mut;

/// The most nodes that one level of a change needs, and the most pieces that it makes of ranges.
pub(super) const MOST_NODES: usize = 3;
pub(super) const MOST_PIECES: usize = 3;

impl Entry {
    pub(super) const NONE: Entry = Entry {
        start: 0,
        end: 0,
        below: null_mut(),
    };
}

/// The new nodes of a level, as entries for their parent.
pub(super) struct Made {
    pub(super) entries: [Entry; MOST_NODES],
    pub(super) count: usize,
}

impl Made {
    pub(super) fn new() -> Made {
        Made {
            entries: [Entry::NONE; MOST_NODES],
            count: 0,
        }
    }

    pub(super) fn push(&mut self, entry: Entry) {
        if let Some(place) = self.entries.get_mut(self.count) {
            *place = entry;
        }
        self.count += 1;
    }
}

/// A node, or null, and the numbers of its entries that are taken.
pub(super) type Part = (*mut Node, usize, usize);

/// What the new nodes of a level consist of, in order.
pub(super) struct Parts {
    pub(super) before: [Part; 2],
    pub(super) new: [Entry; MOST_PIECES],
    pub(super) count: usize,
    pub(super) behind: [Part; 2],
}

impl Parts {
    pub(super) fn len(&self) -> usize {
        let parts = self.before.iter().chain(&self.behind);
        self.count
            + parts
                .map(|part| part.2.saturating_sub(part.1))
                .sum::<usize>()
    }

    pub(super) fn for_each(&self, mut visit: impl FnMut(Entry)) {
        let entries = |part: &Part| {
            let &(at, from, to) = part;
            (from..to).map_while(move |number| node(at).entry(number))
        };
        self.before.iter().flat_map(entries).for_each(&mut visit);
        self.new
            .iter()
            .take(self.count)
            .for_each(|entry| visit(*entry));
        self.behind.iter().flat_map(entries).for_each(&mut visit);
    }
}
