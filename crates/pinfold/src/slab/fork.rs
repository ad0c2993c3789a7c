//! What `pthread_atfork` needs: every lock is taken before the fork and given back after it on both sides, so that the
//! child, whose only thread is the one that forked, finds everything consistent and free.
//!
//! A thread that was in a slow path at the fork may have had a sheaf in hand; in the child its objects are lost, some
//! kilobytes at most for each such thread. Critical sections need nothing: each has committed or has not.

use super::cache::{self, Cache};
use super::percpu::UNITS;
use super::{percpu, sheaf};
use crate::page;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;

static STOPPING: AtomicBool = AtomicBool::new(false);
static NUMBERS: AtomicBool = AtomicBool::new(false);
static POOL: AtomicBool = AtomicBool::new(false);
static META: AtomicBool = AtomicBool::new(false);

/// Takes all locks, in the lock order; call it in the parent before the fork.
pub fn fork_prepare() {
    STOPPING.store(percpu::fork_prepare(), Relaxed);
    NUMBERS.store(cache::fork_prepare(), Relaxed);
    cache::for_each(|cache| {
        for node in cache.nodes() {
            let taken = node.fork_prepare();
            node.forking.store(taken, Relaxed);
        }
    });
    POOL.store(sheaf::fork_prepare(), Relaxed);
    page::fork_prepare();
    META.store(page::fork_prepare_meta(), Relaxed);
}

/// Gives the locks back; call it in the parent after the fork.
pub fn fork_parent() {
    // SAFETY: each lock that is given back was taken by `fork_prepare` in this thread.
    unsafe {
        if META.swap(false, Relaxed) {
            page::fork_meta_done();
        }
        page::fork_done();
        if POOL.swap(false, Relaxed) {
            sheaf::fork_done();
        }
        cache::for_each(release);
        if NUMBERS.swap(false, Relaxed) {
            cache::fork_done();
        }
        if STOPPING.swap(false, Relaxed) {
            percpu::fork_done();
        }
    }
}

fn release(cache: &'static Cache) {
    for node in cache.nodes() {
        if node.forking.swap(false, Relaxed) {
            // SAFETY: taken by `fork_prepare` in this thread.
            unsafe { node.fork_done() };
        }
    }
}

/// Gives the locks back; call it in the child after the fork.
pub fn fork_child() {
    UNITS.unlock_all_in_child(pinfold_rseq::possible());
    fork_parent();
}
