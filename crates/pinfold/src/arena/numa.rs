//! From which node memory should come, from which node it came, and which nodes have memory left.
//!
//! The kernel places a page when a thread first touches it: on the node that the page's range
//! prefers, or silently on another node if the preferred node has no memory. If the page came from
//! another node, the counts here would be wrong, and callers would be told a wrong node. So an
//! arena does not take fresh memory from a node that is nearly full while another node has memory.
//! The free memory of each node is an estimate:
//!
//! 1. It is read at the start, and by [`refresh_room`].
//! 2. Fresh memory that an arena takes meanwhile is subtracted. Memory that it gives back is added.
//!
//! If all nodes are nearly full, the arenas ask the kernel nevertheless. The kernel then makes
//! room, swaps, or refuses the memory.

use super::GRANULE;
use super::stat::NodeStat;
use crate::topology::{NodeId, facts};
use crate::{nodes, sys};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

crate::vmstat_items! {
    /// The counts of allocations of runs, in pages, by node. The names and meanings are the
    /// kernel's, as in `numastat`.
    ///
    /// Memory that the kernel places by the process's policy is not counted here, because the
    /// kernel counts it.
    ///
    /// ```
    /// use pinfold::memory::{NUMA_STAT, NumaItem::*};
    ///
    /// let [hit, miss, local, other] = [Hit, Miss, Local, Other].map(|item| NUMA_STAT.read(item));
    /// // Each page counts once in each of the two pairs.
    /// assert_eq!(hit + miss, local + other);
    /// ```
    pub enum NumaItem {
        /// Taken from this node, as the caller wanted.
        Hit = "numa_hit",
        /// Taken from this node, although the caller wanted another.
        Miss = "numa_miss",
        /// Wanted from this node, but taken from another.
        Foreign = "numa_foreign",
        /// Taken from this node because it was the node's turn in an interleave policy.
        InterleaveHit = "interleave_hit",
        /// Taken from this node by a thread that ran there.
        Local = "local_node",
        /// Taken from this node by a thread that ran elsewhere.
        Other = "other_node",
    }
}

/// Counts the pages that came from each node. Counts when a run is taken, never for each object.
///
/// ```
/// use pinfold::memory::{NUMA_STAT, NumaItem};
///
/// let here = NUMA_STAT.read(NumaItem::Local);
/// println!("{here} pages came from the node of the thread");
/// ```
pub static NUMA_STAT: NodeStat<NumaItem> = NodeStat::new();

/// The node from which an allocation asks memory, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeRequest {
    /// The node that is asked.
    pub(crate) node: usize,
    /// The node that the policy wanted.
    pub(crate) wanted: usize,
    /// Whether it was the wanted node's turn under an interleaving policy.
    pub(crate) in_turn: bool,
}

impl NodeRequest {
    /// Asks for memory of `node` only.
    pub(crate) const fn only(node: usize) -> NodeRequest {
        NodeRequest {
            node,
            wanted: node,
            in_turn: false,
        }
    }

    /// Asks another node instead, because the wanted node has no memory.
    pub(crate) const fn instead(self, node: usize) -> NodeRequest {
        NodeRequest { node, ..self }
    }
}

/// Adds `granules` that were taken for `request`, as pages, to [`NUMA_STAT`]. Costs one test if
/// there is one node. Inlined, because the deepest chain of calls has no room for another frame.
#[inline(always)]
pub(super) fn count(request: NodeRequest, granules: usize) {
    if nodes::count() == 1 || nodes::is_the_kernels(request.node) {
        return;
    }
    let pages = (granules * (GRANULE / sys::page_size())) as u64;
    for_each_item(request, nodes::of_this_cpu(), |node, item| {
        NUMA_STAT.add(node, item, pages);
    });
}

/// Calls `count` with each node and item for which an allocation by a thread on node `local`
/// counts, as the kernel's `zone_statistics` does.
pub(crate) fn for_each_item(request: NodeRequest, local: usize, count: impl Fn(usize, NumaItem)) {
    if request.node == request.wanted {
        count(request.node, NumaItem::Hit);
        if request.in_turn {
            count(request.node, NumaItem::InterleaveHit);
        }
    } else {
        count(request.node, NumaItem::Miss);
        // The kernel counts the memory that it places itself, so the kernel's node has no counts
        // here.
        if !nodes::is_the_kernels(request.wanted) {
            count(request.wanted, NumaItem::Foreign);
        }
    }
    let near = if request.node == local {
        NumaItem::Local
    } else {
        NumaItem::Other
    };
    count(request.node, near);
}

