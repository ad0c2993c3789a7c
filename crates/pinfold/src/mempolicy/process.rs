//! The memory policy that the process was started with, and how the allocator learns of it.

use super::{Distances, Mempolicy, Mode, PolicyError, mems_allowed, set_for_thread, thread};
use crate::topology::{NodeId, NodeSet, facts};
use crate::{nodes, sys};
use pinfold_rseq::env;

/// The environment variable that holds a starting process's policy.
pub const VARIABLE: &str = "PINFOLD_POLICY";

/// Bytes of the variable that are read: a multiple of every page size.
const LONGEST: usize = 64 << 10;

/// Reads the machine's nodes and the process's policy, on the first call. Called before the
/// allocator hands out memory.
///
/// Sets the variable's policy for the calling thread. The threads that this thread starts inherit
/// the policy.
///
/// A process without the variable, on a machine with one node, makes no system call for policies,
/// because some sandboxes kill a process for such a call.
pub(crate) fn init() {
    if nodes::are_known() {
        return;
    }
    // Reads the files now, because the process may be forbidden to open files later.
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
    // The text may not fit into the rest of the caller's stack, so it goes to a mapping.
    let Some(memory) = sys::map_memory(LONGEST) else {
        return;
    };
    // SAFETY: the mapping is fresh, is `LONGEST` bytes long and zeroed, and no other reference to
    // it exists.
    let buffer = unsafe { core::slice::from_raw_parts_mut(memory.as_ptr(), LONGEST) };
    let text = env::read(VARIABLE, buffer);
    let wanted = text.and_then(|text| Mempolicy::parse(core::str::from_utf8(text).ok()?).ok());
    if let Some(policy) = wanted {
        // If the kernel refuses, the policy stays as it was. `pinfold run` reports the reason
        // before it starts a program.
        let _ = set_for_thread(&policy);
    }
    // SAFETY: `map_memory` returned `memory` with this size. The policy is a copy, so no reference
    // to the mapping is left.
    unsafe { sys::unmap(memory.as_ptr(), LONGEST) };
}

/// Returns whether the kernel places the process's memory by a policy of its own instead of the
/// system's.
fn is_set() -> bool {
    match thread() {
        Ok(policy) => !matches!(policy.mode(), Mode::Default | Mode::Local),
        // A mode of a newer kernel is also in effect, although this version of the library does not
        // know the mode.
        Err(error) => matches!(error, PolicyError::UnknownMode(_)),
    }
}
