//! A policy as a value: the nodes that the user named, and the nodes from which memory comes.

use super::{Flags, Mode, PolicyError};
use crate::topology::{MAX_NODES, NodeId, NodeSet};

/// A policy: a mode, its flags and its nodes.
///
/// Plain data of about 400 bytes. A copy is independent of the original.
///
/// # Invariants
///
/// * The mode permits the flags and the number of nodes: [`Mempolicy::new`] refuses everything
///   else.
/// * While the policy is unbound, `allowed` is empty and `nodes` equals `user`.
///
/// # Examples
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
    /// The user nodes. Empty for an interleaving policy that means all nodes with memory.
    pub(super) user: NodeSet,
    /// The nodes from which memory comes: the user nodes until the policy is bound.
    pub(super) nodes: NodeSet,
    /// The allowed nodes when the policy was last bound.
    pub(super) allowed: NodeSet,
    pub(super) home: Option<NodeId>,
}

/// Words of a policy: one with the mode, the flags and the home node, then three sets.
pub(crate) const WORDS: usize = 1 + 3 * SET_WORDS;
const SET_WORDS: usize = MAX_NODES / 64;
/// The bits of the first word from this one on hold the home node's number plus 1.
const HOME_SHIFT: u32 = 32;
const MODE_SHIFT: u32 = 16;

/// The policy where there is no other: memory comes from the node of the CPU that asks, then from
/// the other nodes by distance.
pub static SYSTEM_DEFAULT: Mempolicy = Mempolicy::without_nodes(Mode::Local);

impl Default for Mempolicy {
    /// Returns the `default` policy, which means "no policy".
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

    /// Makes a policy, and checks it by the kernel's rules.
    ///
    /// * [`Mode::Default`] and [`Mode::Local`] take neither nodes nor flags.
    /// * [`Mode::Preferred`] takes one node. Without nodes and flags it becomes [`Mode::Local`].
    /// * [`Mode::Bind`] and [`Mode::PreferredMany`] need nodes.
    /// * [`Mode::Interleave`] and [`Mode::WeightedInterleave`] without nodes, or with all numbers
    ///   below [`MAX_NODES`], mean all nodes with memory at the time when the policy is put to
    ///   use.
    /// * [`Flags::STATIC`] and [`Flags::RELATIVE`] exclude each other. [`Flags::BALANCING`] goes
    ///   with [`Mode::Bind`] and [`Mode::PreferredMany`].
    ///
    /// Does not check whether the nodes exist.
    ///
    /// # Errors
    ///
    /// A [`PolicyError`] that names the violated rule.
    ///
    /// # Examples
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
                let all = mode.interleaves() && count == MAX_NODES;
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

    /// Makes the policy `local`: memory comes from the node of the CPU that first touches the page.
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    ///
    /// assert_eq!(Mempolicy::local().to_string(), "local");
    /// ```
    pub const fn local() -> Mempolicy {
        Mempolicy::without_nodes(Mode::Local)
    }

    /// Makes the policy `prefer`: memory comes from `node` first.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NodeTooLarge`] if the number is not below [`MAX_NODES`].
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    /// use pinfold::topology::NodeId;
    ///
    /// assert_eq!(Mempolicy::preferred(NodeId(2))?.to_string(), "prefer:2");
    /// # Ok::<(), pinfold::mempolicy::PolicyError>(())
    /// ```
    pub fn preferred(node: NodeId) -> Result<Mempolicy, PolicyError> {
        check_node(node)?;
        let nodes = [node.0].into_iter().collect();
        Mempolicy::new(Mode::Preferred, Flags::NONE, nodes)
    }

    /// Makes the policy `prefer (many)`: memory comes from these nodes first.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NeedsNodes`] for the empty set.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    ///
    /// let policy = Mempolicy::preferred_many([0, 2].into_iter().collect())?;
    /// assert_eq!(policy.to_string(), "prefer (many):0,2");
    /// # Ok::<(), pinfold::mempolicy::PolicyError>(())
    /// ```
    pub fn preferred_many(nodes: NodeSet) -> Result<Mempolicy, PolicyError> {
        Mempolicy::new(Mode::PreferredMany, Flags::NONE, nodes)
    }

    /// Makes the policy `bind`: memory comes from these nodes only.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NeedsNodes`] for the empty set.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    ///
    /// let policy = Mempolicy::bind([0, 1].into_iter().collect())?;
    /// assert_eq!(policy.to_string(), "bind:0-1");
    /// # Ok::<(), pinfold::mempolicy::PolicyError>(())
    /// ```
    pub fn bind(nodes: NodeSet) -> Result<Mempolicy, PolicyError> {
        Mempolicy::new(Mode::Bind, Flags::NONE, nodes)
    }

