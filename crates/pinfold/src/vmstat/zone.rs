//! Zones: where items are counted.

use crate::topology::NodeId;
use crate::{mempolicy, nodes};

/// Zones of each node: its memory in normal pages, and its memory in huge pages.
pub(super) const ZONES_A_NODE: usize = 2;

/// Names a node's memory of one page size.
///
/// Nodes are numbered as everywhere in the library, for example in
/// [`KmemCache::alloc_node`](crate::slab::KmemCache::alloc_node) and
/// [`NUMA_STAT`](crate::page::NUMA_STAT): the nodes with memory that this process could use when it
/// started have the numbers from 0 on, in the order of the system's ids.
/// [`normal_of`](Self::normal_of) and [`huge_of`](Self::huge_of) take the system's id instead.
///
/// The node of a `Zone` need not exist. A [`VmStat`](super::VmStat) counts nothing for such a zone:
/// the zone reads as 0, and [`VmStat::lost`](super::VmStat::lost) counts the adds.
///
/// ```
/// use pinfold::topology::NodeId;
/// use pinfold::vmstat::{VmStat, Zone};
///
/// pinfold::vmstat_items! {
///     pub enum Ring {
///         Used = "nr_used",
///     }
/// }
///
/// static RING: VmStat<Ring> = VmStat::new();
/// let nowhere = Zone::normal(1000);
/// RING.inc(nowhere, Ring::Used);
/// assert!(!RING.has(nowhere));
/// assert_eq!((RING.snapshot_zone(nowhere, Ring::Used), RING.lost()), (0, 1));
/// assert_eq!(Zone::normal_of(NodeId(1000)), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone(pub(super) usize);

impl Zone {
    /// Returns the zone of node `node`'s memory in pages of the usual size.
    #[inline(always)]
    pub const fn normal(node: usize) -> Zone {
        Zone(node.saturating_mul(ZONES_A_NODE))
    }

    /// Returns the zone of node `node`'s memory in huge pages.
    #[inline(always)]
    pub const fn huge(node: usize) -> Zone {
        Zone(node.saturating_mul(ZONES_A_NODE).saturating_add(1))
    }

    /// Returns the zone of a node's memory in pages of the usual size, by the system's id of the
    /// node. Returns `None` if this process could not use the node when it started.
    pub fn normal_of(node: NodeId) -> Option<Zone> {
        mempolicy::init();
        nodes::with_id(node.0).map(Zone::normal)
    }

    /// Returns the zone of a node's memory in huge pages, by the system's id of the node. Returns
    /// `None` if this process could not use the node when it started.
    pub fn huge_of(node: NodeId) -> Option<Zone> {
        mempolicy::init();
        nodes::with_id(node.0).map(Zone::huge)
    }
}
