//! Counters across `fork`.
//!
//! A fold that is under way in another thread would stay half done in the child for good, and a
//! gate closed. So the fork waits for both, some microseconds.

use super::{gates, stripe};
use crate::fork::{self, Hooks, Rank};
use crate::percpu;

/// Has a fork wait for folds and gates, and for places in the units. Returns false while a fork
/// could still catch a counter half made; then the caller must not give the counter its place yet.
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
