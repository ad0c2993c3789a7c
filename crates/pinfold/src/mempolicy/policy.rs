//! A policy as a value: what the user said, and what it comes to where the process may use only some nodes.

use super::{Flags, Mode, PolicyError};
use crate::topology::{NODES_MOST, NodeId, NodeSet};

/// Which nodes memory comes from: a mode, its flags and its nodes. Plain data of about 400 bytes; a copy is independent.
///
/// # Invariants
///
/// * The mode goes with the flags and with the number of nodes: [`Mempolicy::new`] refuses the rest.
/// * `allowed` is empty until the policy is bound; then `nodes` is `user`.
///
/// ```
/// use pinfold::mempolicy::{Mempolicy, Mode};
///
/// let policy = Mempolicy::parse("interleave=relative:0-3")?;
/// assert_eq!(policy.mode(), Mode::Interleave);
/// assert_eq!(policy.user_nodes().len(), 4);
/// assert_eq!(policy.to_string(), "interleave=relative:0-3");
/// # Ok::<(), pinfold::mempolicy::ParseError>(())
/// ```
#[doc(alias = "mempolicy")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mempolicy {
    pub(super) mode: Mode,
    pub(super) flags: Flags,
    /// What the user asked for. Empty when interleaving: all nodes with memory.
    pub(super) user: NodeSet,
    /// What it comes to.
    pub(super) nodes: NodeSet,
    /// What was allowed when the policy was last bound.
    pub(super) allowed: NodeSet,
    pub(super) home: Option<NodeId>,
}

/// The words that a policy fits into: mode, flags and home node; then three sets.
pub(crate) const WORDS: usize = 1 + 3 * SET_WORDS;
const SET_WORDS: usize = NODES_MOST / 64;
/// Where the home node stands in the first word: its number plus 1.
const HOME_SHIFT: u32 = 32;
const MODE_SHIFT: u32 = 16;

/// What stands behind every policy: the node of the CPU that asks, then the others by distance.
pub static SYSTEM_DEFAULT: Mempolicy = Mempolicy::without_nodes(Mode::Local);

impl Default for Mempolicy {
    /// The policy that leaves the matter to the next one: `default`.
    fn default() -> Self {
        Mempolicy::without_nodes(Mode::Default)
    }
}

impl Mempolicy {
    const fn without_nodes(mode: Mode) -> Mempolicy {
        Mempolicy {
            mode,
            flags: Flags::NONE,
            user: NodeSet::EMPTY,
            nodes: NodeSet::EMPTY,
            allowed: NodeSet::EMPTY,
            home: None,
        }
    }

    /// A policy, checked by the kernel's rules.
    ///
    /// * [`Mode::Default`] and [`Mode::Local`] take neither nodes nor flags.
    /// * [`Mode::Preferred`] takes one node; with none, and without flags, it is [`Mode::Local`].
    /// * [`Mode::Bind`] and [`Mode::PreferredMany`] need nodes.
    /// * [`Mode::Interleave`] and [`Mode::WeightedInterleave`] without nodes, or with every number there could be, mean
    ///   all nodes with memory, whichever these are when the policy is put to use.
    /// * [`Flags::STATIC`] and [`Flags::RELATIVE`] exclude each other; [`Flags::BALANCING`] is for [`Mode::Bind`] and
    ///   [`Mode::PreferredMany`].
    ///
    /// Whether the nodes are there is not looked at here.
    ///
    /// # Errors
    ///
    /// [`PolicyError`] that names the rule.
    ///
    /// ```
    /// use pinfold::mempolicy::{Flags, Mempolicy, Mode, PolicyError};
    /// use pinfold::topology::NodeSet;
    ///
    /// let policy = Mempolicy::new(Mode::Bind, Flags::STATIC, [0, 1].into_iter().collect())?;
    /// assert_eq!(policy.to_string(), "bind=static:0-1");
    /// let refused = Mempolicy::new(Mode::Bind, Flags::NONE, NodeSet::EMPTY);
    /// assert_eq!(refused, Err(PolicyError::NeedsNodes(Mode::Bind)));
    /// # Ok::<(), PolicyError>(())
    /// ```
    pub fn new(mode: Mode, flags: Flags, nodes: NodeSet) -> Result<Mempolicy, PolicyError> {
        let count = nodes.len();
        check_flags(mode, flags, count)?;
        match mode {
            Mode::Default | Mode::Local if count > 0 => Err(PolicyError::TakesNoNodes(mode)),
            Mode::Bind | Mode::PreferredMany if count == 0 => Err(PolicyError::NeedsNodes(mode)),
            Mode::Preferred if count > 1 => Err(PolicyError::TakesOneNode),
            Mode::Preferred if count == 0 => Ok(Mempolicy::local()),
            _ => {
                let all = mode.interleaves() && count == NODES_MOST;
                let user = if all { NodeSet::EMPTY } else { nodes };
                Ok(Mempolicy {
                    flags,
                    nodes: user.clone(),
                    user,
                    ..Mempolicy::without_nodes(mode)
                })
            }
        }
    }

