//! How many pages in a row `weighted interleave` places on each node.

use crate::sys::read_file_below;
use crate::topology::{NODES_MOST, NodeId, NodeSet};
use core::fmt::{self, Write};

/// A weight for each node, from 1 to 255; 1 KiB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights([u8; NODES_MOST]);

impl Default for Weights {
    /// Every node weighs 1: then weighted interleaving is interleaving.
    fn default() -> Self {
        Weights([1; NODES_MOST])
    }
}

impl Weights {
    /// The weights that the kernel has for some nodes, from `sys/kernel/mm/mempolicy/weighted_interleave/nodeN` below `root`
    /// (`/`, but for tests). 1 where a file is not there, as before Linux 6.9, or says nothing. One file read for each node.
    ///
    /// ```
    /// use pinfold::mempolicy::Weights;
    /// use pinfold::topology::{NodeId, NodeSet};
    ///
    /// let weights = Weights::read(b"/no/such/root", &NodeSet::parse(b"0-1")?);
    /// assert_eq!(weights.weight(NodeId(0)), 1);
    /// # Ok::<(), pinfold::topology::ListError>(())
    /// ```
    pub fn read(root: &[u8], nodes: &NodeSet) -> Weights {
        let mut weights = Weights::default();
        for node in nodes.iter() {
            let mut path = Path::default();
            let folder = "sys/kernel/mm/mempolicy/weighted_interleave";
            let mut text = [0; 16];
            if write!(path, "{folder}/node{node}").is_ok()
                && let Ok(text) = read_file_below(root, &path.bytes[..path.length], &mut text)
                && let Some(weight) = number(text)
            {
                weights.set(NodeId(node), weight);
            }
        }
        weights
    }

    /// The weight of a node; 1 for a number that no node can have.
    pub fn weight(&self, node: NodeId) -> u8 {
        self.0.get(node.0).copied().unwrap_or(1)
    }

    /// Has a node weigh so much, in this table alone. 0 means 1, as for the kernel.
    pub fn set(&mut self, node: NodeId, weight: u8) {
        if let Some(place) = self.0.get_mut(node.0) {
            *place = weight.max(1);
        }
    }
}

fn number(text: &[u8]) -> Option<u8> {
    core::str::from_utf8(text.trim_ascii()).ok()?.parse().ok()
}

/// A path that is being put together.
struct Path {
    bytes: [u8; 96],
    length: usize,
}

impl Default for Path {
    fn default() -> Self {
        Path {
            bytes: [0; 96],
            length: 0,
        }
    }
}

impl Write for Path {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.length + text.len();
        let room = self.bytes.get_mut(self.length..end).ok_or(fmt::Error)?;
        room.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}
