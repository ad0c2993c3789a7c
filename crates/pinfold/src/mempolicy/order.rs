//! The order in which the kernel tries nodes when the wanted node has no memory left.
//!
//! Each node has a list of all nodes with memory. The kernel makes the lists at boot, in the order
//! of the nodes' numbers:
//!
//! 1. The node itself comes first.
//! 2. Then, each time, the kernel takes the node with the least *cost* among the nodes not yet
//!    listed. The cost is the distance, plus 1 if the node's number is below the list owner's, plus
//!    1 if the node has CPUs.
//! 3. If several nodes cost the same, the kernel looks at the lists made so far. In each list,
//!    nodes at the same distance form a group. The kernel prefers the node that was the first of
//!    its group the fewest times. So different nodes turn to different neighbours.
//! 4. If these times are equal too, the node with the lowest number wins.
//!
//! This is the kernel's `find_next_best_node`, since Linux 5.16.
//!
//! The kernel also makes lists for nodes that could be plugged in later. These lists count in rule
//! 3, but the kernel does not tell their distances. On a machine with such nodes, two equally near
//! nodes may be listed here in the other order.

use crate::nodes::MAX_NODES;
use crate::sys;
use crate::topology::{CpuSet, NodeId, NodeSet, Topology, facts};

/// The distances between nodes, and the order in which each node falls back to the others.
///
/// Plain data of about 9 KiB. Holds the machine's first 64 nodes.
///
/// ```
/// use pinfold::mempolicy::Distances;
/// use pinfold::topology::{NodeId, Topology};
///
/// let distances = Distances::read(&Topology::system()?);
/// for node in distances.nearest_first(NodeId(0)) {
///     println!("node {} at distance {}", node.0, distances.distance(NodeId(0), node));
/// }
/// # Ok::<(), pinfold::topology::TopologyError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distances {
    /// The number of nodes. The first `count` entries of each array are in use.
    count: usize,
    ids: [NodeId; MAX_NODES],
    apart: [[u8; MAX_NODES]; MAX_NODES],
    /// For each node, the indexes in `ids` of the nodes with memory, the nearest first.
    order: [[u8; MAX_NODES]; MAX_NODES],
    with_memory: usize,
}

impl Distances {
    /// Reads the distances between the nodes of `topology`.
    ///
    /// Reads a file for each pair of nodes, and one for each node.
    pub fn read(topology: &Topology) -> Distances {
        let cpus = |node| topology.cpus_of(node);
        let has_cpus = topology
            .nodes
            .iter()
            .filter(|&node| cpus(NodeId(node)).is_ok_and(|cpus: CpuSet| !cpus.is_empty()));
        let between = |from, to| topology.distance(from, to);
        Distances::new(
            &topology.nodes,
            &topology.with_memory,
            &has_cpus.collect(),
            between,
        )
    }

    /// Returns the distances of a machine with these `nodes`.
    ///
    /// `between` gives the distance from the first node's CPUs to the second node's memory: 10 for
    /// the node itself, at most 255.
    ///
    /// ```
    /// use pinfold::mempolicy::Distances;
    /// use pinfold::topology::{NodeId, NodeSet};
    ///
    /// let nodes: NodeSet = "0-2".parse()?;
    /// // Three nodes in a row.
    /// let apart = |from: NodeId, to: NodeId| 10 + 10 * from.0.abs_diff(to.0) as u32;
    /// let distances = Distances::new(&nodes, &nodes, &nodes, apart);
    /// let order: Vec<_> = distances.nearest_first(NodeId(2)).collect();
    /// assert_eq!(order, [NodeId(2), NodeId(1), NodeId(0)]);
    /// # Ok::<(), pinfold::topology::ListError>(())
    /// ```
    pub fn new(
        nodes: &NodeSet,
        with_memory: &NodeSet,
        with_cpus: &NodeSet,
        between: impl Fn(NodeId, NodeId) -> u32,
    ) -> Distances {
        let mut distances = Distances {
            count: 0,
            ids: [NodeId(0); MAX_NODES],
            apart: [[0; MAX_NODES]; MAX_NODES],
            order: [[0; MAX_NODES]; MAX_NODES],
            with_memory: 0,
        };
        distances.fill(nodes, with_memory, with_cpus, |ids, from, row| {
            for (&to, apart) in ids.iter().zip(row) {
                *apart = u8::try_from(between(from, to)).unwrap_or(u8::MAX);
            }
        });
        distances
    }

