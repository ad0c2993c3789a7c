//! Objects and nodes: whose memory an object is, and what happens far from there.
//!
//! A slab is in the lists of the node whose memory it is, and only that node's lock protects its bits. So an object is given back
//! to the slabs of its own node, wherever it is freed: not one by one, but when the sheaf it went into leaves the CPU,
//! with all others of that sheaf that have the same home. And a node without memory makes no slab of another's: who
//! wants an object nevertheless asks the other node for it.

use super::KmemCache;
use super::cache::Cache;
use super::node::Node;
use super::sheaf::{CAPACITY_MOST, Sheaf};
use crate::segment::SlabEvent;
use crate::{nodes, page};
use core::ptr::{NonNull, null_mut};

impl KmemCache {
    /// An object of node `node`'s memory or none; past the CPU's sheaves, under the node's lock. `None` when that node has no
    /// memory, or is not there. Nodes are numbered from 0, in the order of the system's ids of those with memory.
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
        if node < nodes::count() {
            self.descriptor.alloc_only_from(node, &mut object);
        }
        NonNull::new(object[0])
    }
}

impl Cache {
    /// The node whose memory an object of this cache is.
    pub(super) fn home(&self, object: *mut u8) -> &Node {
        let all = self.nodes();
        &all[page::node_of(object as usize).min(all.len() - 1)]
    }

    /// Gives objects of other nodes than `node` to their slabs there, all of a node's under its lock at once.
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
        self.count(SlabEvent::FreeRemote, gone);
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
            // SAFETY: objects in a sheaf were freed by their owners; these are that node's.
            unsafe { home.give_objects(self, these) };
            away = rest;
        }
    }

    /// Takes objects past the sheaves, from `number`'s slabs and, when that node has no more, from others'; returns how many.
    pub(super) fn alloc_from(&self, number: usize, objects: &mut [*mut u8]) -> usize {
        let nodes = self.nodes().len();
        let mut got = self.alloc_only_from(number, objects);
        for other in (1..nodes).map(|step| (number + step) % nodes) {
            if got == objects.len() {
                break;
            }
            let more = self.alloc_only_from(other, &mut objects[got..]);
            self.count(SlabEvent::AllocNodeMismatch, more);
            got += more;
        }
        got
    }

    /// Takes objects past the sheaves, from `number`'s slabs only; returns how many.
    pub(super) fn alloc_only_from(&self, number: usize, objects: &mut [*mut u8]) -> usize {
        if self.checks() {
            self.count(SlabEvent::AllocSlowpath, objects.len());
        }
        if let Some(plan) = self.plan() {
            let one = |object: &mut *mut u8| {
                *object = self.alloc_debugged(plan, number, usize::MAX);
                !object.is_null()
            };
            let got = objects
                .iter_mut()
                .map_while(|object| one(object).then_some(()));
            return got.count();
        }
        if let Some(hardening) = &self.hardening {
            return self.alloc_hardened_from(hardening, number, objects);
        }
        self.nodes()[number].take_objects(self, number, objects)
    }
}