    /// Makes the policy `interleave`: memory comes from these nodes in turn, page by page. The
    /// empty set means all nodes with memory.
    ///
    /// # Errors
    ///
    /// Never fails today: every set of nodes is valid.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    /// use pinfold::topology::NodeSet;
    ///
    /// assert_eq!(Mempolicy::interleave(NodeSet::EMPTY)?.to_string(), "interleave");
    /// # Ok::<(), pinfold::mempolicy::PolicyError>(())
    /// ```
    pub fn interleave(nodes: NodeSet) -> Result<Mempolicy, PolicyError> {
        Mempolicy::new(Mode::Interleave, Flags::NONE, nodes)
    }

    /// Makes the policy `weighted interleave`: memory comes from these nodes in turn, as many pages
    /// from each as its weight. The empty set means all nodes with memory.
    ///
    /// The kernel supports it since Linux 6.9.
    ///
    /// # Errors
    ///
    /// Never fails today: every set of nodes is valid.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::mempolicy::Mempolicy;
    ///
    /// let policy = Mempolicy::weighted_interleave([0, 1].into_iter().collect())?;
    /// assert_eq!(policy.to_string(), "weighted interleave:0-1");
    /// # Ok::<(), pinfold::mempolicy::PolicyError>(())
    /// ```
    pub fn weighted_interleave(nodes: NodeSet) -> Result<Mempolicy, PolicyError> {
        Mempolicy::new(Mode::WeightedInterleave, Flags::NONE, nodes)
    }

    /// Returns what the policy does with its nodes.
    pub const fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns how the policy's nodes follow the allowed nodes.
    pub const fn flags(&self) -> Flags {
        self.flags
    }

    /// Returns the nodes that the user named. For an interleaving policy the empty set means all
    /// nodes with memory.
    pub const fn user_nodes(&self) -> &NodeSet {
        &self.user
    }

    /// Returns the nodes from which memory comes.
    ///
    /// Until the policy is [bound](Self::contextualize), these are the user nodes. Binding computes
    /// them from the user nodes and the allowed nodes.
    pub const fn nodes(&self) -> &NodeSet {
        &self.nodes
    }

    /// Returns the nodes that were allowed when the policy was last bound, or `None` if the policy
    /// was never bound.
    pub fn bound_to(&self) -> Option<&NodeSet> {
        (!self.allowed.is_empty()).then_some(&self.allowed)
    }

    /// Returns the home node, from which distances are measured. Returns `None` if distances are
    /// measured from the CPU's node.
    pub const fn home(&self) -> Option<NodeId> {
        self.home
    }

    /// Sets the home node, from which distances are measured. So the policy's node that is nearest
    /// to the home node comes first. With `None`, distances are measured from the CPU's node.
    ///
    /// # Errors
    ///
    /// [`PolicyError::TakesNoHome`] if the mode is not [`Mode::Bind`] or [`Mode::PreferredMany`];
    /// [`PolicyError::NodeTooLarge`] if the number is not below [`MAX_NODES`].
    ///
    /// # Examples
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

    /// Returns the policy as the user named it, not bound to any nodes. Both policies have the same
    /// text.
    #[must_use]
    pub fn unbound(&self) -> Mempolicy {
        Mempolicy {
            nodes: self.user.clone(),
            allowed: NodeSet::EMPTY,
            ..self.clone()
        }
    }

    /// Returns the policy as words, to keep in atomics.
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

    /// Returns the policy with these words, or `default` if the words are not those of a policy.
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

/// Checks the flags, in the kernel's order of rules.
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
    if node.0 < MAX_NODES {
        Ok(())
    } else {
        Err(PolicyError::NodeTooLarge(node))
    }
}

/// Returns the policy that is in effect for an allocation: the range's policy, else the task's
/// policy, else [`SYSTEM_DEFAULT`].
///
/// A `default` policy counts as no policy. Costs two comparisons. Counts no reference.
///
/// ```
/// use pinfold::mempolicy::{Mempolicy, SYSTEM_DEFAULT, effective};
///
/// let task = Mempolicy::parse("prefer:1")?;
/// assert_eq!(effective(Some(&Mempolicy::default()), Some(&task)), &task);
/// assert_eq!(effective(None, None), &SYSTEM_DEFAULT);
/// # Ok::<(), pinfold::mempolicy::ParseError>(())
/// ```
#[doc(alias = "get_vma_policy")]
pub fn effective<'p>(range: Option<&'p Mempolicy>, task: Option<&'p Mempolicy>) -> &'p Mempolicy {
    let says = |policy: &&Mempolicy| policy.mode() != Mode::Default;
    range
        .filter(says)
        .or(task.filter(says))
        .unwrap_or(&SYSTEM_DEFAULT)
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
