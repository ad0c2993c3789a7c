//! How the allocator follows a policy: the policy's mode and nodes, packed into two words. The
//! nodes have the allocator's own numbers.

use super::{Flags, Mempolicy, Mode, Weights};
use crate::nodes;
use crate::topology::{NodeId, NodeSet};
use core::num::NonZeroU64;
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::Relaxed;

/// The weight of each node. Read whenever a `weighted interleave` policy is set. 0 counts as 1.
static WEIGHTS: [AtomicU8; nodes::MAX_NODES] = [const { AtomicU8::new(0) }; nodes::MAX_NODES];

/// The nodes that the allocator asks under a policy. Nodes have the allocator's numbers, not the
/// system's.
///
/// A placement is two words, so that it can be read without a lock, and so that an
/// `Option<Placement>` is passed in registers too. With a field for each part, the compiler builds
/// the option in memory by stores of single bytes, and the load of a whole word waits for them.
///
/// The `default` policy has no placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    /// The mode's number, and from [`HOME_SHIFT`] on the home node's number plus 1, or 0.
    mode_and_home: u64,
    /// A bit for each of the policy's nodes.
    mask: NonZeroU64,
}

/// The bits of the first word from this one on hold the home node's number plus 1.
const HOME_SHIFT: u32 = 8;

impl Placement {
    /// The number of words that [`to_words`](Self::to_words) returns.
    pub(crate) const WORDS: usize = 2;

    /// Returns how the allocator follows `policy` on this machine. Returns `None` for the `default`
    /// policy.
    ///
    /// If none of the policy's nodes is usable, follows the kernel's rule for nodes that have
    /// vanished. The policy then means all nodes, but `prefer` means the local node. Reads the
    /// nodes' weights for a `weighted interleave` policy.
    pub(crate) fn of(policy: &Mempolicy) -> Option<Placement> {
        super::init();
        if policy.mode() == Mode::WeightedInterleave {
            weigh();
        }
        Placement::again(policy)
    }

    /// Returns the same as [`of`](Self::of), but reads no file. The policy was
    /// passed to `of` before.
    pub(super) fn again(policy: &Mempolicy) -> Option<Placement> {
        let all = u64::MAX >> (64 - nodes::real());
        let (mode, mask) = match (policy.mode(), numbers_of(policy)) {
            (Mode::Default, _) => return None,
            // With the mask of all nodes, `prefer` would mean the first node. The kernel uses the
            // local node.
            (Mode::Local, _) | (Mode::Preferred, 0) => (Mode::Local, all),
            (mode, 0) => (mode, all),
            (mode, mask) => (mode, mask),
        };
        let home = policy.home().and_then(|home| nodes::with_id(home.0));
        let home = home.map_or(0, |home| home as u64 + 1);
        Some(Placement {
            mode_and_home: mode as u64 | home << HOME_SHIFT,
            mask: NonZeroU64::new(mask)?,
        })
    }

    /// Returns how the allocator follows the calling thread's policy. Returns `None` if the thread
    /// has no policy, or the kernel does not tell it. One system call. Reads no file: under
    /// `weighted interleave`, nodes have the weights that the latest call of [`of`](Self::of) read.
    #[inline(never)]
    pub(crate) fn of_thread() -> Option<Placement> {
        Placement::again(&super::thread().ok()?)
    }

    /// Returns the placement that asks `node` only.
    pub(crate) fn only(node: usize) -> Placement {
        Placement {
            mode_and_home: Mode::Bind as u64,
            mask: NonZeroU64::new(1 << node).unwrap_or(NonZeroU64::MIN),
        }
    }

    /// Returns whether the allocator can place memory by `policy`. It can if the policy names no
    /// nodes, or at least one node with memory that this process may use. The kernel also refuses
    /// other policies.
    pub(crate) fn is_possible(policy: &Mempolicy) -> bool {
        super::init();
        policy.nodes().is_empty() || numbers_of(policy) != 0
    }

    /// Returns the placement as words, to keep in atomics. Never all zeroes.
    pub(crate) fn to_words(self) -> [u64; Self::WORDS] {
        [self.mode_and_home, self.mask.get()]
    }

    /// Returns the placement with these words, or `None` if there is no node in them. The words
    /// come from [`to_words`](Self::to_words), or are zeroes.
    #[inline(always)]
    pub(crate) fn from_words([mode_and_home, mask]: [u64; Self::WORDS]) -> Option<Placement> {
        let mask = NonZeroU64::new(mask)?;
        Some(Placement {
            mode_and_home,
            mask,
        })
    }

