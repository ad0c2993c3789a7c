//! Counts by node, of events that happen once for each run or huge block.

use crate::nodes::{self, MAX_NODES};
use crate::vmstat::Item;
use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

/// The largest number of items of a node. Their words fill one cache line.
const MAX_ITEMS: usize = 8;

/// One node's words. Each node has a cache line, so that threads of different nodes do not write
/// the same line.
#[repr(align(64))]
struct Row([AtomicU64; MAX_ITEMS]);

/// Counts of items by node, kept by the arenas.
///
/// Counting is one relaxed atomic add to a static word. It takes no lock and no memory, so a signal
/// handler that allocates can count at any point.
///
/// Nodes are numbered as in [`Zone`](crate::vmstat::Zone). A process that was started with a memory
/// policy, on a machine with several nodes, has one more node number, the last. It stands for
/// memory that the kernel places by that policy.
///
/// ```
/// use pinfold::memory::{NUMA_STAT, NumaItem};
///
/// assert_eq!(NUMA_STAT.read_node(1000, NumaItem::Hit), 0);
/// assert!(NUMA_STAT.to_string().starts_with("numa_hit "));
/// ```
pub struct NodeStat<I: Item> {
    rows: [Row; MAX_NODES],
    items: PhantomData<fn(I)>,
}

impl<I: Item> NodeStat<I> {
    pub(super) const fn new() -> Self {
        assert!(I::NAMES.len() <= MAX_ITEMS, "too many items for a row");
        NodeStat {
            rows: [const { Row([const { AtomicU64::new(0) }; MAX_ITEMS]) }; MAX_NODES],
            items: PhantomData,
        }
    }

    /// Adds `n` to `item` of `node`, which exists.
    pub(super) fn add(&self, node: usize, item: I, n: u64) {
        self.rows[node].0[item.index()].fetch_add(n, Relaxed);
    }

    /// Subtracts `n`, which was added before, from `item` of `node`.
    pub(super) fn sub(&self, node: usize, item: I, n: u64) {
        self.rows[node].0[item.index()].fetch_sub(n, Relaxed);
    }

    /// Returns the sum of an item's counts of all nodes. One load for each node.
    ///
    /// Each node's count is exact. The nodes are read one after the other.
    pub fn read(&self, item: I) -> u64 {
        self.sum(item.index())
    }

    /// Returns an item's count of node `node`, or 0 if the node does not exist. One load.
    pub fn read_node(&self, node: usize, item: I) -> u64 {
        self.rows
            .get(node)
            .map_or(0, |row| row.0[item.index()].load(Relaxed))
    }

    fn sum(&self, item: usize) -> u64 {
        let rows = self.rows.iter().take(nodes::count());
        rows.fold(0, |sum, row| sum.wrapping_add(row.0[item].load(Relaxed)))
    }
}

/// Writes the items' counts of all nodes in the form of `/proc/vmstat`: a line `name value` for
/// each item.
impl<I: Item> fmt::Display for NodeStat<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut items = I::NAMES.iter().enumerate();
        items.try_for_each(|(item, name)| writeln!(f, "{name} {}", self.sum(item)))
    }
}

impl<I: Item> fmt::Debug for NodeStat<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = I::NAMES.iter().enumerate();
        f.debug_map()
            .entries(counts.map(|(item, name)| (name, self.sum(item))))
            .finish()
    }
}
