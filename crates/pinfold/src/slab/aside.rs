//! Objects that handlers free while their node's lock cannot be had: a list without a lock, which the next holder takes.
//!
//! An object set aside is in use as far as its slab knows, and holds the link to the one set aside before: in its first word, encoded in a
//! hardened cache; in a debugged one in the slot's word for the bytes asked for, which reads as all of them then. Whoever looks the
//! cache over meanwhile, perhaps the very frame that the handler has interrupted, finds nothing wrong with it.

use super::cache::Cache;
use super::debug::{Kind, Plan};
use super::key;
use super::node::{Node, Stock};
use super::slabs::Slab;
use crate::segment::SlabEvent;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

impl Cache {
    /// Returns the word that stands in `object`, which is set aside, for a link to `to`.
    fn encode_link(&self, object: *mut u8, to: *mut u8) -> usize {
        match (&self.hardening, &self.plan) {
            (Some(_), _) => {
                let mask = key::link_masks(object).next();
                to as usize ^ mask.unwrap_or_default()
            }
            // More than any object's bytes, also for null.
            (None, Some(_)) => !(to as usize),
            (None, None) => to as usize,
        }
    }

    /// Returns what a link in `object` leads to. In a hardened cache, a link that leads to no
    /// object of this cache was overwritten: reports that, and ends the list there.
    fn decode_link(&self, object: *mut u8, link: usize) -> *mut u8 {
        if self.hardening.is_none() {
            // Both encodings are their own inverse.
            return self.encode_link(object, link as *mut u8) as *mut u8;
        }
        // An object may have been set aside before a fork, with a mask of an older secret.
        let mut targets = key::link_masks(object).map(|mask| (link ^ mask) as *mut u8);
        let is_valid = |to: &*mut u8| to.is_null() || self.objection(*to).is_none();
        targets.find(is_valid).unwrap_or_else(|| {
            self.accuse(object, Kind::WrittenAfterFree, None);
            null_mut()
        })
    }

    /// Where in an object or slot that is set aside the link is.
    fn link(&self, object: *mut u8) -> *mut AtomicUsize {
        let at = self.plan.as_ref().map_or(0, Plan::link_at);
        object.wrapping_add(at).cast()
    }
}

impl Node {
    pub(super) fn set_aside(&self, cache: &Cache, object: *mut u8) {
        if cache.per_slab == 1 {
            // SAFETY: the object is free and this thread's.
            unsafe { Slab::take_fresh(object) };
        }
        let mut next = self.set_aside.load(Relaxed);
        loop {
            let link = cache.encode_link(object, next);
            // SAFETY: the object is free, at least 8 bytes large and 8-byte aligned.
            unsafe { (*cache.link(object)).store(link, Relaxed) };
            // Release pairs with the acquire in `take_back`: the link is seen.
            match self
                .set_aside
                .compare_exchange_weak(next, object, Release, Relaxed)
            {
                Ok(_) => return,
                Err(other) => next = other,
            }
        }
    }

    /// Gives what signal handlers have set aside to its slabs.
    pub(super) fn take_back(&self, cache: &Cache, stock: &mut Stock) {
        if self.set_aside.load(Relaxed).is_null() {
            return;
        }
        let mut next = self.set_aside.swap(null_mut(), Acquire);
        while let Some(object) = NonNull::new(next) {
            // SAFETY: an object set aside holds the next one's address there.
            let link = unsafe { (*cache.link(object.as_ptr())).load(Relaxed) };
            next = cache.decode_link(object.as_ptr(), link);
            if let Some(hardening) = &cache.hardening {
                // SAFETY: the object is free and nobody's.
                unsafe { hardening.unlink(object.as_ptr()) };
            }
            if cache.prepares() {
                // The link has overwritten part of what was there.
                // SAFETY: the object is free and nobody's.
                unsafe { cache.prepare(object.as_ptr()) };
            }
            stock.count(SlabEvent::Flushed, 1);
            // SAFETY: it was freed by its owner, on this node.
            unsafe { stock.slabs.give(cache, &[object.as_ptr()]) };
        }
    }
}