    /// The node of the CPU that first touches a page.
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    /// use pinfold::topology::{NodeId, NodeSet};
    ///
    /// assert_eq!(Mempolicy::local().to_string(), "local");
    /// assert_eq!(Mempolicy::preferred(NodeId(2))?.to_string(), "prefer:2");
    /// assert_eq!(Mempolicy::interleave(NodeSet::EMPTY)?.to_string(), "interleave");
    /// # Ok::<(), pinfold::mempolicy::PolicyError>(())
    /// ```
    pub const fn local() -> Mempolicy {
        Mempolicy::without_nodes(Mode::Local)
    }

    /// One node first.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NodeTooLarge`] for a number that no node can have.
    pub fn preferred(node: NodeId) -> Result<Mempolicy, PolicyError> {
        check_node(node)?;
        let nodes = [node.0].into_iter().collect();
        Mempolicy::new(Mode::Preferred, Flags::NONE, nodes)
    }

    /// These nodes first, then all.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NeedsNodes`] for the empty set.
    pub fn preferred_many(nodes: NodeSet) -> Result<Mempolicy, PolicyError> {
        Mempolicy::new(Mode::PreferredMany, Flags::NONE, nodes)
    }

    /// These nodes and no others.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NeedsNodes`] for the empty set.
    pub fn bind(nodes: NodeSet) -> Result<Mempolicy, PolicyError> {
        Mempolicy::new(Mode::Bind, Flags::NONE, nodes)
    }

    /// Page by page around these nodes; around all with memory for the empty set.
    ///
    /// # Errors
    ///
    /// None today.
    pub fn interleave(nodes: NodeSet) -> Result<Mempolicy, PolicyError> {
        Mempolicy::new(Mode::Interleave, Flags::NONE, nodes)
    }

    /// As [`interleave`](Self::interleave), by the nodes' weights. Linux 6.9.
    ///
    /// # Errors
    ///
    /// None today.
    pub fn weighted_interleave(nodes: NodeSet) -> Result<Mempolicy, PolicyError> {
        Mempolicy::new(Mode::WeightedInterleave, Flags::NONE, nodes)
    }

    /// What the policy does with its nodes.
    pub const fn mode(&self) -> Mode {
        self.mode
    }

    /// How its nodes follow what is allowed.
    pub const fn flags(&self) -> Flags {
        self.flags
    }

    /// The nodes that the user named; empty where none were. When interleaving, none means all with memory.
    pub const fn user_nodes(&self) -> &NodeSet {
        &self.user
    }

    /// The nodes that memory comes from: the user's until the policy is [bound](Self::contextualize), then what they come to
    /// among the allowed ones.
    pub const fn nodes(&self) -> &NodeSet {
        &self.nodes
    }

    /// The nodes that were allowed when the policy was last bound; `None` when it never was.
    pub fn bound_to(&self) -> Option<&NodeSet> {
        (!self.allowed.is_empty()).then_some(&self.allowed)
    }

    /// The node that distances are measured from, where it is not the CPU's own.
    pub const fn home(&self) -> Option<NodeId> {
        self.home
    }

