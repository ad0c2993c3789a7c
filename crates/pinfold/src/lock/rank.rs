//! The ranks of the locks, and the table that finds all locks of a rank.
//!
//! A module with locks registers [`Hooks`] for each rank of its locks before it first takes one
//! (`fork::register`). Forks take the locks through the table, and a thread that has waited for
//! long finds there which locks it holds ([`is_any_held`]).

use super::{Patience, Word, me};
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Release};

/// What a fork takes, in this order. For locks, this is also the lock order: a thread that holds a
/// lock may wait for locks of the ranks below. No thread but the forking one holds two locks of one
/// rank.
#[derive(Clone, Copy)]
pub enum Rank {
    /// The permission to fork, which one thread at a time has.
    Fork,
    /// The thresholds that follow the online CPUs. A holder takes counters' shards.
    Thresholds,
    /// The counters' shards. No thread holds them together with a lock of a rank below.
    Shards,
    /// The blocks in the per-CPU units. A holder takes no other lock.
    Units,
    /// Readers of per-CPU lists and rings, and threads that kill or revive a reference count.
    Readers,
    /// The memory pools.
    Pools,
    /// Grace periods. Only a forking thread waits for this lock; others try it.
    Grace,
    /// `STOPPING`, for stopping CPUs.
    Stopping,
    /// The registry of caches.
    Registry,
    /// The caches' pending sheaves.
    Pending,
    /// The caches' parts on the nodes.
    Nodes,
    /// The pool of sheaves' blocks.
    Sheaves,
    /// The nodes' arenas.
    Arenas,
    /// The regions.
    Regions,
    /// The memory for metadata.
    Metadata,
    /// The buffer for reading the cgroup's files.
    Cgroup,
    /// The policies that several ranges share.
    Policies,
    /// The counters that other processes can see. A holder takes no other lock.
    Shown,
    /// The threads that keep a counter frozen, which are no locks. A fork waits here until there is
    /// no other such thread, and must already hold the locks then (module `counter::freezers`).
    Freezers,
    /// The shepherd's threads, which a child does not have.
    Shepherd,
    /// The program's threads, which `pinfold-malloc` counts. A child has one.
    Threads,
}

const RANKS: usize = Rank::Threads as usize + 1;

/// What a module does about a fork.
pub struct Hooks {
    pub(crate) rank: Rank,
    pub(crate) taken: Taken,
    /// Forgets the threads that the child does not have. Runs in the child before anything is given
    /// back.
    pub(crate) child: fn(),
}

/// Calls its argument with the word of each lock of one rank.
type Visit = fn(&mut dyn FnMut(&Word));

/// What a fork takes of one rank.
pub(crate) enum Taken {
    Locks(Visit),
    /// Something else.
    Other {
        /// Returns whether the thread with the given thread pointer holds it.
        is_held_by: fn(u64) -> bool,
        /// Takes it, in the parent. Returns false if the patience ends first.
        before: fn(Patience) -> bool,
        /// Gives it back, in the parent and in the child.
        after: fn(),
    },
}

impl Hooks {
    /// Returns hooks that take locks, and do nothing else.
    pub(crate) const fn locks(rank: Rank, visit: Visit) -> Hooks {
        Hooks {
            rank,
            taken: Taken::Locks(visit),
            child: || {},
        }
    }

    /// Returns hooks that take nothing, and call `child` in the child of each fork.
    pub const fn in_child(rank: Rank, child: fn()) -> Hooks {
        Hooks {
            child,
            ..Hooks::locks(rank, |_| {})
        }
    }

    /// Returns how many of the locks `thread` holds.
    fn held_by(&self, thread: u64) -> usize {
        match self.taken {
            Taken::Locks(visit) => {
                let mut held = 0;
                visit(&mut |word| held += usize::from(word.holder() == thread));
                held
            }
            Taken::Other { is_held_by, .. } => usize::from(is_held_by(thread)),
        }
    }

    /// Calls `f` with the word of each lock.
    pub(crate) fn each_word(&self, mut f: impl FnMut(&Word)) {
        if let Taken::Locks(visit) = self.taken {
            visit(&mut f);
        }
    }

    /// Takes the locks for the fork of the calling thread. Returns false if `patience` ends first.
    /// The thread then holds some of them.
    pub(crate) fn before(&self, patience: Patience) -> bool {
        match self.taken {
            Taken::Locks(visit) => {
                let mut taken = true;
                visit(&mut |word| taken = taken && word.lock_for_fork(me(), patience));
                taken
            }
            Taken::Other { before, .. } => before(patience),
        }
    }

    /// Gives the locks back after the fork, or as many as `before` took.
    pub(crate) fn after(&self) {
        match self.taken {
            Taken::Locks(visit) => visit(&mut Word::unlock_after_fork),
            Taken::Other { after, .. } => after(),
        }
    }
}

/// The hooks of each rank, or null before its module has registered.
static TABLE: [AtomicPtr<Hooks>; RANKS] = [const { AtomicPtr::new(null_mut()) }; RANKS];

/// Enters `hooks` into the table.
pub(crate) fn enter(hooks: &'static Hooks) {
    // Release pairs with the acquire in `modules`: a thread that finds the hooks also sees what
    // they use.
    TABLE[hooks.rank as usize].store(core::ptr::from_ref(hooks).cast_mut(), Release);
}

/// Returns the entries of the table, in the order of their ranks.
pub(crate) fn modules() -> impl DoubleEndedIterator<Item = &'static Hooks> {
    // Acquire pairs with the release in `enter`: this thread also sees what the hooks use.
    // SAFETY: `enter` stores only addresses of statics, and an empty entry is null.
    let hooks = |entry: &AtomicPtr<Hooks>| unsafe { entry.load(Acquire).as_ref() };
    TABLE.iter().filter_map(hooks)
}

/// Returns how many locks of `first` and of the ranks below the calling thread holds, also in
/// frames that a signal interrupted. Anything else that [`Hooks`] take counts as one lock while the
/// thread holds it.
///
/// Reads the word of each such lock, so it is not for fast paths.
#[cold]
pub(crate) fn count_held(first: Rank) -> usize {
    let me = me();
    let modules = modules().filter(|hooks| hooks.rank as usize >= first as usize);
    modules.map(|hooks| hooks.held_by(me)).sum()
}

/// Returns whether the calling thread holds a lock of `first` or of a rank below, also in a frame
/// that a signal interrupted. Costs what [`count_held`] costs.
pub(crate) fn is_any_held(first: Rank) -> bool {
    count_held(first) > 0
}
