//! Objects set aside: freed by a thread that cannot take the lock of their node.
//!
//! A signal handler that interrupted the holder of the lock must not wait for it, and a thread that
//! frees must not wait for a fork. Such a thread puts the object on a list of the node:
//!
//! 1. It writes a link to the object set aside before it into the object.
//! 2. It makes the object the head of the list, with one compare-exchange, or goes back to step 1.
//! 3. The next holder of the lock takes the whole list with one exchange, and gives the objects to
//!    their slabs ([`Node::take_back`]).
//!
//! Until step 3 the slab counts the object as in use. The link stands where a check of the objects
//! in use finds nothing wrong, because the interrupted frame may be making that check:
//!
//! | cache | the link |
//! |---|---|
//! | ordinary | in the first word |
//! | hardened | in the first word, encoded with a secret |
//! | debugged | in the word for the bytes asked for, inverted: read as a size, it means all bytes |

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
    /// Returns the word that stands for a link to `to` in `object`, which is set aside.
    fn encode_link(&self, object: *mut u8, to: *mut u8) -> usize {
        match (&self.hardening, &self.plan) {
            (Some(_), _) => {
                let mask = key::link_masks(object).next();
                to as usize ^ mask.unwrap_or_default()
            }
            // Larger than any object's size, also for null.
            (None, Some(_)) => !(to as usize),
            (None, None) => to as usize,
        }
    }

    /// Returns what the link in `object` leads to. In a hardened cache, a link that leads to no
    /// object of this cache was overwritten. This function reports that, and ends the list there.
    fn decode_link(&self, object: *mut u8, link: usize) -> *mut u8 {
        if self.hardening.is_none() {
            // Both encodings are their own inverse.
            return self.encode_link(object, link as *mut u8) as *mut u8;
        }
        // An object that was set aside before a fork has a mask of an older secret.
        let mut targets = key::link_masks(object).map(|mask| (link ^ mask) as *mut u8);
        let is_valid = |to: &*mut u8| to.is_null() || self.objection(*to).is_none();
        targets.find(is_valid).unwrap_or_else(|| {
            self.accuse(object, Kind::WrittenAfterFree, None);
            null_mut()
        })
    }

    /// Returns where the link stands in an object or slot that is set aside.
    fn link(&self, object: *mut u8) -> *mut AtomicUsize {
        let at = self.plan.as_ref().map_or(0, Plan::link_at);
        object.wrapping_add(at).cast()
    }
}

impl Node {
    /// Sets a free object aside. Takes no lock.
    pub(super) fn set_aside(&self, cache: &Cache, object: *mut u8) {
        if cache.per_slab == 1 {
            // SAFETY: this thread frees the object, which is the only one of its slab.
            unsafe { Slab::take_fresh(object) };
        }
        let mut next = self.set_aside.load(Relaxed);
        loop {
            let link = cache.encode_link(object, next);
            // SAFETY: this thread frees the object, which is at least 8 bytes large and 8-byte
            // aligned.
            unsafe { (*cache.link(object)).store(link, Relaxed) };
            // Release pairs with the acquire in `take_back`, which then reads the link.
            match self
                .set_aside
                .compare_exchange_weak(next, object, Release, Relaxed)
            {
                Ok(_) => return,
                Err(other) => next = other,
            }
        }
    }

    /// Gives the objects that were set aside to their slabs.
    pub(super) fn take_back(&self, cache: &Cache, stock: &mut Stock) {
        if self.set_aside.load(Relaxed).is_null() {
            return;
        }
        let mut next = self.set_aside.swap(null_mut(), Acquire);
        while let Some(object) = NonNull::new(next) {
            // SAFETY: the exchange above took the list, whose objects hold a link at this place.
            let link = unsafe { (*cache.link(object.as_ptr())).load(Relaxed) };
            next = cache.decode_link(object.as_ptr(), link);
            if let Some(hardening) = &cache.hardening {
                // SAFETY: the object is free, and came off the list, so that no other thread uses
                // it.
                unsafe { hardening.unlink(object.as_ptr()) };
            }
            if cache.prepares() {
                // The link has overwritten part of the prepared bytes.
                // SAFETY: the object is free, and came off the list, so that no other thread uses
                // it.
                unsafe { cache.prepare(object.as_ptr()) };
            }
            stock.count(SlabEvent::Flushed, 1);
            // SAFETY: the object was freed, and callers of `set_aside` choose the node of its
            // memory.
            unsafe { stock.slabs.give(cache, &[object.as_ptr()]) };
        }
    }
}