    /// Measures distances from `home`, so that the policy's node nearest to it comes first; `None`: from the CPU's node.
    ///
    /// # Errors
    ///
    /// [`PolicyError::TakesNoHome`] unless the mode is [`Mode::Bind`] or [`Mode::PreferredMany`];
    /// [`PolicyError::NodeTooLarge`].
    ///
    /// ```
    /// use pinfold::{mempolicy::Mempolicy, topology::NodeId};
    ///
    /// let mut policy = Mempolicy::parse("bind:0-3")?;
    /// policy.set_home_node(Some(NodeId(2)))?;
    /// assert_eq!(policy.to_string(), "bind:0-3@2");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_home_node(&mut self, home: Option<NodeId>) -> Result<(), PolicyError> {
        home.map_or(Ok(()), check_node)?;
        if home.is_some() && !matches!(self.mode, Mode::Bind | Mode::PreferredMany) {
            return Err(PolicyError::TakesNoHome(self.mode));
        }
        self.home = home;
        Ok(())
    }

    /// The policy as the user said it, not bound to any nodes: what its text stands for.
    #[must_use]
    pub fn unbound(&self) -> Mempolicy {
        Mempolicy {
            nodes: self.user.clone(),
            allowed: NodeSet::EMPTY,
            ..self.clone()
        }
    }

    /// The policy in words, for those who keep policies in atomics.
    pub(crate) fn to_words(&self) -> [u64; WORDS] {
        let home = self.home.map_or(0, |home| home.0 as u64 + 1);
        let mut words = [0; WORDS];
        words[0] =
            home << HOME_SHIFT | (self.mode as u64) << MODE_SHIFT | u64::from(self.flags.bits());
        let sets = [&self.user, &self.nodes, &self.allowed];
        for (to, set) in words[1..].chunks_exact_mut(SET_WORDS).zip(sets) {
            to.copy_from_slice(&set.words);
        }
        words
    }

    /// The policy of [`to_words`](Self::to_words). Words that are no policy's give `default`.
    pub(crate) fn from_words(words: &[u64; WORDS]) -> Mempolicy {
        let Some(mode) = Mode::from_number(words[0] >> MODE_SHIFT & 0xffff) else {
            return Mempolicy::default();
        };
        let home = usize::try_from(words[0] >> HOME_SHIFT).unwrap_or(0);
        let set = |n: usize| {
            let mut set = NodeSet::EMPTY;
            let from = 1 + n * SET_WORDS;
            set.words.copy_from_slice(&words[from..from + SET_WORDS]);
            set
        };
        Mempolicy {
            mode,
            flags: Flags::from_bits(words[0] as u16),
            user: set(0),
            nodes: set(1),
            allowed: set(2),
            home: home.checked_sub(1).map(NodeId),
        }
    }
}

/// The rules for flags, in the order in which the kernel has them.
fn check_flags(mode: Mode, flags: Flags, nodes: usize) -> Result<(), PolicyError> {
    let placed = flags.contains(Flags::STATIC) || flags.contains(Flags::RELATIVE);
    if flags.contains(Flags::STATIC | Flags::RELATIVE) {
        return Err(PolicyError::StaticAndRelative);
    }
    if flags.contains(Flags::BALANCING) && !matches!(mode, Mode::Bind | Mode::PreferredMany) {
        return Err(PolicyError::TakesNoBalancing(mode));
    }
    let without = match mode {
        Mode::Default | Mode::Local => true,
        Mode::Preferred => nodes == 0,
        _ => false,
    };
    if placed && without {
        return Err(PolicyError::TakesNoFlags(mode));
    }
    Ok(())
}

fn check_node(node: NodeId) -> Result<(), PolicyError> {
    if node.0 < NODES_MOST {
        Ok(())
    } else {
        Err(PolicyError::NodeTooLarge(node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_back() {
        for text in [
            "default",
            "local",
            "prefer:1023",
            "bind=static|balancing:0,2-9@7",
            "interleave",
        ] {
            let mut policy = Mempolicy::parse(text).unwrap();
            assert_eq!(Mempolicy::from_words(&policy.to_words()), policy);
            policy.rebind(&[2, 3].into_iter().collect());
            assert_eq!(Mempolicy::from_words(&policy.to_words()), policy);
        }
        assert_eq!(
            Mempolicy::from_words(&[u64::MAX; WORDS]),
            Mempolicy::default()
        );
    }
}
