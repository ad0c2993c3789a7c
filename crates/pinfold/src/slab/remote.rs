//! Objects and nodes: from which node an object comes, and how it goes back there.
//!
//! A slab is in the lists of the node whose memory it is, and that node's lock protects its bits.
//! So an object has to go back to its own node, wherever it is freed. To do that for each object at
//! once would take a distant lock for each free. So:
//!
//! 1. An object freed on another node goes into that CPU's sheaf as every object does.
//! 2. When the sheaf leaves the CPU, its objects of other nodes are sorted out, and all objects of
//!    a node go to its slabs under its lock at once ([`Cache::send_home`]).
//! 3. A node without memory makes no slab from another node's memory. A caller that accepts memory
//!    of another node asks that node ([`Cache::others`]).

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
    /// memory or does not exist. Nodes are numbered as in [`Zone`](crate::vmstat::Zone).
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
    /// Allocates an object from the memory of the asked node only, without sheaves.
    pub(crate) fn alloc_as(&self, ask: Ask) -> Option<NonNull<u8>> {
        let mut object = [null_mut()];
        self.descriptor.alloc_only_from(ask, &mut object);
        NonNull::new(object[0])
    }
}

impl Cache {
    /// Returns the node whose memory an object of this cache is.
    pub(super) fn home(&self, object: *mut u8) -> &Node {
        let all = self.nodes();
        &all[page::node_of(object as usize).min(all.len() - 1)]
    }

    /// Gives the sheaf's objects of other nodes than `node` to their slabs. Takes the lock of each
    /// of these nodes once.
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
            // SAFETY: objects in a sheaf are free, and the loop above chose those whose home is
            // this node.
            unsafe { home.give_objects(self, these) };
            away = rest;
        }
    }

    /// Takes objects from slabs: of the asked node, and of other nodes when that one has no more.
    /// Gives back what is free if memory is short. Returns how many.
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

    /// Calls `f` for each node that may serve instead of the asked one, the nearest first, until
    /// `f` returns true.
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

    /// Returns the node that the cache's next memory should come from: by the cache's policy if it
    /// has one, else by the process's policy, else by where the thread runs.
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

    /// Returns the node whose memory the objects that this thread uses most likely are.
    pub(super) fn here(&self) -> &Node {
        &self.nodes()[match self.placement {
            Some(placement) => placement.nearest(nodes::of_this_cpu()),
            None => nodes::current(),
        }]
    }

    /// Takes objects from slabs of the asked node only. Returns how many.
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
