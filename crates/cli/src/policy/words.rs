//! Modes and flags in plain English.

use pinfold::mempolicy::{Flags, Mempolicy, Mode};
use pinfold::topology::{NODES_MOST, NodeSet};

/// What a mode does.
pub fn of_mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Default => {
            "no policy of its own: what stands behind it holds, at last the system's, which is local"
        }
        Mode::Preferred => "memory comes from this node; when it is full, from the nearest to it",
        Mode::Bind => "memory comes from these nodes, the nearest first, and from no others",
        Mode::Interleave => "memory comes page by page from one node after the other",
        Mode::Local => {
            "memory comes from the node of the CPU that first touches a page; when it is full, from the nearest to it"
        }
        Mode::PreferredMany => {
            "memory comes from these nodes, the nearest first; when they are full, from the others"
        }
        Mode::WeightedInterleave => {
            "memory comes from one node after the other, from each as many pages as it weighs"
        }
    }
}

/// A flag's name and what it does.
pub fn of_flags(flags: Flags) -> impl Iterator<Item = (&'static str, &'static str)> {
    let all = [
        (
            Flags::STATIC,
            "static",
            "the nodes are meant by their numbers, whichever the process may use",
        ),
        (
            Flags::RELATIVE,
            "relative",
            "the nodes are positions among those that the process may use: 0 is the first of them",
        ),
        (
            Flags::BALANCING,
            "balancing",
            "pages may move to the node that uses them, among the policy's (kernel.numa_balancing)",
        ),
    ];
    let set = all.into_iter().filter(move |flag| flags.contains(flag.0));
    set.map(|(_, name, meaning)| (name, meaning))
}

/// What becomes of the nodes when those change that the process may use.
///
/// `here`: what they come to now.
pub fn of_change(policy: &Mempolicy, here: &NodeSet) -> String {
    let named = policy.user_nodes();
    let flags = policy.flags();
    match policy.mode() {
        Mode::Default | Mode::Local => "nothing changes: there are no nodes to change".to_owned(),
        Mode::Preferred | Mode::PreferredMany => {
            "the nodes stay: they are a wish, and memory comes from others where it cannot be met"
                .to_owned()
        }
        _ if named.is_empty() || named.len() == NODES_MOST => {
            let kept = if flags.contains(Flags::STATIC) {
                "keeps those of them that are allowed then"
            } else {
                "carries that over"
            };
            format!(
                "the kernel is given {} now, and {kept}; only policies that a program keeps and rebinds mean all again",
                super::listed(here)
            )
        }
        _ if flags.contains(Flags::STATIC) => {
            format!(
                "those of {} that are allowed then; all allowed ones if none is",
                named_as(policy)
            )
        }
        _ if flags.contains(Flags::RELATIVE) && named.len() == 1 => format!(
            "the one at position {} among the nodes that are allowed then; a position beyond them begins again at the first",
            named_as(policy)
        ),
        _ if flags.contains(Flags::RELATIVE) => format!(
            "those at positions {} among the nodes that are allowed then; positions beyond them begin again at the first",
            named_as(policy)
        ),
        _ => "carried over: the n-th node allowed now becomes the n-th allowed then".to_owned(),
    }
}

/// The nodes that a policy names, as a list; empty when it names none.
pub fn named_as(policy: &Mempolicy) -> String {
    match policy.user_nodes().len() {
        NODES_MOST => "all".to_owned(),
        _ => policy.user_nodes().to_string(),
    }
}
