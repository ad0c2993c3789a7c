//! Keeps the shepherd's thread on housekeeping CPUs while the machine changes. A housekeeping CPU
//! is neither isolated nor `nohz_full`.

use crate::spared;
use crate::topology::{CpuSet, Topology, affinity, affinity_of, facts, set_affinity};

/// The longest time without reading the machine's files, in milliseconds. Within this time the
/// thread notices a change that no affinity shows: a program's first thread may have an affinity of
/// its own, which leaves out the CPU that changes.
const READ_EVERY_MS: u64 = 10_000;

/// How long an affinity that the thread did not set must last until it counts as set by another
/// thread, in milliseconds. The kernel lists a CPU as online some time before affinities show it.
const LASTS_MS: u64 = 1000;

/// Keeps the calling thread on housekeeping CPUs.
pub(super) struct Housekeeping {
    /// The CPUs that the thread may use. The code that starts the thread gives them. If another
    /// thread sets this thread's affinity later, that affinity replaces them.
    bound: CpuSet,
    /// The affinity that `follow` set last: as the kernel reported it then, and as it was asked
    /// for. They differ by CPUs that were just coming online, or that just left the cgroup.
    set: Option<[CpuSet; 2]>,
    /// An affinity that the thread did not set, and when it was first seen.
    foreign: Option<(CpuSet, u64)>,
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
    [affinity(), affinity_of(pinfold_rseq::kernel::process())]
}

impl Housekeeping {
    pub(super) fn new(bound: CpuSet) -> Self {
        Housekeeping {
            bound,
            set: None,
            foreign: None,
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
            let is_over = self.follow_files(seen[0].clone(), now);
            self.seen = is_over.then_some(seen);
        }
    }

    /// Has the next [`follow`](Self::follow) read the files.
    pub(super) fn look_again(&mut self) {
        self.seen = None;
    }

    /// Reads the state of the machine, and moves the thread if it should run elsewhere. Returns
    /// false if the next call must read the files once more: after a move, to find what has changed
    /// meanwhile, and while it is not known who set the affinity. `before` is the thread's
    /// affinity.
    fn follow_files(&mut self, before: Option<CpuSet>, now: u64) -> bool {
        let Ok(mut machine) = Topology::read_below(b"/") else {
            return true;
        };
        facts::follow(&machine);
        spared::for_each(|cpu, _| machine.isolated.insert(cpu));
        let foreign = affinity().filter(|after| {
            let is_ours = |seen: &CpuSet| self.is_ours(seen, &machine.online);
            !is_ours(after) && before.as_ref().is_some_and(|before| !is_ours(before))
        });
        match (foreign, self.foreign.take()) {
            (None, _) => {}
            (Some(now_seen), Some((seen, since))) if now_seen == seen => {
                if now.wrapping_sub(since) < LASTS_MS {
                    self.foreign = Some((seen, since));
                    return false;
                }
                // Another thread changed the affinity. Or the last CPU of the set went offline, and
                // the kernel widened the set so that it is not empty.
                self.bound = seen;
            }
            (Some(seen), _) => {
                self.foreign = Some((seen, now));
                return false;
            }
        }
        let target = choose(&machine, &self.bound);
        let stays = self.set.as_ref().is_some_and(|set| set.contains(&target));
        if !stays {
            set_affinity(&target);
            // The kernel leaves out CPUs that do not exist, so this function also notes the
            // affinity that the kernel reports. If the kernel reports CPUs outside `target`,
            // another thread has just changed the affinity. Then this function notes `target`
            // alone, and the next call finds the difference.
            let made = affinity().filter(|made| made.and(&target) == *made);
            self.set = Some([made.unwrap_or_else(|| target.clone()), target]);
        }
        stays
    }

    /// Returns whether `follow` set the affinity that the kernel reports as `seen` while the CPUs
    /// `online` are online. Before `follow` has set one, returns true.
    fn is_ours(&self, seen: &CpuSet, online: &CpuSet) -> bool {
        // The kernel reports an affinity without the CPUs that are offline, although they are still
        // set. A CPU may go offline or online between two calls of `affinity`.
        self.set.as_ref().is_none_or(|set| {
            set.iter()
                .any(|set| seen == set || *seen == set.and(online))
        })
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
