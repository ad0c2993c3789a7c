//! Keeps the shepherd's thread on housekeeping CPUs while the machine changes. A housekeeping CPU
//! is neither isolated nor `nohz_full`.

use crate::topology::{CpuSet, Topology, affinity, affinity_of, facts, set_affinity};

/// The longest time without reading the machine's files, in milliseconds. Within this time the
/// thread notices a change that no affinity shows: a program's first thread may have an affinity of
/// its own, which leaves out the CPU that changes.
const READ_EVERY_MS: u64 = 10_000;

/// Keeps the calling thread on housekeeping CPUs.
pub(super) struct Housekeeping {
    /// The CPUs that the thread may use. The code that starts the thread gives them. If another
    /// thread sets this thread's affinity later, that affinity replaces them.
    bound: CpuSet,
    /// The affinity that `follow` set last.
    set: Option<CpuSet>,
    /// What `look` returned before the files were read last. It is `None` if the files must be read
    /// again.
    seen: Option<Affinities>,
    /// When the files were read last, in milliseconds.
    read: u64,
}

/// The affinities of the calling thread and of the program's first thread.
///
/// The kernel leaves out CPUs that are offline. It changes the affinities of a cgroup's threads
/// when the cgroup's CPUs change, and when an isolated partition takes CPUs away. So these two sets
/// change with the machine, and two system calls find that out.
type Affinities = [Option<CpuSet>; 2];

fn look() -> Affinities {
    // SAFETY: `getpid` has no preconditions.
    [affinity(), affinity_of(unsafe { libc::getpid() })]
}

impl Housekeeping {
    pub(super) fn new(bound: CpuSet) -> Self {
        Housekeeping {
            bound,
            set: None,
            seen: None,
            read: 0,
        }
    }

    /// Moves the thread if it should run elsewhere. `now` is the time in milliseconds.
    ///
    /// Makes two system calls. Reads the state of the machine from files if these calls find a
    /// change, and otherwise every [`READ_EVERY_MS`].
    pub(super) fn follow(&mut self, now: u64) {
        let seen = look();
        let due = now.wrapping_sub(self.read) >= READ_EVERY_MS;
        if due || self.seen.as_ref() != Some(&seen) {
            self.read = now;
            let moved = self.follow_files(seen[0].clone());
            // After a move, the next call reads the files once more, and so finds what has changed
            // meanwhile.
            self.seen = (!moved).then_some(seen);
        }
    }

    /// Reads the state of the machine, and moves the thread if it should run elsewhere. Returns
    /// whether it did. `before` is the thread's affinity.
    fn follow_files(&mut self, before: Option<CpuSet>) -> bool {
        let Ok(machine) = Topology::read(b"/") else {
            return false;
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
        let moves = self.set.as_ref() != Some(&target);
        if moves {
            set_affinity(&target);
            // The kernel leaves out CPUs that do not exist, so this function notes the affinity
            // that the kernel reports. If the kernel reports CPUs outside `target`, another thread
            // has just changed the affinity. Then this function notes `target`, and the next call
            // finds the difference.
            let made = affinity().filter(|made| made.and(&target) == *made);
            self.set = Some(made.unwrap_or(target));
        }
        moves
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
