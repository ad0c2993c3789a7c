//! Keeps the shepherd's thread on housekeeping CPUs while the machine changes.

use crate::topology::{CpuSet, Topology, affinity, facts, set_affinity};

/// Keeps the calling thread on housekeeping CPUs.
pub(super) struct Housekeeping {
    /// The CPUs that the thread may use: as its starter said, or as another thread set its affinity
    /// since.
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
            // The kernel leaves CPUs that are offline out of what it reports, although they are
            // still set. One may go or come between the two looks.
            let online = set.and(&machine.online);
            let ours = |seen: &CpuSet| seen == set || *seen == online;
            if !ours(&before) && !ours(&after) {
                // Another thread changed the affinity. Or the last CPU went offline, and the kernel
                // widened a set that would have been empty.
                self.bound = after;
            }
        }
        let target = choose(&machine, &self.bound);
        if self.set.as_ref() != Some(&target) {
            set_affinity(&target);
            // The kernel leaves out CPUs that do not exist, so this notes what it reports. If it
            // reports other CPUs, another thread has changed the affinity in between. The next look
            // notices that.
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
