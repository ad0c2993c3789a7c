//! What `pthread_atfork` needs: every lock is taken before the fork and given back after it on both sides, so that the
//! child, whose only thread is the one that forked, finds everything consistent and free.
//!
//! A thread that was in a slow path at the fork may have had a sheaf in hand; in the child its objects are lost, some
//! kilobytes at most for each such thread. Critical sections need nothing: each has committed or has not.
//!
//! The C library's fork takes its own `malloc`'s locks after these. So a program whose `malloc` is not Pinfold's must not fork while
//! a handler that has interrupted `malloc` uses caches: the handler would wait for the fork, and the fork for `malloc`.
//!
//! In a program whose allocator is not Pinfold's the C library calls it, from before `main` on; else the allocator does.

use super::cache::{self, Cache};
use super::percpu::UNITS;
use super::{deferred, grace, hands, mempool, percpu, sheaf};
use crate::{counter, mempolicy, page, shepherd, sys};
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;

static STOPPING: AtomicBool = AtomicBool::new(false);
static NUMBERS: AtomicBool = AtomicBool::new(false);
static POOL: AtomicBool = AtomicBool::new(false);
static META: AtomicBool = AtomicBool::new(false);
static POLICIES: AtomicBool = AtomicBool::new(false);

/// Registers before `main`, or as the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = register;

/// Has the C library call what a fork needs, once, unless an allocator does. After the counters', which are below: what is
/// registered last is called first before a fork and last after it.
pub(super) extern "C" fn register() {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if counter::fork_is_handled() || !counter::register_fork() || REGISTERED.swap(true, Relaxed) {
        return;
    }
    // SAFETY: the handlers are functions without arguments, which stay loaded. A failure (no memory) leaves a fork in the middle
    // of a slow path unprotected, and nothing else.
    sys::keep_errno(|| unsafe {
        libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child));
    });
}

/// Whether the fork that is under way began without an allocator in charge.
static PREPARED: AtomicBool = AtomicBool::new(false);

extern "C" fn before() {
    if !counter::fork_is_handled() {
        fork_prepare();
        PREPARED.store(true, Relaxed);
    }
}

extern "C" fn in_parent() {
    if PREPARED.swap(false, Relaxed) {
        fork_parent();
    }
}

extern "C" fn in_child() {
    if PREPARED.swap(false, Relaxed) {
        fork_child();
        shepherd::fork_child();
    }
}

/// Takes all locks, in the lock order; call it in the parent before the fork.
pub fn fork_prepare() {
    mempool::fork_prepare();
    STOPPING.store(percpu::fork_prepare(), Relaxed);
    NUMBERS.store(cache::fork_prepare(), Relaxed);
    grace::fork_prepare();
    cache::for_each(|cache| {
        deferred::fork_prepare(cache);
        for node in cache.nodes() {
            let taken = node.fork_prepare();
            node.forking.store(taken, Relaxed);
        }
    });
    POOL.store(sheaf::fork_prepare(), Relaxed);
    page::fork_prepare();
    META.store(page::fork_prepare_meta(), Relaxed);
    POLICIES.store(mempolicy::fork_prepare(), Relaxed);
}

/// Gives the locks back; call it in the parent after the fork.
pub fn fork_parent() {
    // SAFETY: each lock that is given back was taken by `fork_prepare` in this thread.
    unsafe {
        if POLICIES.swap(false, Relaxed) {
            mempolicy::fork_done();
        }
        if META.swap(false, Relaxed) {
            page::fork_meta_done();
        }
        page::fork_done();
        if POOL.swap(false, Relaxed) {
            sheaf::fork_done();
        }
        cache::for_each(release);
        grace::fork_done();
        if NUMBERS.swap(false, Relaxed) {
            cache::fork_done();
        }
        if STOPPING.swap(false, Relaxed) {
            percpu::fork_done();
        }
        mempool::fork_done();
    }
}

fn release(cache: &'static Cache) {
    for node in cache.nodes() {
        if node.forking.swap(false, Relaxed) {
            // SAFETY: taken by `fork_prepare` in this thread.
            unsafe { node.fork_done() };
        }
    }
    // SAFETY: as above.
    unsafe { deferred::fork_done(cache) };
}

/// Gives the locks back; call it in the child after the fork.
pub fn fork_child() {
    UNITS.unlock_all_in_child(pinfold_rseq::possible());
    grace::fork_child();
    hands::fork_child();
    fork_parent();
}
