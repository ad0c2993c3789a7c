//! What a fork does in this layer: it takes the locks of all caches, and removes what threads that
//! do not exist in the child left behind.

use super::cache::{self, Cache};
use super::percpu::{STOPPING, UNITS};
use super::{deferred, grace, hands, key, mempool, sheaf};
use crate::fork::{self, Hooks, Rank};
use crate::page;

/// Makes forks take the locks of this layer and of the page layer below. Returns false if
/// [`fork::register`] does.
pub(super) fn register() -> bool {
    static HOOKS: Hooks = Hooks {
        rank: Rank::Slab,
        holds,
        before,
        child,
        after,
    };
    let registered = fork::register(&HOOKS);
    page::register_fork();
    registered
}

fn holds(thread: u64) -> bool {
    mempool::is_lock_held(thread)
        || STOPPING.is_held_by(thread)
        || cache::is_registry_held(thread)
        || grace::is_lock_held(thread)
        || cache::is_lock_held(thread)
}

fn before() {
    mempool::lock_for_fork();
    STOPPING.lock_for_fork();
    cache::lock_for_fork();
    grace::lock_for_fork();
    cache::for_each(|cache| {
        deferred::lock_for_fork(cache);
        let nodes = cache.nodes().iter();
        nodes.for_each(|node| node.stock.lock_for_fork());
    });
    sheaf::lock_for_fork();
}

fn after() {
    sheaf::unlock_after_fork();
    cache::for_each(unlock);
    grace::unlock_after_fork();
    cache::unlock_after_fork();
    STOPPING.unlock_after_fork();
    mempool::unlock_after_fork();
}

fn unlock(cache: &'static Cache) {
    let nodes = cache.nodes().iter();
    nodes.for_each(|node| node.stock.unlock_after_fork());
    deferred::unlock_after_fork(cache);
}

fn child() {
    UNITS.unlock_all_in_child(pinfold_rseq::possible());
    grace::fork_child();
    hands::fork_child();
    page::budget::fork_child();
    key::fork_child();
}
