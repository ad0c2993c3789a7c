//! Binding: what a policy's nodes come to among those that the process may use.
//!
//! Two moments: when the policy is put to use, and whenever the allowed nodes change (a cpuset's `cpuset.mems`). The rules
//! are the kernel's.

use super::{Flags, Mempolicy, Mode, PolicyError};
use crate::topology::NodeSet;

impl Mempolicy {
    /// Binds the policy to the nodes that may be used, when it is put to use: the user's that are among them; with
    /// [`Flags::RELATIVE`], those at the user's positions among them; all of them where the user named none.
    ///
    /// `default` and `local` have no nodes and do not change.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NoneAllowed`] when no node is left; the policy is as before.
    ///
    /// ```
    /// use pinfold::{mempolicy::Mempolicy, topology::NodeSet};
    ///
    /// let mut policy = Mempolicy::parse("interleave=relative:0-1")?;
    /// policy.contextualize(&NodeSet::parse(b"4-7")?)?;
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

    /// Has the policy follow a change of the nodes that may be used.
    ///
    /// * [`Flags::STATIC`]: the user's nodes that are allowed now.
    /// * [`Flags::RELATIVE`]: those at the user's positions among the allowed ones; positions beyond their number begin again
    ///   at the first.
    /// * Neither: the n-th of the nodes allowed before becomes the n-th of those allowed now; nodes that were not allowed
    ///   before stay.
    /// * Where nothing is left: all that are allowed.
    ///
    /// `default` and `local` have no nodes. `prefer` and `prefer (many)` keep theirs: they are wishes, and memory comes from
    /// elsewhere when they cannot be met. A policy that was never bound is bound as by
    /// [`contextualize`](Self::contextualize). An empty set changes nothing: there is nowhere to go.
    ///
    /// ```
    /// use pinfold::{mempolicy::Mempolicy, topology::NodeSet};
    ///
    /// let mut policy = Mempolicy::parse("bind:0-1")?;
    /// policy.contextualize(&NodeSet::parse(b"0-3")?)?;
    /// policy.rebind(&NodeSet::parse(b"2-3")?);
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

/// Positions, begun again at 0 after every `count`.
fn fold(positions: &NodeSet, count: usize) -> NodeSet {
    positions
        .iter()
        .filter_map(|n| n.checked_rem(count))
        .collect()
}

/// The members at some positions of a set.
fn onto(positions: &NodeSet, set: &NodeSet) -> NodeSet {
    let members = set.iter().enumerate();
    members
        .filter(|(position, _)| positions.contains(*position))
        .map(|(_, node)| node)
        .collect()
}

/// `nodes`, with the n-th of `old` replaced by the n-th of `new`, begun again at the first where `new` has fewer.
fn remap(nodes: &NodeSet, old: &NodeSet, new: &NodeSet) -> NodeSet {
    let mut positions = NodeSet::EMPTY;
    for (position, node) in old.iter().enumerate() {
        if nodes.contains(node) {
            positions.insert(position);
        }
    }
    onto(&fold(&positions, new.len()), new).or(&nodes.without(old))
}
