//! What a fork does in this layer: it takes the locks of all caches, and removes what threads that
//! do not exist in the child left behind. Also has the shepherd call this layer.

use super::unit::{SHEAF_UNITS, STOPPING};
use super::{descriptor, idle, in_flight, key, sheaf};
use crate::fork::{self, Hooks, Rank};
use crate::lock::Word;
use crate::{arena, shepherd};

/// Makes forks take the locks of this layer and of the arenas below, and the shepherd's ticks drain
/// idle sheaves. Returns false if [`fork::register`] does.
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
    descriptor::for_each(|cache| visit(cache.deferred.pending.word()));
}

fn visit_nodes(visit: &mut dyn FnMut(&Word)) {
    let nodes = descriptor::all().flat_map(|cache| cache.nodes());
    nodes.for_each(|node| visit(node.stock.word()));
}

fn forget_other_threads() {
    SHEAF_UNITS.unlock_all_in_child(pinfold_rseq::possible());
    in_flight::fork_child();
    arena::budget::fork_child();
    key::fork_child();
}
