//! Where the shepherd's thread runs, and following the machine.

use crate::topology::{CpuSet, Topology, affinity, facts, set_affinity};

/// Keeps the calling thread on housekeeping CPUs.
pub(super) struct Housekeeping {
    /// The CPUs that somebody lets the thread use: who started it, or who changed its affinity since.
    bound: CpuSet,
    /// What was set last.
    set: Option<CpuSet>,
}

impl Housekeeping {
    pub(super) fn new(bound: CpuSet) -> Self {
        Housekeeping { bound, set: None }
    }

    /// Looks at the machine, and moves the thread if it should be elsewhere. Some file reads.
    pub(super) fn follow(&mut self) {
        let before = affinity();
        let Ok(machine) = Topology::read(b"/") else {
            return;
        };
        facts::follow(&machine);
        let after = affinity();
        if let (Some(set), Some(before), Some(after)) = (&self.set, before, after) {
            // The kernel leaves out CPUs that are offline, though they are still set, and one may go or come between the looks.
            let online = set.and(&machine.online);
            let ours = |seen: &CpuSet| seen == set || *seen == online;
            if !ours(&before) && !ours(&after) {
                // Somebody else changed it; or a CPU went offline, and the kernel widened what would have been empty.
                self.bound = after;
            }
        }
        let target = choose(&machine, &self.bound);
        if self.set.as_ref() != Some(&target) {
            set_affinity(&target);
            // What the kernel made of it: it leaves out what is not there. Anything else is somebody's who came in between, and is
            // noticed the next time.
            let made = affinity().filter(|made| made.and(&target) == *made);
            self.set = Some(made.unwrap_or(target));
        }
    }
}

/// The CPUs of `bound` on which a folder disturbs nobody: online and in the cgroup, and of those the ones that are neither
/// isolated nor without a tick, if there are any.
pub(super) fn choose(machine: &Topology, bound: &CpuSet) -> CpuSet {
    let usable = bound.and(&machine.allowed);
    let quiet = usable.and(&machine.housekeeping());
    match (quiet.is_empty(), usable.is_empty()) {
        (false, _) => quiet,
        (true, false) => usable,
        // What it was let use is gone.
        (true, true) => machine.housekeeping(),
    }
}
