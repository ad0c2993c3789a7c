//! The memory policy that the process was started with, and how the allocator learns of it.

use super::calls::set_unnoted;
use super::{Distances, Mempolicy, Mode, PolicyError, thread};
use crate::topology::{NodeId, facts};
use crate::{nodes, sys};
use pinfold_rseq::env::{self, MAX_TEXT};

/// The environment variable that holds a starting process's policy.
pub const VARIABLE: &str = "PINFOLD_POLICY";

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
    let real = nodes::make_up().or_else(of_this_machine).unwrap_or(1);
    // A process with one node has no kernel's node, and is not asked for its policy.
    nodes::know(real, real > 1 && is_set());
}

/// Fills in the tables of nodes from the machine. Returns the number of usable nodes. Returns
/// `None` if there is one, if there are too many, or if their number cannot be read.
fn of_this_machine() -> Option<usize> {
    // Most machines have one node. Reading one file is enough to know that.
    facts::has_several_nodes().then(several_nodes)?
}

#[cold]
#[inline(never)]
fn several_nodes() -> Option<usize> {
    let with_memory = facts::nodes_with_memory()?;
    let count = nodes::number(&facts::usable(&with_memory))?;
    let online = facts::nodes_online().unwrap_or_else(|| with_memory.clone());
    Distances::of_this_machine(&online, &with_memory, |distances| {
        for from in online.iter().map(NodeId) {
            nodes::set_order(from, count, distances.nearest_first(from));
        }
    });
    Some(count)
}

#[cold]
#[inline(never)]
fn follow_variable() {
    if !env::is_set(VARIABLE) {
        return;
    }
    // The text may not fit into the rest of the caller's stack, so it goes to a mapping.
    // `MAX_TEXT` is a multiple of every page size.
    let Some(memory) = sys::map_memory(MAX_TEXT) else {
        return;
    };
    // SAFETY: the mapping is fresh, is `MAX_TEXT` bytes long and zeroed, and no other reference to
    // it exists.
    let buffer = unsafe { core::slice::from_raw_parts_mut(memory.as_ptr(), MAX_TEXT) };
    let text = env::read(VARIABLE, buffer);
    let wanted = text.and_then(|text| Mempolicy::parse(core::str::from_utf8(text).ok()?).ok());
    if let Some(policy) = wanted {
        // If the kernel refuses, the policy stays as it was. `pinfold run` reports the reason
        // before it starts a program.
        let _ = set_unnoted(&policy);
    }
    // SAFETY: `map_memory` returned `memory` with this size. The policy is a copy, so no reference
    // to the mapping is left.
    unsafe { sys::unmap(memory.as_ptr(), MAX_TEXT) };
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
