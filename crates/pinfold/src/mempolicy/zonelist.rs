//! Computes which node a page goes to under a policy, and the nodes that follow when this node has
//! no memory left.
//!
//! Pure functions of a [bound](Mempolicy::contextualize) policy.

use super::{Distances, Mempolicy, Mode, Weights};
use crate::topology::{NodeId, NodeSet};

/// Returns the node that a page goes to.
///
/// * `page_offset` decides whose turn it is under an interleaving policy. Which number the kernel
///   takes for it depends on the memory:
///
/// | memory | `page_offset` |
/// |---|---|
/// | a file | the page's number in the file |
/// | shared memory | the page's number in it, plus the number of its inode |
/// | private memory | the address divided by the page size |
/// | memory under a thread's policy | a count of the thread's own, which cannot be predicted |
///
/// Before Linux 6.7 only the lower 32 bits count.
///
/// * `local` is the node of the CPU that first touches the page.
///
/// Takes time in proportion to the number of nodes. A policy without nodes, such as `interleave`
/// before it is bound, gives the local node.
///
/// ```
/// use pinfold::mempolicy::{Distances, Mempolicy, Weights, node_for};
/// use pinfold::topology::{NodeId, NodeSet};
///
/// let nodes: NodeSet = "0-3".parse()?;
/// let distances = Distances::new(&nodes, &nodes, &nodes, |from, to| {
///     if from == to { 10 } else { 20 }
/// });
/// let policy = Mempolicy::parse("interleave:1,3")?;
/// let node = |page| node_for(&policy, page, NodeId(0), &Weights::default(), &distances);
/// assert_eq!([node(0), node(1), node(2)], [NodeId(1), NodeId(3), NodeId(1)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn node_for(
    policy: &Mempolicy,
    page_offset: u64,
    local: NodeId,
    weights: &Weights,
    distances: &Distances,
) -> NodeId {
    let nodes = policy.nodes();
    let turn = match policy.mode() {
        Mode::Interleave => by_turn(nodes, page_offset, |_| 1),
        Mode::WeightedInterleave => by_turn(nodes, page_offset, |node| weights.weight(node)),
        _ => None,
    };
    let from = turn.unwrap_or(local);
    zonelist(policy, from, distances).next().unwrap_or(from)
}

/// Returns the nodes that the kernel tries for a page, in order.
///
/// `from` is the node of the CPU that asks or, under an interleaving policy, the node whose turn it
/// is.
///
/// | mode | nodes |
/// |---|---|
/// | `prefer` | the policy's node, then the others by distance from it |
/// | `bind` | the policy's nodes by distance from the home node, or from `from`; no others |
/// | `prefer (many)` | the policy's nodes, then the others, both by distance as for `bind` |
/// | others | all nodes by distance from `from` |
///
/// ```
/// use pinfold::mempolicy::{Distances, Mempolicy, zonelist};
/// use pinfold::topology::{NodeId, NodeSet};
///
/// let nodes: NodeSet = "0-2".parse()?;
/// let distances = Distances::new(&nodes, &nodes, &nodes, |from, to| {
///     10 + from.0.abs_diff(to.0) as u32
/// });
/// let policy = Mempolicy::parse("prefer (many):0-1@1")?;
/// let order: Vec<_> = zonelist(&policy, NodeId(2), &distances).collect();
/// assert_eq!(order, [NodeId(1), NodeId(0), NodeId(2)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "policy_zonelist")]
pub fn zonelist<'p>(
    policy: &'p Mempolicy,
    from: NodeId,
    distances: &'p Distances,
) -> impl Iterator<Item = NodeId> + 'p {
    let nodes = policy.nodes();
    let mode = policy.mode();
    let from = match mode {
        Mode::Preferred => nodes.iter().next().map_or(from, NodeId),
        Mode::Bind | Mode::PreferredMany => policy.home().unwrap_or(from),
        _ => from,
    };
    let masked = matches!(mode, Mode::Bind | Mode::PreferredMany);
    let first = distances
        .nearest_first(from)
        .filter(move |node| !masked || nodes.contains(node.0));
    let then = distances
        .nearest_first(from)
        .filter(move |node| mode == Mode::PreferredMany && !nodes.contains(node.0));
    first.chain(then)
}

/// Returns the node whose turn it is at page `offset`, if each node has as many pages in a row as
/// its weight.
fn by_turn(nodes: &NodeSet, offset: u64, weight: impl Fn(NodeId) -> u8) -> Option<NodeId> {
    let weighed = || {
        let nodes = nodes.iter().map(NodeId);
        nodes.map(|node| (node, u64::from(weight(node))))
    };
    let round: u64 = weighed().map(|(_, weight)| weight).sum();
    let mut turn = offset.checked_rem(round)?;
    for (node, weight) in weighed() {
        match turn.checked_sub(weight) {
            Some(rest) => turn = rest,
            None => return Some(node),
        }
    }
    None
}
