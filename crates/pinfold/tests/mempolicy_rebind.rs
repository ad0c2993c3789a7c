//! What policies come to among the allowed nodes, against a model that works on sets of the
//! standard library.

use pinfold::mempolicy::{Flags, Mempolicy, Mode, PolicyError};
use pinfold::topology::NodeSet;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn nodes(list: &str) -> NodeSet {
    list.parse().unwrap()
}

fn bound(policy: &str, allowed: &str) -> Mempolicy {
    let mut policy = Mempolicy::parse(policy).unwrap();
    policy.contextualize(&nodes(allowed)).unwrap();
    policy
}

/// Binds a policy to the first set, then rebinds it to the others. Returns its nodes after each
/// step.
fn course(policy: &str, allowed: &[&str]) -> Vec<String> {
    let mut policy = bound(policy, allowed[0]);
    let mut seen = vec![policy.nodes().to_string()];
    for allowed in &allowed[1..] {
        policy.rebind(&nodes(allowed));
        seen.push(policy.nodes().to_string());
    }
    seen
}

/// The examples in the kernel's documentation.
#[test]
fn the_kernel_documentations_examples() {
    assert_eq!(course("interleave:1-3", &["1-3", "3-5"]), ["1-3", "3-5"]);
    assert_eq!(
        course("interleave=static:1-3", &["1-3", "3-5"]),
        ["1-3", "3"]
    );
    assert_eq!(
        course("interleave=relative:2-5", &["2-5", "3-7", "0,2-3,5"]),
        ["2-5", "3,5-7", "0,2-3,5"]
    );
}

#[test]
fn a_policy_without_a_node_left_means_all_nodes() {
    assert_eq!(
        course("bind=static:0-1", &["0-3", "2-3", "1-2"]),
        ["0-1", "2-3", "1"]
    );
    assert_eq!(course("bind:0,3", &["0-3", "6"]), ["0,3", "6"]);
    // A policy that was carried over to few nodes keeps few, also when more are allowed again.
    assert_eq!(course("bind:0,3", &["0-3", "6", "0-7"]), ["0,3", "6", "0"]);
}

#[test]
fn a_policy_of_all_nodes_follows_every_change() {
    assert_eq!(
        course("interleave", &["0-3", "2", "0-7"]),
        ["0-3", "2", "0-7"]
    );
    assert_eq!(
        course("weighted interleave=relative", &["4-5", "7"]),
        ["4-5", "7"]
    );
    assert_eq!(
        course("bind=static:all", &["0-3", "2", "0-7"]),
        ["0-3", "2", "0-7"]
    );
}

#[test]
fn prefer_and_policies_without_nodes_do_not_change() {
    assert_eq!(course("prefer:1", &["0-1", "2-3"]), ["1", "1"]);
    assert_eq!(course("prefer (many):0-1", &["0-1", "2-3"]), ["0-1", "0-1"]);
    assert_eq!(course("prefer=relative:3", &["4-5", "0-3"]), ["5", "5"]);
    assert_eq!(course("local", &["0", "1"]), ["", ""]);
    assert_eq!(course("default", &["0", "1"]), ["", ""]);
}

#[test]
fn none_allowed_is_an_error_that_changes_nothing() {
    let mut policy = Mempolicy::parse("bind:7").unwrap();
    let before = policy.clone();
    let refused = policy.contextualize(&nodes("0-3"));
    assert_eq!(refused, Err(PolicyError::NoneAllowed(Mode::Bind)));
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("/proc/self/status")
    );
    assert_eq!(policy, before);
    let mut relative = Mempolicy::parse("bind=relative:7").unwrap();
    assert_eq!(
        relative.contextualize(&NodeSet::EMPTY),
        Err(PolicyError::NoneAllowed(Mode::Bind))
    );
    assert_eq!(policy.bound_to(), None);
    // A policy that was never bound, and has no allowed node, gets all allowed nodes.
    policy.rebind(&nodes("0-3"));
    assert_eq!(policy.nodes(), &nodes("0-3"));
    policy.rebind(&NodeSet::EMPTY);
    assert_eq!(policy.nodes(), &nodes("0-3"));
    assert_eq!(policy.bound_to(), Some(&nodes("0-3")));
}

type Numbers = BTreeSet<usize>;

/// A policy as sets of the standard library, by the words of the kernel's documentation.
struct Model {
    mode: Mode,
    flags: Flags,
    user: Numbers,
    nodes: Numbers,
    allowed: Numbers,
}

impl Model {
    fn place(&self, allowed: &Numbers) -> Numbers {
        let list: Vec<_> = allowed.iter().copied().collect();
        if self.flags.contains(Flags::RELATIVE) {
            self.user.iter().map(|n| list[n % list.len()]).collect()
        } else {
            self.user.intersection(allowed).copied().collect()
        }
    }

    fn rebind(&mut self, allowed: &Numbers) {
        let wish = matches!(self.mode, Mode::Preferred | Mode::PreferredMany);
        let kept = self.flags.contains(Flags::STATIC) || self.flags.contains(Flags::RELATIVE);
        let moved = |node: &usize| {
            let list: Vec<_> = allowed.iter().copied().collect();
            match self.allowed.iter().position(|old| old == node) {
                Some(position) => list[position % list.len()],
                None => *node,
            }
        };
        if !wish {
            let nodes: Numbers = match kept {
                true => self.place(allowed),
                false => self.nodes.iter().map(moved).collect(),
            };
            self.nodes = if nodes.is_empty() {
                allowed.clone()
            } else {
                nodes
            };
        }
        self.allowed = allowed.clone();
    }
}

fn set() -> impl Strategy<Value = Numbers> {
    let small = proptest::collection::btree_set(0..12usize, 1..8);
    let large = proptest::collection::btree_set(0..1024usize, 1..90);
    prop_oneof![3 => small, 1 => large]
}

fn numbers(set: &NodeSet) -> Numbers {
    set.iter().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_policy_behaves_like_the_model(
        mode in prop_oneof![
            Just(Mode::Bind),
            Just(Mode::Interleave),
            Just(Mode::PreferredMany),
            Just(Mode::WeightedInterleave),
            Just(Mode::Preferred),
        ],
        flags in prop_oneof![Just(Flags::NONE), Just(Flags::STATIC), Just(Flags::RELATIVE)],
        user in set(),
        first in set(),
        later in proptest::collection::vec(set(), 0..6),
    ) {
        let count = if mode == Mode::Preferred { 1 } else { usize::MAX };
        let user: Numbers = user.into_iter().take(count).collect();
        let mut policy = Mempolicy::new(mode, flags, user.iter().copied().collect()).unwrap();
        let mut model = Model { mode, flags, user, nodes: Numbers::new(), allowed: first.clone() };
        model.nodes = model.place(&first);
        let answer = policy.contextualize(&first.iter().copied().collect());
        prop_assert_eq!(answer.is_err(), model.nodes.is_empty());
        if answer.is_ok() {
            prop_assert_eq!(numbers(policy.nodes()), model.nodes.clone());
            for allowed in later {
                policy.rebind(&allowed.iter().copied().collect());
                model.rebind(&allowed);
                prop_assert_eq!(numbers(policy.nodes()), model.nodes.clone());
                prop_assert_eq!(numbers(policy.bound_to().unwrap()), allowed);
                prop_assert_eq!(numbers(policy.user_nodes()), model.user.clone());
            }
        }
    }
}
