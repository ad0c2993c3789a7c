//! The weights of `weighted interleave`: how many pages in a row go to each node.

use crate::sys::{Text, read_file_below};
use crate::topology::{MAX_NODES, NodeId, NodeSet, Topology};
use core::fmt::Write;

/// A weight for each node, from 1 to 255. Plain data of 1 KiB.
///
/// ```
/// use pinfold::mempolicy::Weights;
/// use pinfold::topology::NodeId;
///
/// let mut weights = Weights::default();
/// weights.set(NodeId(1), 3);
/// assert_eq!([weights.weight(NodeId(0)), weights.weight(NodeId(1))], [1, 3]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights([u8; MAX_NODES]);

impl Default for Weights {
    /// Returns weight 1 for every node: weighted interleaving is then the same as interleaving.
    fn default() -> Self {
        Weights([1; MAX_NODES])
    }
}

impl Weights {
    /// Reads the kernel's weights of the nodes of `topology`, from
    /// `/sys/kernel/mm/mempolicy/weighted_interleave/nodeN`.
    ///
    /// A node has weight 1 if its file is missing, as before Linux 6.9, or makes no sense. One file
    /// read for each node.
    ///
    /// ```
    /// use pinfold::mempolicy::Weights;
    /// use pinfold::topology::{NodeId, Topology};
    ///
    /// let weights = Weights::read(&Topology::system()?);
    /// assert!(weights.weight(NodeId(0)) >= 1);
    /// # Ok::<(), pinfold::topology::TopologyError>(())
    /// ```
    pub fn read(topology: &Topology) -> Weights {
        Weights::read_below(topology.root(), &topology.nodes)
    }

    /// Reads the kernel's weights of `nodes` from files below `root`.
    pub(super) fn read_below(root: &[u8], nodes: &NodeSet) -> Weights {
        let mut weights = Weights::default();
        for node in nodes.iter() {
            let mut path = Text::<96>::new();
            let folder = "sys/kernel/mm/mempolicy/weighted_interleave";
            let mut text = [0; 16];
            if write!(path, "{folder}/node{node}").is_ok()
                && let Ok(text) = read_file_below(root, path.get(), &mut text)
                && let Some(weight) = number(text)
            {
                weights.set(NodeId(node), weight);
            }
        }
        weights
    }

    /// Returns a node's weight. Returns 1 if the node's number is not below [`MAX_NODES`].
    pub fn weight(&self, node: NodeId) -> u8 {
        self.0.get(node.0).copied().unwrap_or(1)
    }

    /// Sets a node's weight, in this table only. 0 means 1, as in the kernel.
    pub fn set(&mut self, node: NodeId, weight: u8) {
        if let Some(place) = self.0.get_mut(node.0) {
            *place = weight.max(1);
        }
    }
}

fn number(text: &[u8]) -> Option<u8> {
    core::str::from_utf8(text.trim_ascii()).ok()?.parse().ok()
}
