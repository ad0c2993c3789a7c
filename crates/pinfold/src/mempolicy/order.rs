//! In which order the kernel goes to nodes when the one it wants has no memory left.
//!
//! Each node has a list of all nodes with memory, made when the machine starts. Itself comes first; then always the node with
//! the least *cost* of those not yet listed: its distance, 1 more if its number is below the list's own, 1 more if it has
//! CPUs. Among equals, the one that the lists made so far have had fewer times first in a group of equal distance, so that
//! not all nodes turn to the same one; then the lower number. (The kernel's `find_next_best_node`, since Linux 5.16.)
//!
//! Nodes that only could be plugged in have lists in the kernel too, which count among those made so far, and whose distances
//! it tells nobody: where there are such, two nodes as near may stand the other way round.

use crate::nodes::MAX_NODES;
use crate::sys;
use crate::topology::{CpuSet, NodeId, NodeSet, Topology, facts};

/// How far nodes are from each other, and the order in which each falls back to the others. Plain data of about 9 KiB; of the
/// first 64 nodes of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distances {
    /// How many nodes there are; the arrays below have as many places in use.
    count: usize,
    ids: [NodeId; MAX_NODES],
    apart: [[u8; MAX_NODES]; MAX_NODES],
    /// For each node, those with memory, by their places in `ids`.
    order: [[u8; MAX_NODES]; MAX_NODES],
    with_memory: usize,
}

impl Distances {
    /// The machine's, from the files below `root` that `topology` was read from. About as many file reads as there are pairs
    /// of nodes.
    pub fn read(root: &[u8], topology: &Topology) -> Distances {
        let cpus = |node| topology.cpus_of(root, node);
        let has_cpus = topology
            .nodes
            .iter()
            .filter(|&node| cpus(NodeId(node)).is_ok_and(|cpus: CpuSet| !cpus.is_empty()));
        let between = |from, to| topology.distance(root, from, to);
        Distances::new(
            &topology.nodes,
            &topology.with_memory,
            &has_cpus.collect(),
            between,
        )
    }

    /// Of a machine whose `nodes` are as far apart as `between` says; 10 is the node itself, 255 the most.
    ///
    /// ```
    /// use pinfold::mempolicy::Distances;
    /// use pinfold::topology::{NodeId, NodeSet};
    ///
    /// let nodes = NodeSet::parse(b"0-2")?;
    /// // In a row.
    /// let apart = |from: NodeId, to: NodeId| 10 + 10 * from.0.abs_diff(to.0) as u32;
    /// let distances = Distances::new(&nodes, &nodes, &nodes, apart);
    /// assert_eq!(distances.nearest_first(NodeId(2)).collect::<Vec<_>>(), [NodeId(2), NodeId(1), NodeId(0)]);
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

    /// Calls `f` with the distances of this machine, which are not kept on the stack; not at all
    /// when there is no memory for them.
    pub(super) fn of_this_machine(
        nodes: &NodeSet,
        with_memory: &NodeSet,
        f: impl FnOnce(&Distances),
    ) {
        let size = size_of::<Distances>().next_multiple_of(sys::page_size());
        let Some(memory) = sys::map_memory(size) else {
            return;
        };
        // SAFETY: a fresh mapping, which is large enough and aligned to a page; zeroes are a
        // `Distances` without nodes.
        let distances = unsafe { &mut *memory.as_ptr().cast::<Distances>() };
        let with_cpus = facts::nodes_with_cpus();
        let with_cpus = with_cpus.as_ref().unwrap_or(nodes);
        distances.fill(nodes, with_memory, with_cpus, |ids, from, row| {
            for (&to, apart) in ids.iter().zip(row.iter_mut()) {
                *apart = if to == from { 10 } else { 20 };
            }
            facts::for_each_distance(from, |place, distance| {
                if let Some(apart) = row.get_mut(place) {
                    *apart = u8::try_from(distance).unwrap_or(u8::MAX);
                }
            });
        });
        f(distances);
        // SAFETY: the mapping from above, which nothing borrows any more.
        unsafe { sys::unmap(memory.as_ptr(), size) };
    }

    /// Fills in what the sets say; `row` fills in how far the nodes are from one of them.
    fn fill(
        &mut self,
        nodes: &NodeSet,
        with_memory: &NodeSet,
        with_cpus: &NodeSet,
        mut row: impl FnMut(&[NodeId], NodeId, &mut [u8]),
    ) {
        for (place, id) in self.ids.iter_mut().zip(nodes.iter()) {
            *place = NodeId(id);
            self.count += 1;
        }
        let ids = &self.ids[..self.count];
        for (&from, apart) in ids.iter().zip(&mut self.apart) {
            row(ids, from, &mut apart[..ids.len()]);
        }
        self.list(with_memory, with_cpus);
    }

    /// Makes the lists, in the order in which the kernel makes them: which of two equal nodes comes first depends on it.
    fn list(&mut self, with_memory: &NodeSet, with_cpus: &NodeSet) {
        let mut first_in_group = [0u32; MAX_NODES];
        let ids = self.ids;
        let has = |set: &NodeSet, place: usize| set.contains(ids[place].0);
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

    /// The nodes with memory, in the order in which they are tried for a CPU of node `from`. Nothing for a machine without
    /// any; as for the first node where there is no node `from`.
    pub fn nearest_first(&self, from: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let place = self.place(from).unwrap_or(0);
        let order = self.order[place][..self.with_memory].iter();
        order.map(|&node| self.ids[usize::from(node)])
    }

    /// How far memory of node `to` is from CPUs of node `from`; 10 is local. 10 and 20 where one is not there.
    pub fn distance(&self, from: NodeId, to: NodeId) -> u32 {
        match (self.place(from), self.place(to)) {
            (Some(from), Some(to)) => u32::from(self.apart[from][to]),
            _ if from == to => 10,
            _ => 20,
        }
    }

    fn place(&self, node: NodeId) -> Option<usize> {
        self.ids[..self.count].iter().position(|&id| id == node)
    }
}
