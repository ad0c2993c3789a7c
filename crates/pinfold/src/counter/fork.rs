//! Counters and forks.
//!
//! A counter that another thread has frozen, or whose batch another thread is changing, would stay
//! so in the child of a fork, which does not have that thread. So the fork waits some microseconds,
//! until no counter is frozen and no lock of a counter is held.
//!
//! A fork does not wait for folds. If another thread is folding at the moment of the fork, the
//! child inherits a claimed shard. The claim's token says which thread claimed the shard, and in
//! which *generation*: the number of forks between the first process and this one. So the child
//! recognises the claims that no thread of it will end.

use super::{freezers, stripe};
use crate::counter_units;
use crate::fork;
use crate::lock::{Hooks, Rank, Taken};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use pinfold_rseq::shard::TOKEN;
use pinfold_rseq::thread_pointer;

/// The part of every token that does not name a thread: [`TOKEN`], and how many forks lie between
/// the first process and this one.
static GENERATION: AtomicU64 = AtomicU64::new(TOKEN);
/// The thread pointer of the thread that forked this process, or 0 in the first one.
static FORKER: AtomicU64 = AtomicU64::new(0);
/// The first generation in which that thread made all forks.
static FORKER_SINCE: AtomicU64 = AtomicU64::new(TOKEN);

/// The bits of a token that name the thread. Thread pointers are multiples of 16 and below 2^48.
const THREAD: u64 = (1 << 44) - 1;

/// Returns the token with which the calling thread claims shards.
#[inline]
pub(super) fn token() -> u64 {
    GENERATION.load(Relaxed) + (thread_pointer() as u64 >> 4)
}

/// Counts a fork, in the child.
fn next_generation() {
    // Relaxed, here and below: the child has one thread.
    let (me, parent) = (thread_pointer() as u64, GENERATION.load(Relaxed));
    if FORKER.swap(me, Relaxed) != me {
        FORKER_SINCE.store(parent, Relaxed);
    }
    GENERATION.store(TOKEN | ((parent + THREAD + 1) % TOKEN), Relaxed);
}

/// Returns whether this process is the child of one that used counters. Only then can a claim be
/// stale.
pub(super) fn has_happened() -> bool {
    FORKER.load(Relaxed) != 0
}

/// Returns whether `token` belongs to a thread that a fork has left behind.
///
/// The forking thread goes on in the child. It may have claimed a shard if a signal handler forked.
pub(super) fn is_stale(token: u64) -> bool {
    let (now, of) = (GENERATION.load(Relaxed), token & !THREAD);
    // How many forks ago. Generations count modulo `TOKEN`.
    let ago = |generation: u64| now.wrapping_sub(generation) % TOKEN;
    let is_forkers =
        token & THREAD == FORKER.load(Relaxed) >> 4 && ago(of) <= ago(FORKER_SINCE.load(Relaxed));
    of != now && !is_forkers
}

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
            child: next_generation,
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

#[cfg(test)]
pub(super) use tests::in_child;

#[cfg(test)]
mod tests {
    use super::*;

    /// Forks. The child calls `f` and exits. Returns whether `f` returned true.
    pub(in super::super) fn in_child(f: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child calls `f`, which only reads atomics and forks, and exits without a
        // return into the test.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(!f()));
            }
            let mut status = 0;
            libc::waitpid(child, &raw mut status, 0) == child && status == 0
        }
    }

    #[test]
    fn a_child_tells_the_claims_that_it_has_lost() {
        assert!(fork::retry(|| register().then_some(())).is_some());
        let (mine, others) = (token(), token() ^ 1);
        assert!(!is_stale(mine) && !is_stale(others));
        let goes_on = move || !is_stale(mine) && is_stale(others);
        // The forking thread goes on in the child, and in the child's child.
        let grandchild = move || goes_on() && token() != mine && !is_stale(token() ^ 1);
        assert!(in_child(move || grandchild() && in_child(grandchild)));
        // In the child, another thread forks. The first one is lost, even if a thread pointer
        // of the lost generation comes again.
        let by_another = move || {
            let thread = std::thread::spawn(move || {
                let (now, same) = (token(), mine & !THREAD | token() & THREAD);
                in_child(move || is_stale(mine) && !is_stale(now) && is_stale(same))
            });
            thread.join().unwrap()
        };
        assert!(in_child(by_another));
        assert!(!is_stale(mine));
    }
}
