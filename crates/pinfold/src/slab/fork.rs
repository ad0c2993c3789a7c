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
        let nodes = cache.nodes().iter();
        nodes.for_each(|node| visit(node.stock.word()));
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
    use crate::lock::{hold, while_held};
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
            descriptor::Descriptor::create_first("first", 8).is_none()
        });
        assert_eq!(is_refused, Some(true));
        // A thread without locks waits.
        let soon = Duration::from_millis(50);
        let block = while_held(counter_units::lock_word(), soon, || counter_units::alloc(8));
        assert_eq!(block, None);
    }

    // The handler's frame holds the node's lock. Another thread holds the registry and waits for
    // that lock.
    #[test]
    fn a_fork_in_a_handler_gives_up_a_wait() {
        const ALONE: &str = "PINFOLD_TEST_FORKS_IN_A_HANDLER";
        if std::env::var_os(ALONE).is_none() {
            // In a process of its own: a fork stops the threads of other tests.
            let (_, module) = module_path!().split_once("::").unwrap();
            let name = std::format!("{module}::a_fork_in_a_handler_gives_up_a_wait");
            let status = std::process::Command::new(std::env::current_exe().unwrap())
                .args([&*name, "--exact"])
                .env(ALONE, "1")
                .status();
            return assert!(status.unwrap().success());
        }
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
            // SAFETY: the child ends at once.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: always sound.
                unsafe { libc::_exit(7) };
            }
            let mut status = 0;
            // SAFETY: `status` is a valid place for the result.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(libc::WEXITSTATUS(status), 7);
            drop(stock);
            assert!(other.join().unwrap());
        });
    }
}