    #[inline(always)]
    pub(super) fn mode(self) -> Mode {
        Mode::from_number(self.mode_and_home & 0xff).unwrap_or(Mode::Default)
    }

    /// Returns the node from which distances are measured, if it is not the thread's node.
    fn home(self) -> Option<usize> {
        (self.mode_and_home >> HOME_SHIFT)
            .checked_sub(1)
            .map(|home| home as usize)
    }

    /// Returns whether the policy uses its nodes in turn.
    pub(crate) fn interleaves(self) -> bool {
        self.mode().interleaves()
    }

    /// Returns the node from which the page at `index` of a range should come, for a thread on node
    /// `local`. Only computes. Under `weighted interleave`, also loads the weights.
    #[inline]
    pub(crate) fn target(self, index: u64, local: usize) -> usize {
        match self.mode() {
            Mode::Default | Mode::Local => local,
            Mode::Interleave => {
                let nth = index % u64::from(self.mask.get().count_ones());
                nth_bit(self.mask.get(), nth as u32)
            }
            Mode::WeightedInterleave => self.weighted(index),
            Mode::Preferred => self.mask.trailing_zeros() as usize,
            Mode::Bind | Mode::PreferredMany => self.nearest(self.home().unwrap_or(local)),
        }
    }

    /// Returns the node whose turn it is at `index`, if each node has as many pages in a row as its
    /// weight.
    fn weighted(self, index: u64) -> usize {
        let weight = |node: usize| u64::from(WEIGHTS[node].load(Relaxed)).max(1);
        let members = || (0..64).filter(|node| self.mask.get() >> node & 1 == 1);
        let mut left = index % members().map(weight).sum::<u64>().max(1);
        let chosen = members().find(|&node| match left.checked_sub(weight(node)) {
            Some(rest) => {
                left = rest;
                false
            }
            None => true,
        });
        chosen.unwrap_or(self.mask.trailing_zeros() as usize)
    }

    /// Returns the policy's node that is nearest to `node`.
    pub(crate) fn nearest(self, node: usize) -> usize {
        if self.has(node) {
            return node;
        }
        let mut by_distance = (0..nodes::real()).map(|nth| nodes::nearest(node, nth));
        by_distance
            .find(|&node| self.has(node))
            .unwrap_or(self.mask.trailing_zeros() as usize)
    }

    fn has(self, node: usize) -> bool {
        self.mask.get() >> node & 1 == 1
    }

    /// Returns the nodes that the allocator asks for memory, in this order, when the memory should
    /// come from `target`.
    ///
    /// The order is by distance from `target`. Under `bind`, there are only the policy's own nodes.
    /// Under `prefer (many)`, the policy's own nodes come first.
    pub(crate) fn fallback(self, target: usize) -> impl Iterator<Item = usize> {
        let by_distance = move || (0..nodes::real()).map(move |nth| nodes::nearest(target, nth));
        let own_first = matches!(self.mode(), Mode::Bind | Mode::PreferredMany);
        let others_last = self.mode() == Mode::PreferredMany;
        by_distance()
            .filter(move |&node| !own_first || self.has(node))
            .chain(by_distance().filter(move |&node| others_last && !self.has(node)))
    }
}

/// Returns a bit for each of the policy's nodes.
///
/// A `relative` policy that was never bound is bound to the allocator's nodes.
fn numbers_of(policy: &Mempolicy) -> u64 {
    let bits = |ids: &NodeSet| {
        let numbers = ids.iter().filter_map(nodes::with_id);
        numbers.fold(0, |mask, node| mask | 1 << node)
    };
    if policy.bound_to().is_some() || !policy.flags().contains(Flags::RELATIVE) {
        return bits(policy.nodes());
    }
    let mut bound = policy.clone();
    let there = (0..nodes::real()).map(nodes::id_or_number).collect();
    match bound.contextualize(&there) {
        Ok(()) => bits(bound.nodes()),
        Err(_) => 0,
    }
}

/// Reads the nodes' weights. One file read for each node.
fn weigh() {
    let ids = (0..nodes::real()).map(nodes::id).collect();
    let weights = Weights::read_below(b"/", &ids);
    for (node, weight) in WEIGHTS.iter().enumerate().take(nodes::real()) {
        weight.store(weights.weight(NodeId(nodes::id(node))), Relaxed);
    }
}

/// Returns the position of the `nth` set bit, counted from 0.
fn nth_bit(mut mask: u64, nth: u32) -> usize {
    for _ in 0..nth {
        mask &= mask - 1;
    }
    mask.trailing_zeros() as usize
}
