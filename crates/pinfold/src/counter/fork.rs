//! Makes forks wait for the counters' folds and freezes.
//!
//! If another thread is folding at the moment of a fork, the child inherits a fold that is half
//! done, and no thread of the child completes it. A counter that another thread has frozen
//! would stay frozen in the child. So the fork waits some microseconds, until no fold is under way
//! and no counter is frozen.

use super::{freezers, stripe};
use crate::counter_units;
use crate::fork;
use crate::lock::{Hooks, Rank, Taken};

/// Makes each fork wait for folds, for freezes, and for threads that allocate in the units.
///
/// Returns false while a fork could still copy a half-made counter. In this case, the caller must
/// not give the counter a block.
pub(crate) fn register() -> bool {
    static HOOKS: [Hooks; 2] = [
        Hooks {
            rank: Rank::Shards,
            taken: Taken::Other {
                is_held_by: stripe::is_held_by,
                before: stripe::fork_prepare,
                after: stripe::fork_done,
            },
            child: || {},
        },
        Hooks {
            rank: Rank::Freezers,
            taken: Taken::Other {
                is_held_by: freezers::is_held_by,
                before: freezers::fork_prepare,
                after: freezers::fork_done,
            },
            child: freezers::fork_child,
        },
    ];
    fork::register(&HOOKS) && counter_units::register_fork()
}

/// Calls `f` until it returns a value. Gives up after 1000 failures, not counting those during
/// which another thread forked. Not for signal handlers.
pub(crate) fn outlast<T>(mut f: impl FnMut() -> Option<T>) -> Option<T> {
    let mut tries = 0;
    loop {
        let turn = fork::turn();
        let done = f();
        if done.is_some() || tries >= 1000 {
            return done;
        }
        if !fork::await_end(turn) {
            stripe::pause(&mut tries);
        }
    }
}
