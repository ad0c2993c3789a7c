//! Objects that handlers free while their node's lock cannot be had: a list without a lock, which the next holder takes.
//!
//! An object set aside is in use as far as its slab knows, and holds the link to the one set aside before: in its first word, encoded in a
//! hardened cache; in a debugged one in the slot's word for the bytes asked for, which reads as all of them then. Whoever looks the
//! cache over meanwhile, perhaps the very frame that the handler has interrupted, finds nothing wrong with it.

use super::cache::Cache;
use super::debug::Plan;
use super::node::{Node, Stock};
use crate::segment::SlabEvent;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

impl Cache {
    /// A link to `to`, or what it stands for, in an object that is set aside.
    fn link_of(&self, object: *mut u8, to: *mut u8) -> *mut u8 {
        match (&self.hardening, &self.plan) {
            (Some(hardening), _) => hardening.encode(object, to),
            // More than any object's bytes, also for null.
            (None, Some(_)) => !(to as usize) as *mut u8,
            (None, None) => to,
        }
    }

    /// Where in an object or slot that is set aside the link is.
    fn link(&self, object: *mut u8) -> *mut AtomicUsize {
        let at = self.plan.as_ref().map_or(0, Plan::link_at);
        object.wrapping_add(at).cast()
    }
}

impl Node {
    pub(super) fn set_aside(&self, cache: &Cache, object: *mut u8) {
        let mut next = self.set_aside.load(Relaxed);
        loop {
            let link = cache.link_of(object, next) as usize;
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
            next = cache.link_of(object.as_ptr(), link as *mut u8);
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
