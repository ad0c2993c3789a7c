//! What a fork does in this layer: it takes the locks of all caches. In the child, it removes what
//! threads that do not exist there left behind. Also makes the shepherd's ticks drain idle sheaves.

use crate::cache_units::{SHEAF_UNITS, STOPPING};
use crate::fork;
use crate::lock::{Hooks, Rank, Word};
use crate::slab::cache::descriptor;
use crate::slab::cache::registry;
use crate::slab::checks::key;
use crate::slab::cpu::idle;
use crate::slab::cpu::in_flight;
use crate::slab::cpu::sheaf;
use crate::{arena, shepherd};

/// Has each fork take the locks of this layer and of the arenas, and each tick of the shepherd
/// drain idle sheaves. Returns false if [`fork::register`] does.
pub(super) fn register() -> bool {
    static HOOKS: [Hooks; 5] = [
        Hooks {
            child: forget_other_threads,
            ..Hooks::locks(Rank::Stopping, |visit| visit(STOPPING.word()))
        },
        Hooks::locks(Rank::Registry, |visit| visit(descriptor::registry_word())),
        Hooks::locks(Rank::Pending, visit_pending),
        Hooks::locks(Rank::Nodes, visit_nodes),
        Hooks::locks(Rank::Sheaves, |visit| visit(sheaf::lock_word())),
    ];
    shepherd::register(idle::drain);
    let registered = fork::register(&HOOKS);
    arena::register_fork();
    registered
}

fn visit_pending(visit: &mut dyn FnMut(&Word)) {
    registry::for_each(|cache| visit(cache.deferred.pending.word()));
}

fn visit_nodes(visit: &mut dyn FnMut(&Word)) {
    registry::for_each(|cache| {
        cache.parts().for_each(|part| visit(part.stock.word()));
    });
}

fn forget_other_threads() {
    SHEAF_UNITS.unlock_all_in_child(pinfold_rseq::possible());
    in_flight::fork_child();
    arena::budget::fork_child();
    key::fork_child();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counter_units;
    use crate::lock::{hold, me, modules, while_held};
    use crate::slab::KmemCache;
    use core::alloc::Layout;
    use core::time::Duration;

    // A signal handler may wait for both locks, and both come before the nodes' in the lock order.
    #[test]
    fn who_holds_a_node_s_lock_does_not_wait_for_the_units_or_the_registry() {
        let cache = KmemCache::new("held", Layout::new::<u64>()).unwrap();
        let node = &cache.descriptor.nodes()[0];
        let patience = Duration::from_secs(20);
        let block = while_held(counter_units::lock_word(), patience, || {
            let _stock = node.stock_after_fork().unwrap();
            counter_units::alloc(8)
        });
        assert_eq!(block, Some(None));
        let is_refused = while_held(descriptor::registry_word(), patience, || {
            let _stock = node.stock_after_fork().unwrap();
            descriptor::Descriptor::create_first("first", Layout::new::<u64>()).is_none()
        });
        assert_eq!(is_refused, Some(true));
        // A thread without locks waits.
        let soon = Duration::from_millis(50);
        let block = while_held(counter_units::lock_word(), soon, || counter_units::alloc(8));
        assert_eq!(block, None);
    }

    /// Calls `test` in a process of its own: a fork stops the threads of other tests.
    fn alone(name: &str, test: impl FnOnce()) {
        const ALONE: &str = "PINFOLD_TEST_FORKS";
        if std::env::var_os(ALONE).is_some() {
            return test();
        }
        let (_, module) = module_path!().split_once("::").unwrap();
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args([&*std::format!("{module}::{name}"), "--exact"])
            .env(ALONE, "1")
            .status();
        assert!(status.unwrap().success());
    }

    // In the next two tests, this thread plays a handler and the frame that it interrupted.

    // The frame holds the node's lock. Another thread holds the registry's lock and waits for the
    // node's.
    #[test]
    fn a_fork_in_a_handler_gives_up_a_wait() {
        alone("a_fork_in_a_handler_gives_up_a_wait", || {
            let cache = KmemCache::new("held", Layout::new::<u64>()).unwrap();
            let node = &cache.descriptor.nodes()[0];
            let stock = node.stock_after_fork().unwrap();
            std::thread::scope(|scope| {
                let other = scope.spawn(|| {
                    let _registry = hold(descriptor::registry_word());
                    node.stock_after_fork().is_some()
                });
                while !node.stock.word().is_waited_for() {
                    std::thread::yield_now();
                }
                fork::prepare();
                fork::parent();
                drop(stock);
                assert!(other.join().unwrap());
            });
        });
    }

    // The frame holds the arenas' locks. The fork gives up, because another thread holds the
    // registry's lock for long.
    #[test]
    fn an_allocation_waits_for_a_fork_in_a_handler() {
        alone("an_allocation_waits_for_a_fork_in_a_handler", || {
            let cache = KmemCache::new("new", Layout::new::<u64>()).unwrap();
            let arenas = modules().find(|hooks| matches!(hooks.rank, Rank::Arenas));
            let arenas = arenas.unwrap();
            arenas.each_word(|word| {
                while word.try_lock(me()).is_err() {
                    std::thread::yield_now();
                }
            });
            std::thread::scope(|scope| {
                let (held, is_held) = std::sync::mpsc::channel();
                let (given_up, may_give_back) = std::sync::mpsc::channel::<()>();
                scope.spawn(move || {
                    let _registry = hold(descriptor::registry_word());
                    held.send(()).unwrap();
                    may_give_back.recv().unwrap();
                });
                is_held.recv().unwrap();
                fork::prepare();
                let allocating = scope.spawn(|| {
                    // SAFETY: the object is not used any more.
                    let free = |object| unsafe { cache.free(object) };
                    cache.alloc().map(free).is_some()
                });
                std::thread::sleep(Duration::from_millis(50));
                let waited = !allocating.is_finished();
                fork::parent();
                arenas.each_word(Word::unlock);
                given_up.send(()).unwrap();
                assert!(waited && allocating.join().unwrap());
            });
        });
    }

    /// The allocator begins to handle forks while another thread forks. That fork gives its locks
    /// back, in a nested fork of a handler too.
    #[test]
    fn a_fork_ends_as_it_began() {
        alone("a_fork_ends_as_it_began", || {
            let cache = KmemCache::new("forked", Layout::new::<u64>()).unwrap();
            fork::before();
            std::thread::scope(|scope| drop(scope.spawn(fork::handle)));
            fork::before();
            fork::in_parent();
            let is_refused = |within| cannot_shrink(&cache, within);
            assert!(is_refused(Duration::from_millis(50)));
            fork::in_parent();
            assert!(!is_refused(Duration::from_secs(20)));
            // From now on the allocator handles forks.
            fork::before();
            assert!(!is_refused(Duration::from_secs(20)));
            core::mem::forget(cache);
        });
    }

    /// Returns whether another thread cannot shrink the cache `within` a time.
    fn cannot_shrink(cache: &KmemCache, within: Duration) -> bool {
        let cache = core::ptr::from_ref(cache) as usize;
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // SAFETY: the test keeps the cache until the process ends.
            let cache = unsafe { &*(cache as *const KmemCache) };
            let _ = cache.shrink();
            // The receiver may have given up.
            let _ = done.send(());
        });
        is_done.recv_timeout(within).is_err()
    }
}