    /// Calls `f` with the distances of this machine. Does not call `f` if there is no memory for
    /// the distances.
    ///
    /// The distances are in a mapping, because they are too large for the stack of a thread that
    /// allocates.
    pub(super) fn of_this_machine(
        nodes: &NodeSet,
        with_memory: &NodeSet,
        f: impl FnOnce(&Distances),
    ) {
        let size = size_of::<Distances>().next_multiple_of(sys::page_size());
        let Some(memory) = sys::map_memory(size) else {
            return;
        };
        // SAFETY: the mapping is fresh, aligned to a page, and at least as large as `Distances`.
        // Its zeroes are a valid `Distances` without nodes. No other reference to it exists.
        let distances = unsafe { &mut *memory.as_ptr().cast::<Distances>() };
        let with_cpus = facts::nodes_with_cpus();
        let with_cpus = with_cpus.as_ref().unwrap_or(nodes);
        distances.fill(nodes, with_memory, with_cpus, |ids, from, row| {
            for (&to, apart) in ids.iter().zip(row.iter_mut()) {
                *apart = if to == from { 10 } else { 20 };
            }
            facts::for_each_distance(from, |to, distance| {
                if let Some(apart) = row.get_mut(to) {
                    *apart = u8::try_from(distance).unwrap_or(u8::MAX);
                }
            });
        });
        f(distances);
        // SAFETY: `map_memory` returned `memory` with this size, and `f` cannot keep a reference to
        // it.
        unsafe { sys::unmap(memory.as_ptr(), size) };
    }

    /// Fills in the nodes, their distances and the lists. `row` fills in the distances of one node.
    fn fill(
        &mut self,
        nodes: &NodeSet,
        with_memory: &NodeSet,
        with_cpus: &NodeSet,
        mut row: impl FnMut(&[NodeId], NodeId, &mut [u8]),
    ) {
        for (entry, id) in self.ids.iter_mut().zip(nodes.iter()) {
            *entry = NodeId(id);
            self.count += 1;
        }
        let ids = &self.ids[..self.count];
        for (&from, apart) in ids.iter().zip(&mut self.apart) {
            row(ids, from, &mut apart[..ids.len()]);
        }
        self.list(with_memory, with_cpus);
    }

    /// Makes the lists, in the order in which the kernel makes them, because rule 3 depends on this
    /// order.
    fn list(&mut self, with_memory: &NodeSet, with_cpus: &NodeSet) {
        let mut first_in_group = [0u32; MAX_NODES];
        let ids = self.ids;
        let has = |set: &NodeSet, n: usize| set.contains(ids[n].0);
        self.with_memory = (0..self.count).filter(|&n| has(with_memory, n)).count();
        for from in 0..self.count {
            let apart = self.apart[from];
            let mut listed = [false; MAX_NODES];
            let mut before = from;
            let mut length = 0;
            if has(with_memory, from) {
                self.order[from][0] = from as u8;
                length = 1;
            }
            listed[from] = true;
            while length < self.with_memory {
                let open = (0..self.count).filter(|&n| !listed[n] && has(with_memory, n));
                let cost = |&n: &usize| {
                    let cost =
                        u32::from(apart[n]) + u32::from(n < from) + u32::from(has(with_cpus, n));
                    (cost, first_in_group[n])
                };
                let Some(next) = open.min_by_key(cost) else {
                    break;
                };
                if apart[next] != apart[before] {
                    first_in_group[next] += 1;
                }
                self.order[from][length] = next as u8;
                listed[next] = true;
                before = next;
                length += 1;
            }
        }
    }

    /// Returns the nodes with memory, in the order in which the kernel tries them for a CPU of node
    /// `from`.
    ///
    /// Returns the first node's list if there is no node `from`, and nothing if no node has memory.
    pub fn nearest_first(&self, from: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let from = self.index(from).unwrap_or(0);
        let order = self.order[from][..self.with_memory].iter();
        order.map(|&node| self.ids[usize::from(node)])
    }

    /// Returns the distance from CPUs of node `from` to memory of node `to`. The distance to local
    /// memory is 10.
    ///
    /// If one of the nodes does not exist, returns 10 for equal numbers and 20 for others.
    pub fn distance(&self, from: NodeId, to: NodeId) -> u32 {
        match (self.index(from), self.index(to)) {
            (Some(from), Some(to)) => u32::from(self.apart[from][to]),
            _ if from == to => 10,
            _ => 20,
        }
    }

    /// Returns the index of `node` in `ids`.
    fn index(&self, node: NodeId) -> Option<usize> {
        self.ids[..self.count].iter().position(|&id| id == node)
    }
}
