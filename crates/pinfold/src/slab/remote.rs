//! Nodes: from which node's memory an object comes, and how the object goes back to that node.
//!
//! A slab is in the lists of the node whose memory it is, and that node's lock protects the slab's
//! bits. So an object must go back to its own node, also if a CPU of another node frees it. If each
//! free did that at once, each would take a distant lock. Instead:
//!
//! 1. A free pushes the object on a sheaf of the CPU on which the thread runs, whichever node the
//!    object is of.
//! 2. When the sheaf leaves the CPU, a thread sorts its objects of other nodes by node. It gives
//!    all objects of one node to that node's slabs under its lock at once ([`Cache::send_home`]).
//! 3. If a node has no more memory, it does not make slabs from another node's memory. A caller
//!    that accepts memory of another node asks that other node ([`Cache::others`]).

use super::KmemCache;
use super::cache::Cache;
use super::node::Node;
use super::reclaim;
use super::sheaf::{CAPACITY_MOST, Sheaf};
use crate::page::Ask;
use crate::segment::SlabEvent;
use crate::{nodes, page};
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::Relaxed;

impl KmemCache {
    /// Allocates an object from the memory of node `node` only. Returns `None` if that node has no
    /// free memory or does not exist. Nodes are numbered as in [`Zone`](crate::vmstat::Zone).
    ///
    /// Bypasses the CPU's sheaves, and takes the node's lock.
    ///
    /// ```
    /// use pinfold::slab::KmemCache;
    /// use std::alloc::Layout;
    ///
    /// let cache = KmemCache::new("near", Layout::new::<[u64; 8]>())?;
    /// let object = cache.alloc_node_exact(0).expect("memory on the first node");
    /// assert!(cache.alloc_node_exact(1000).is_none());
    /// // SAFETY: the object came from this cache and is not used afterwards.
    /// unsafe { cache.free(object) };
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[doc(alias = "__GFP_THISNODE")]
    pub fn alloc_node_exact(&self, node: usize) -> Option<NonNull<u8>> {
        let mut object = [null_mut()];
        if node < nodes::real() {
            self.descriptor
                .alloc_only_from(Ask::only(node), &mut object);
        }
        NonNull::new(object[0])
    }
}

impl KmemCache {
    /// Allocates an object from the slabs of the node that `ask` names, and of no other node.
    pub(crate) fn alloc_as(&self, ask: Ask) -> Option<NonNull<u8>> {
        let mut object = [null_mut()];
        self.descriptor.alloc_only_from(ask, &mut object);
        NonNull::new(object[0])
    }
}

impl Cache {
    /// Returns the node whose memory `object`, an object of this cache, is.
    pub(super) fn home(&self, object: *mut u8) -> &Node {
        let all = self.nodes();
        &all[page::node_of(object as usize).min(all.len() - 1)]
    }

    /// Gives those of the sheaf's objects that are of nodes other than `node` to their slabs. Takes
    /// the lock of each of these nodes once.
    pub(super) fn send_home(&self, node: &Node, sheaf: &mut Sheaf) {
        if self.nodes().len() == 1 {
            return;
        }
        let mut away = [null_mut(); CAPACITY_MOST];
        let (mut kept, mut gone) = (0, 0);
        let objects = sheaf.objects();
        for at in 0..objects.len() {
            let object = objects[at];
            if core::ptr::eq(self.home(object), node) {
                objects[kept] = object;
                kept += 1;
            } else {
                away[gone] = object;
                gone += 1;
            }
        }
        sheaf.set_len(kept);
        node.count(SlabEvent::FreeRemote, gone);
        let mut away = &mut away[..gone];
        while let Some(&first) = away.first() {
            let home = self.home(first);
            let mut group = 0;
            for at in 0..away.len() {
                if core::ptr::eq(self.home(away[at]), home) {
                    away.swap(at, group);
                    group += 1;
                }
            }
            let (these, rest) = away.split_at_mut(group);
            // SAFETY: this thread took the objects out of its sheaf, so it owns them. The loop
            // above chose those whose node is `home`.
            unsafe { home.give_objects(self, these) };
            away = rest;
        }
    }

    /// Fills `objects` from slabs, without sheaves: of the node that `ask` names, and of other
    /// nodes when that node has no more memory. If all are refused memory, gives free memory back
    /// and tries again (`reclaim`). Returns how many objects it took.
    pub(super) fn alloc_from(&self, ask: Ask, objects: &mut [*mut u8]) -> usize {
        let some = || Some(self.alloc_from_any(ask, objects)).filter(|&got| got > 0);
        reclaim::or_reclaim(some).unwrap_or(0)
    }

    fn alloc_from_any(&self, ask: Ask, objects: &mut [*mut u8]) -> usize {
        let mut got = self.alloc_only_from(ask, objects);
        self.others(ask, |other| {
            let more = self.alloc_only_from(other, &mut objects[got..]);
            self.nodes()[ask.node].count(SlabEvent::AllocNodeMismatch, more);
            got += more;
            got == objects.len()
        });
        got
    }

    /// Calls `f` for each node that may serve instead of the node that `ask` names, the nearest
    /// first, until `f` returns true.
    pub(super) fn others(&self, ask: Ask, mut f: impl FnMut(Ask) -> bool) {
        if self.nodes().len() == 1 {
            return;
        }
        let mut f = |node| node != ask.node && f(ask.instead(node));
        match self.placement {
            Some(placement) => placement.fallback(ask.node).any(&mut f),
            None => nodes::fallback(ask.node).any(&mut f),
        };
    }

    /// Returns the node that the next objects should come from. If the cache has a policy, the
    /// policy decides. Otherwise this is the node for memory without a policy (`nodes::current`).
    pub(super) fn ask(&self) -> Ask {
        let Some(placement) = self.placement else {
            return Ask::only(nodes::current());
        };
        let in_turn = placement.interleaves();
        let turn = match in_turn {
            true => self.turn.fetch_add(1, Relaxed),
            false => 0,
        };
        Ask {
            in_turn,
            ..Ask::only(placement.target(turn.into(), nodes::of_this_cpu()))
        }
    }

    /// Returns the node to which the objects that this thread frees most likely belong.
    pub(super) fn here(&self) -> &Node {
        &self.nodes()[match self.placement {
            Some(placement) => placement.nearest(nodes::of_this_cpu()),
            None => nodes::current(),
        }]
    }

    /// Fills `objects` from the slabs of the node that `ask` names, and of no other node. Returns
    /// how many objects it took.
    pub(super) fn alloc_only_from(&self, ask: Ask, objects: &mut [*mut u8]) -> usize {
        if self.checks() {
            self.nodes()[ask.node].count(SlabEvent::AllocLockless, objects.len());
        }
        if let Some(plan) = self.plan() {
            let one = |object: &mut *mut u8| {
                *object = self.alloc_debugged(plan, ask, usize::MAX);
                !object.is_null()
            };
            let got = objects
                .iter_mut()
                .map_while(|object| one(object).then_some(()));
            return got.count();
        }
        if let Some(hardening) = &self.hardening {
            return self.alloc_hardened_from(hardening, ask, objects);
        }
        self.nodes()[ask.node].take_objects(self, ask, objects)
    }
}
