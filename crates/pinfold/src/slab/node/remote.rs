//! Nodes: from which node's memory an object comes, and how the object goes back to that node.
//!
//! A slab is in the lists of the node whose memory it is, and that node's lock protects the slab's
//! bits. So an object must go back to its own node, even if a CPU of another node frees it. If each
//! free did that at once, each would take a distant lock. Instead:
//!
//! 1. A free pushes the object on a sheaf of the CPU on which the thread runs, whichever node the
//!    object is of.
//! 2. When the sheaf leaves the CPU, a thread sorts its objects of other nodes by node. It gives
//!    all objects of one node to that node's slabs under its lock at once
//!    ([`Descriptor::send_home`]).
//! 3. If a node has no more memory, it does not make slabs from another node's memory. A caller
//!    that accepts memory of another node asks that other node ([`Descriptor::others`]).

use super::part::Node;
use crate::arena::NodeRequest;
use crate::fork;
use crate::nodes;
use crate::segment::SlabEvent;
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::cache::reclaim;
use crate::slab::cpu::sheaf::Sheaf;
use core::sync::atomic::Ordering::Relaxed;

impl Descriptor {
    /// Moves the sheaf's objects of nodes other than that of `part` to their slabs. Takes the lock
    /// of each part of these nodes once.
    pub(crate) fn send_home(&self, part: &Node, sheaf: &mut Sheaf) {
        if self.nodes().len() == 1 {
            return;
        }
        let node = part.number() % self.nodes().len();
        let objects = sheaf.objects();
        let mut kept = 0;
        for at in 0..objects.len() {
            if self.node_of(objects[at]) == node {
                objects.swap(kept, at);
                kept += 1;
            }
        }
        let away = &mut objects[kept..];
        part.count(SlabEvent::FreeRemote, away.len());
        // SAFETY: this thread owns the sheaf and its objects, which are free.
        unsafe { self.give_home(away) };
        sheaf.set_len(kept);
    }

    /// Fills `objects` from slabs, without sheaves: of the node that `request` names, and of other
    /// nodes when that node has no more memory. If all are refused memory, gives free memory back
    /// and tries again (`reclaim`). If a fork may be the reason, waits for its end and tries again,
    /// but not for a cache that serves malloc. Returns how many objects it took.
    pub(crate) fn alloc_from(&self, request: NodeRequest, objects: &mut [*mut u8]) -> usize {
        let mut alloc = || {
            let some = || Some(self.alloc_from_any(request, objects)).filter(|&got| got > 0);
            reclaim::or_reclaim(some)
        };
        let got = match self.serves_malloc() {
            true => alloc(),
            false => fork::retry(alloc),
        };
        got.unwrap_or(0)
    }

    fn alloc_from_any(&self, request: NodeRequest, objects: &mut [*mut u8]) -> usize {
        let mut got = self.alloc_only_from(request, objects);
        self.others(request, |other| {
            let more = self.alloc_only_from(other, &mut objects[got..]);
            self.nodes()[request.node].count(SlabEvent::AllocNodeMismatch, more);
            got += more;
            got == objects.len()
        });
        got
    }

    /// Calls `f` for each node that may serve instead of the node that `request` names, the nearest
    /// first, until `f` returns true.
    pub(crate) fn others(&self, request: NodeRequest, mut f: impl FnMut(NodeRequest) -> bool) {
        if self.nodes().len() == 1 {
            return;
        }
        let mut f = |node| node != request.node && f(request.instead(node));
        match self.placement {
            Some(placement) => placement.fallback(request.node).any(&mut f),
            None => nodes::fallback(request.node).any(&mut f),
        };
    }

    /// Returns the node that the next objects should come from. If the cache has a policy, the
    /// policy decides; a cache for a pool's pages is bound to one node. Otherwise this is the node
    /// for memory without a policy (`nodes::current`).
    pub(crate) fn request(&self) -> NodeRequest {
        let Some(placement) = self.placement else {
            return NodeRequest::only(nodes::current());
        };
        let in_turn = placement.interleaves();
        let turn = match in_turn {
            true => self.turn.fetch_add(1, Relaxed),
            false => 0,
        };
        NodeRequest {
            in_turn,
            ..NodeRequest::only(placement.target(turn.into(), nodes::of_this_cpu()))
        }
    }

    /// Returns the part to which the objects that this thread frees most likely belong.
    pub(crate) fn here(&self) -> &Node {
        self.part_here(match self.placement {
            Some(placement) => placement.nearest(nodes::of_this_cpu()),
            None => nodes::current(),
        })
    }

    /// Fills `objects` from the slabs of the node that `request` names, and of no other node.
    /// Returns how many objects it took.
    pub(crate) fn alloc_only_from(&self, request: NodeRequest, objects: &mut [*mut u8]) -> usize {
        if self.checks() {
            self.nodes()[request.node].count(SlabEvent::AllocLockless, objects.len());
        }
        if let Some(slot_layout) = &self.slot_layout {
            let one = |object: &mut *mut u8| {
                *object = self.alloc_debugged(slot_layout, request, usize::MAX);
                !object.is_null()
            };
            let got = objects
                .iter_mut()
                .map_while(|object| one(object).then_some(()));
            return got.count();
        }
        if let Some(hardening) = &self.hardening {
            return self.alloc_hardened_from(hardening, request, objects);
        }
        self.take_objects(request, objects)
    }
}
