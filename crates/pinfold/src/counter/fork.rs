//! Makes forks wait for the counters' folds and gates.
//!
//! If another thread is folding at the moment of a fork, the child inherits a fold that is half
//! done, and no thread of the child completes it. A gate that another thread keeps closed would
//! stay closed in the child. So the fork waits some microseconds, until no fold is under way and no
//! gate is closed.

use super::{gates, stripe};
use crate::fork::{self, Hooks, Rank};
use crate::percpu;

/// Makes each fork wait for folds, for gates, and for threads that allocate in the units.
///
/// Returns false as long as a fork could still copy a counter half made. Until then, the caller
/// must not give the counter a block.
pub(crate) fn register() -> bool {
    static SHARDS: Hooks = Hooks {
        rank: Rank::Shards,
        holds: stripe::is_held_by,
        before: stripe::fork_prepare,
        child: || {},
        after: stripe::fork_done,
    };
    static GATES: Hooks = Hooks {
        rank: Rank::Gates,
        holds: |_| false,
        before: gates::fork_prepare,
        child: gates::fork_child,
        after: gates::fork_done,
    };
    fork::register(&SHARDS) && fork::register(&GATES) && percpu::register_fork()
}
