//! Binding: computes a policy's nodes from its user nodes and the allowed nodes.
//!
//! A policy is bound when it is put to use, and bound again whenever the allowed nodes change (a
//! cpuset's `cpuset.mems`). The rules are the kernel's.

use super::{Flags, Mempolicy, Mode, PolicyError};
use crate::topology::NodeSet;

impl Mempolicy {
    /// Binds the policy to the allowed nodes, when the policy is put to use.
    ///
    /// The policy's nodes become:
    ///
    /// * the user nodes that are allowed, by default and with [`Flags::STATIC`];
    /// * with [`Flags::RELATIVE`], the allowed nodes at the positions that the user named;
    /// * all allowed nodes, if the user named none.
    ///
    /// `default` and `local` have no nodes and do not change. O(n) in the number of nodes.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NoneAllowed`] if no node is left. Then the policy is unchanged.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    ///
    /// let mut policy = Mempolicy::parse("interleave=relative:0-1")?;
    /// policy.contextualize(&"4-7".parse()?)?;
    /// assert_eq!(policy.nodes().to_string(), "4-5");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(alias = "mpol_set_nodemask")]
    pub fn contextualize(&mut self, allowed: &NodeSet) -> Result<(), PolicyError> {
        if matches!(self.mode, Mode::Default | Mode::Local) {
            return Ok(());
        }
        let nodes = if self.user.is_empty() {
            allowed.clone()
        } else if self.flags.contains(Flags::RELATIVE) {
            onto(&fold(&self.user, allowed.len()), allowed)
        } else {
            self.user.and(allowed)
        };
        if nodes.is_empty() {
            return Err(PolicyError::NoneAllowed(self.mode));
        }
        self.nodes = nodes;
        self.allowed = allowed.clone();
        Ok(())
    }

    /// Binds the policy again after the allowed nodes have changed.
    ///
    /// The policy's nodes become:
    ///
    /// * with [`Flags::STATIC`], the user nodes that are allowed now;
    /// * with [`Flags::RELATIVE`], the allowed nodes at the positions that the user named.
    ///   Positions past the last allowed node wrap around to the first;
    /// * with neither flag, the n-th of the new allowed nodes for each node that was the n-th of
    ///   the old allowed nodes. Nodes that were not allowed before stay;
    /// * all allowed nodes, if these rules leave none.
    ///
    /// Exceptions:
    ///
    /// * `default` and `local` have no nodes.
    /// * `prefer` and `prefer (many)` keep their nodes. These nodes are wishes: if they have no
    ///   memory, memory comes from other nodes.
    /// * A policy that was never bound is bound by the rules of
    ///   [`contextualize`](Self::contextualize).
    /// * An empty set changes nothing.
    ///
    /// O(n) in the number of nodes.
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    ///
    /// let mut policy = Mempolicy::parse("bind:0-1")?;
    /// policy.contextualize(&"0-3".parse()?)?;
    /// policy.rebind(&"2-3".parse()?);
    /// assert_eq!(policy.nodes().to_string(), "2-3");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(alias = "mpol_rebind_policy")]
    pub fn rebind(&mut self, allowed: &NodeSet) {
        if matches!(self.mode, Mode::Default | Mode::Local) || allowed.is_empty() {
            return;
        }
        let first = self.allowed.is_empty();
        if first && self.contextualize(allowed).is_ok() {
            return;
        }
        if !matches!(self.mode, Mode::Preferred | Mode::PreferredMany) {
            let nodes = if first {
                NodeSet::EMPTY
            } else {
                self.nodes_among(allowed)
            };
            self.nodes = if nodes.is_empty() {
                allowed.clone()
            } else {
                nodes
            };
        }
        self.allowed = allowed.clone();
    }

    fn nodes_among(&self, allowed: &NodeSet) -> NodeSet {
        if self.user.is_empty() {
            allowed.clone()
        } else if self.flags.contains(Flags::STATIC) {
            self.user.and(allowed)
        } else if self.flags.contains(Flags::RELATIVE) {
            onto(&fold(&self.user, allowed.len()), allowed)
        } else {
            remap(&self.nodes, &self.allowed, allowed)
        }
    }
}

/// Returns each position modulo `count`. Returns the empty set if `count` is 0.
fn fold(positions: &NodeSet, count: usize) -> NodeSet {
    positions
        .iter()
        .filter_map(|n| n.checked_rem(count))
        .collect()
}

/// Returns the members of `set` at `positions`, counted from 0.
fn onto(positions: &NodeSet, set: &NodeSet) -> NodeSet {
    let members = set.iter().enumerate();
    members
        .filter(|(position, _)| positions.contains(*position))
        .map(|(_, node)| node)
        .collect()
}

/// Returns `nodes` with the n-th member of `old` replaced by the n-th of `new`. Positions past the
/// end of `new` wrap around to its first member. Nodes outside `old` stay.
fn remap(nodes: &NodeSet, old: &NodeSet, new: &NodeSet) -> NodeSet {
    let mut positions = NodeSet::EMPTY;
    for (position, node) in old.iter().enumerate() {
        if nodes.contains(node) {
            positions.insert(position);
        }
    }
    onto(&fold(&positions, new.len()), new).or(&nodes.without(old))
}
