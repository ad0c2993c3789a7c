//! A policy as the allocator follows it: over the nodes that it tells apart, in two words.

use super::{Flags, Mempolicy, Mode, SYSTEM_DEFAULT, Weights};
use crate::nodes;
use crate::topology::{NodeId, NodeSet};
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::Relaxed;

/// The weight of each node, as it was when a policy that goes by them was last taken up; 0 counts as 1.
static WEIGHTS: [AtomicU8; nodes::MAX_NODES] = [const { AtomicU8::new(0) }; nodes::MAX_NODES];

/// Where to allocate by a policy: nodes by the allocator's own numbers, not the system's.
///
/// Two words, so that a range's placement can be read without a lock and passed in registers. The default policy is none of these: who
/// follows it has no placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    mode: Mode,
    /// The node that distances are measured from, instead of the thread's.
    home: Option<u8>,
    /// The policy's nodes, a bit each; never empty.
    mask: u64,
}

/// Where in the first word the home node's number is, plus 1.
const HOME_SHIFT: u32 = 8;

impl Placement {
    /// How many words [`to_words`](Self::to_words) gives.
    pub(crate) const WORDS: usize = 2;

    /// What a policy means on this machine. `None` for the default policy; a policy none of whose nodes can be used is taken as the
    /// kernel takes it when its nodes vanish: as one of all nodes, and one that prefers a node as the local one.
    pub(crate) fn of(policy: &Mempolicy) -> Option<Placement> {
        super::init();
        if policy.mode() == Mode::WeightedInterleave {
            weigh();
        }
        Placement::again(policy)
    }

    /// As [`of`](Self::of), for a policy that was taken up before: reads no files.
    pub(super) fn again(policy: &Mempolicy) -> Option<Placement> {
        let all = u64::MAX >> (64 - nodes::real());
        let mask = match policy.mode() {
            Mode::Default => return None,
            Mode::Local => all,
            _ => match numbers_of(policy) {
                // As where memory is on no node: the thread's place counts, not the first node.
                0 if policy.mode() == Mode::Preferred => return Placement::again(&SYSTEM_DEFAULT),
                0 => all,
                mask => mask,
            },
        };
        let home = policy.home().and_then(|home| nodes::with_id(home.0));
        Some(Placement {
            mode: policy.mode(),
            home: home.map(|home| home as u8),
            mask,
        })
    }

    /// Only `node`, or nothing.
    pub(crate) fn only(node: usize) -> Placement {
        Placement {
            mode: Mode::Bind,
            home: None,
            mask: 1 << node,
        }
    }

    /// Whether memory can be placed by a policy here: whether it names no nodes, or any that has memory which this process may use. The
    /// kernel refuses the others too.
    pub(crate) fn is_possible(policy: &Mempolicy) -> bool {
        super::init();
        policy.nodes().is_empty() || numbers_of(policy) != 0
    }

    /// For keeping it in atomics; never all zeroes.
    pub(crate) fn to_words(self) -> [u64; Self::WORDS] {
        let home = self.home.map_or(0, |home| u64::from(home) + 1);
        [self.mode as u64 | home << HOME_SHIFT, self.mask]
    }

    /// What [`to_words`](Self::to_words) was given; `None` for anything else.
    #[inline(always)]
    pub(crate) fn from_words([first, mask]: [u64; Self::WORDS]) -> Option<Placement> {
        let mode = Mode::from_number(first & 0xff)?;
        let home = (first >> HOME_SHIFT).checked_sub(1).map(|home| home as u8);
        (mask != 0 && mode != Mode::Default).then_some(Placement { mode, home, mask })
    }

    /// Whether pages go to one node after the other, by their place in the range or in turn.
    pub(crate) fn interleaves(self) -> bool {
        matches!(self.mode, Mode::Interleave | Mode::WeightedInterleave)
    }

    /// The node that the page at `index` of a range should come from, for a thread on node `local`. Arithmetic only, but for
    /// weights, which are loaded.
    #[inline]
    pub(crate) fn target(self, index: u64, local: usize) -> usize {
        match self.mode {
            Mode::Default | Mode::Local => local,
            Mode::Interleave => {
                let nth = index % u64::from(self.mask.count_ones());
                nth_bit(self.mask, nth as u32)
            }
            Mode::WeightedInterleave => self.weighted(index),
            Mode::Preferred => self.mask.trailing_zeros() as usize,
            Mode::Bind | Mode::PreferredMany => self.nearest(self.home.map_or(local, usize::from)),
        }
    }

    /// Each node as often in a row as its weight says.
    fn weighted(self, index: u64) -> usize {
        let weight = |node: usize| u64::from(WEIGHTS[node].load(Relaxed)).max(1);
        let members = || (0..64).filter(|node| self.mask >> node & 1 == 1);
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

    /// The policy's node that is nearest to `node`.
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
        self.mask >> node & 1 == 1
    }

    /// All nodes that memory may come from when `target` should give it, in the order in which they are asked: by their distance from
    /// the target; a bound one asks its own nodes only, one that prefers many asks them first.
    pub(crate) fn fallback(self, target: usize) -> impl Iterator<Item = usize> {
        let by_distance = move || (0..nodes::real()).map(move |nth| nodes::nearest(target, nth));
        let own_first = matches!(self.mode, Mode::Bind | Mode::PreferredMany);
        let others_last = self.mode == Mode::PreferredMany;
        by_distance()
            .filter(move |&node| !own_first || self.has(node))
            .chain(by_distance().filter(move |&node| others_last && !self.has(node)))
    }
}

/// The numbers of a policy's nodes, a bit each. One that was never bound is bound to the nodes that there are: positions begin there.
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

/// Reads the nodes' weights.
fn weigh() {
    let ids = (0..nodes::real()).map(nodes::id).collect();
    let weights = Weights::read(b"/", &ids);
    for (node, weight) in WEIGHTS.iter().enumerate().take(nodes::real()) {
        weight.store(weights.weight(NodeId(nodes::id(node))), Relaxed);
    }
}

/// The place of the `nth` bit that is set, counted from 0.
fn nth_bit(mut mask: u64, nth: u32) -> usize {
    for _ in 0..nth {
        mask &= mask - 1;
    }
    mask.trailing_zeros() as usize
}
