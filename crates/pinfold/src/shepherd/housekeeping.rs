//! Keeps the shepherd's thread on housekeeping CPUs while the machine changes. A housekeeping CPU
//! is neither isolated nor `nohz_full`.

use crate::topology::{CpuSet, Topology, affinity, facts, set_affinity};

/// Keeps the calling thread on housekeeping CPUs.
pub(super) struct Housekeeping {
    /// The CPUs that the thread may use. The code that starts the thread gives them. If another
    /// thread sets this thread's affinity later, that affinity replaces them.
    bound: CpuSet,
    /// The affinity that `follow` set last.
    set: Option<CpuSet>,
}

impl Housekeeping {
    pub(super) fn new(bound: CpuSet) -> Self {
        Housekeeping { bound, set: None }
    }

    /// Reads the state of the machine, and moves the thread if it should run elsewhere. Reads some
    /// files.
    pub(super) fn follow(&mut self) {
        let before = affinity();
        let Ok(machine) = Topology::read(b"/") else {
            return;
        };
        facts::follow(&machine);
        let after = affinity();
        if let (Some(set), Some(before), Some(after)) = (&self.set, before, after) {
            // The kernel reports an affinity without the CPUs that are offline, although they are
            // still set. A CPU may go offline or online between the two calls of `affinity`.
            let online = set.and(&machine.online);
            let ours = |seen: &CpuSet| seen == set || *seen == online;
            if !ours(&before) && !ours(&after) {
                // Another thread changed the affinity. Or the last CPU of the set went offline, and
                // the kernel widened the set so that it is not empty.
                self.bound = after;
            }
        }
        let target = choose(&machine, &self.bound);
        if self.set.as_ref() != Some(&target) {
            set_affinity(&target);
            // The kernel leaves out CPUs that do not exist, so this function notes the affinity
            // that the kernel reports. If the kernel reports CPUs outside `target`, another thread
            // has just changed the affinity. Then this function notes `target`, and the next call
            // finds the difference.
            let made = affinity().filter(|made| made.and(&target) == *made);
            self.set = Some(made.unwrap_or(target));
        }
    }
}

/// Returns the CPUs on which the thread should run, out of `bound`:
///
/// 1. those that are online, in the cgroup, and neither isolated nor `nohz_full`, if there are any;
/// 2. otherwise those that are online and in the cgroup, if there are any;
/// 3. otherwise the machine's housekeeping CPUs.
pub(super) fn choose(machine: &Topology, bound: &CpuSet) -> CpuSet {
    let usable = bound.and(&machine.allowed);
    let quiet = usable.and(&machine.housekeeping());
    match (quiet.is_empty(), usable.is_empty()) {
        (false, _) => quiet,
        (true, false) => usable,
        // None of the CPUs in `bound` can be used any more.
        (true, true) => machine.housekeeping(),
    }
}
