//! Modes and flags in plain English.

use pinfold::mempolicy::{Flags, Mempolicy, Mode};
use pinfold::topology::{MAX_NODES, NodeSet};

/// Describes what a mode does.
pub fn of_mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Default => {
            "no policy of its own: a range follows the thread's policy, and a thread the system's, which is local"
        }
        Mode::Preferred => "memory comes from this node, or from the nearest one when it is full",
        Mode::Bind => "memory comes from these nodes, the nearest first, and from no others",
        Mode::Interleave => "memory comes page by page from one node after the other",
        Mode::Local => {
            "memory comes from the node of the CPU that first touches a page, or from the nearest one when it is full"
        }
        Mode::PreferredMany => {
            "memory comes from these nodes, the nearest first, and from others when they are full"
        }
        Mode::WeightedInterleave => {
            "memory comes from one node after the other, as many pages in turn as the node's weight"
        }
    }
}

/// Returns the name of each flag and what it does.
pub fn of_flags(flags: Flags) -> impl Iterator<Item = (&'static str, &'static str)> {
    let all = [
        (
            Flags::STATIC,
            "static",
            "the nodes are these numbers, whichever nodes the process may use",
        ),
        (
            Flags::RELATIVE,
            "relative",
            "the nodes are positions among those that the process may use: 0 is the first of them",
        ),
        (
            Flags::BALANCING,
            "balancing",
            "pages may move to the node that uses them, within the policy's nodes (kernel.numa_balancing)",
        ),
    ];
    let set = all.into_iter().filter(move |flag| flags.contains(flag.0));
    set.map(|(_, name, meaning)| (name, meaning))
}

/// Describes what happens to the policy's nodes when the nodes that the process may use change.
/// `here`: the nodes that the policy means now.
pub fn of_change(policy: &Mempolicy, here: &NodeSet) -> String {
    let named = policy.user_nodes();
    let flags = policy.flags();
    match policy.mode() {
        Mode::Default | Mode::Local => "nothing changes: the policy has no nodes".to_owned(),
        Mode::Preferred | Mode::PreferredMany => {
            "the nodes stay: they are a preference, and memory comes from other nodes when they have none"
                .to_owned()
        }
        _ if named.is_empty() || named.len() == MAX_NODES => {
            let kept = if flags.contains(Flags::STATIC) {
                "keeps those of them that are allowed then"
            } else {
                "replaces them by the nodes at the same positions"
            };
            format!(
                "the kernel is given {} now, and {kept}; a program has to set the policy again to get all nodes",
                super::listed(here)
            )
        }
        _ if flags.contains(Flags::STATIC) => {
            format!(
                "those of {} that are allowed then, or all allowed nodes if none of them is",
                named_as(policy)
            )
        }
        _ if flags.contains(Flags::RELATIVE) && named.len() == 1 => format!(
            "the one at position {} among the nodes that are allowed then; positions beyond the last begin again at the first",
            named_as(policy)
        ),
        _ if flags.contains(Flags::RELATIVE) => format!(
            "those at positions {} among the nodes that are allowed then; positions beyond the last begin again at the first",
            named_as(policy)
        ),
        _ => "replaced by position: the n-th node allowed now becomes the n-th allowed then".to_owned(),
    }
}

/// Returns the nodes that a policy names: a list, "all", or an empty string.
pub fn named_as(policy: &Mempolicy) -> String {
    match policy.user_nodes().len() {
        MAX_NODES => "all".to_owned(),
        _ => policy.user_nodes().to_string(),
    }
}
