//! The policy that the process was started with, and what follows for the allocator.

use super::{Distances, Mempolicy, Mode, PolicyError, mems_allowed, set_for_thread, thread};
use crate::topology::{NodeId, NodeSet, facts};
use crate::{nodes, sys};
use pinfold_rseq::env;

/// The environment variable with the policy of a starting process.
pub const VARIABLE: &str = "PINFOLD_POLICY";

/// The longest text in the variable that is looked at: pages of every size that there is.
const LONGEST: usize = 64 << 10;

/// Learns of the machine's nodes and of the process's policy, once, before anything is allocated; the variable's policy becomes the
/// calling thread's, and so that of the threads that it starts.
///
/// A process without the variable, on a machine with one node, makes no call for policies: some sandboxes kill for them.
pub(crate) fn init() {
    if nodes::are_known() {
        return;
    }
    // Later, the process may be forbidden to open files.
    facts::read_once();
    follow_variable();
    nodes::init(&Process);
}

/// This process and its machine.
struct Process;

impl nodes::Known for Process {
    fn allowed(&self) -> Option<NodeSet> {
        mems_allowed().ok()
    }

    fn policy(&self) -> bool {
        is_set()
    }

    fn by_distance(&self, with_memory: &NodeSet, each: &mut impl FnMut(NodeId, NodeId)) {
        let nodes = facts::nodes_online().unwrap_or_else(|| with_memory.clone());
        Distances::of_this_machine(&nodes, with_memory, |distances| {
            for from in nodes.iter().map(NodeId) {
                distances.nearest_first(from).for_each(|to| each(from, to));
            }
        });
    }
}

#[cold]
#[inline(never)]
fn follow_variable() {
    if !env::is_set(VARIABLE) {
        return;
    }
    // The text may be longer than what is left of the caller's stack.
    let Some(memory) = sys::map_memory(LONGEST) else {
        return;
    };
    // SAFETY: a fresh mapping of that size, which only this function knows of.
    let buffer = unsafe { core::slice::from_raw_parts_mut(memory.as_ptr(), LONGEST) };
    let text = env::read(VARIABLE, buffer);
    let wanted = text.and_then(|text| Mempolicy::parse(core::str::from_utf8(text).ok()?).ok());
    if let Some(policy) = wanted {
        // A kernel that refuses leaves the policy as it was; the command says why before it starts a program.
        let _ = set_for_thread(&policy);
    }
    // SAFETY: the mapping from above; a policy does not borrow its text.
    unsafe { sys::unmap(memory.as_ptr(), LONGEST) };
}

/// Whether the process's memory is placed by a policy of its own.
fn is_set() -> bool {
    match thread() {
        Ok(policy) => !matches!(policy.mode(), Mode::Default | Mode::Local),
        // A newer kernel's: it holds, whatever it is.
        Err(error) => matches!(error, PolicyError::UnknownMode(_)),
    }
}
