//! The policy that the process was started with, and what follows for the allocator.

use super::{Distances, Mempolicy, Mode, PolicyError, mems_allowed, set_for_thread, thread};
use crate::nodes;
use crate::topology::{NodeId, Topology};

/// The environment variable with the policy of a starting process.
pub const VARIABLE: &str = "PINFOLD_POLICY";

/// The longest text in the variable that is looked at.
const LONGEST: usize = 4096;

/// Learns of the machine's nodes and of the process's policy, once, before anything is allocated; the variable's policy becomes the
/// calling thread's, and so that of the threads that it starts.
///
/// A process without the variable, on a machine with one node, makes no call for policies: some sandboxes kill for them.
pub(crate) fn init() {
    if nodes::are_known() {
        return;
    }
    follow_variable();
    nodes::init(&nodes::Known {
        allowed: || mems_allowed().ok(),
        policy: is_set,
        by_distance,
    });
}

fn by_distance(topology: &Topology, each: &mut dyn FnMut(NodeId, NodeId)) {
    let distances = Distances::read(b"/", topology);
    for from in topology.nodes.iter().map(NodeId) {
        distances.nearest_first(from).for_each(|to| each(from, to));
    }
}

fn follow_variable() {
    let mut buffer = [0; LONGEST];
    let text = pinfold_rseq::env::read(VARIABLE, &mut buffer);
    let wanted = text.and_then(|text| Mempolicy::parse(core::str::from_utf8(text).ok()?).ok());
    if let Some(policy) = wanted {
        // A kernel that refuses leaves the policy as it was; the command says why before it starts a program.
        let _ = set_for_thread(&policy);
    }
}

/// Whether the process's memory is placed by a policy of its own.
fn is_set() -> bool {
    match thread() {
        Ok(policy) => !matches!(policy.mode(), Mode::Default | Mode::Local),
        // A newer kernel's: it holds, whatever it is.
        Err(error) => matches!(error, PolicyError::UnknownMode(_)),
    }
}