/// The estimate of a node's memory.
struct Room {
    /// Bytes that were free, or held pages of files, at the last reading, with later changes added
    /// and subtracted.
    free: AtomicU64,
    /// Bytes that are left to other processes.
    reserve: AtomicU64,
}

static ROOM: [Room; nodes::MAX_NODES] = [const {
    Room {
        free: AtomicU64::new(u64::MAX),
        reserve: AtomicU64::new(0),
    }
}; nodes::MAX_NODES];

/// The arenas leave at least 1/`RESERVE` of a node's memory to other processes.
const RESERVE: u64 = 64;

/// Returns how many bytes of a node's memory the arenas leave to other processes.
///
/// When a node's free memory is down to the kernel's low watermark, the kernel takes pages from
/// another node. The low watermark is 5/4 of the node's share of `vm.min_free_kbytes`, or that
/// share plus a thousandth of the node's memory. So the arenas leave twice the share, or
/// 1/`RESERVE` of the node's memory if that is more.
fn reserve_of(total: u64, least_free: u64, machine: u64) -> u64 {
    let share = u128::from(least_free) * u128::from(total) / u128::from(machine.max(1));
    (total / RESERVE).max(2 * share as u64)
}

/// Returns whether `node` has room for `granules` of fresh memory. Also returns true if no node has
/// room. Costs a few loads.
///
/// Always returns true if there is one node, for the kernel's node, and on simulated nodes.
pub(super) fn has_room(node: usize, granules: usize) -> bool {
    if nodes::count() == 1 || nodes::is_the_kernels(node) || nodes::are_made_up() {
        return true;
    }
    let wanted = (granules * GRANULE) as u64;
    roomy_or_all_full(node, nodes::real(), |node| {
        let room = &ROOM[node];
        room.free.load(Relaxed) >= room.reserve.load(Relaxed).saturating_add(wanted)
    })
}

/// Returns whether `node` is roomy, or none of the first `nodes` nodes is roomy.
fn roomy_or_all_full(node: usize, nodes: usize, roomy: impl Fn(usize) -> bool) -> bool {
    roomy(node) || !(0..nodes).any(|other| other != node && roomy(other))
}

/// Lowers the estimate of the node's free memory, because an arena took fresh memory.
pub(super) fn took_fresh(node: usize, granules: usize) {
    change_room(node, |free| {
        free.saturating_sub((granules * GRANULE) as u64)
    });
}

/// Raises the estimate of the node's free memory, because memory went back to the system.
pub(super) fn gave_back(node: usize, bytes: usize) {
    change_room(node, |free| free.saturating_add(bytes as u64));
}

fn change_room(node: usize, change: impl FnOnce(u64) -> u64) {
    if nodes::count() > 1
        && let Some(room) = ROOM.get(node)
    {
        // A concurrent change by another thread may be lost. The number is an estimate.
        room.free.store(change(room.free.load(Relaxed)), Relaxed);
    }
}

/// Reads how much free memory each node has, so that the arenas take fresh memory from nodes that
/// have some. Does nothing if there is one node.
///
/// Opens a file for each node, and one more. So it is called at the process's start, and by a
/// shepherd that the program has asked for.
pub fn refresh_room() {
    if nodes::real() == 1 || nodes::are_made_up() {
        return;
    }
    let (machine, least) = (sys::physical_memory() as u64, sys::least_free());
    for (node, room) in ROOM.iter().enumerate().take(nodes::real()) {
        let [total, free] = facts::memory_of(NodeId(nodes::id(node)));
        let reserve = reserve_of(total.unwrap_or(0), least, machine);
        room.reserve.store(reserve, Relaxed);
        // If a node's free memory cannot be read, the node always counts as roomy, and the kernel
        // decides.
        room.free.store(free.unwrap_or(u64::MAX), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{reserve_of, roomy_or_all_full};

    #[test]
    fn a_node_keeps_a_share_of_its_memory_and_of_what_the_kernel_keeps() {
        assert_eq!(reserve_of(64 << 30, 0, 64 << 30), 1 << 30);
        // Four nodes of 512 MiB, and 44 MiB to be kept free, as the kernel wants for huge pages.
        assert_eq!(reserve_of(512 << 20, 44 << 20, 2 << 30), 22 << 20);
    }

    #[test]
    fn a_full_node_is_asked_when_all_are_full() {
        for (roomy, asked) in [
            ([true, true, true], [true, true, true]),
            ([false, true, false], [false, true, false]),
            ([false, false, false], [true, true, true]),
        ] {
            let answers = [0, 1, 2].map(|node| roomy_or_all_full(node, 3, |node| roomy[node]));
            assert_eq!(answers, asked);
        }
    }
}
