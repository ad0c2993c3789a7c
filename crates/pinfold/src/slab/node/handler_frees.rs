//! Objects set aside: freed by a thread that cannot take the lock of their node.
//!
//! A signal handler that interrupted the holder of the node's lock must not wait for that lock,
//! because its own thread holds it. A thread that frees must not wait for a fork either (`lock`).
//! Such a thread adds the object to a list of the node ([`Llist`](crate::lock::Llist)). The next
//! holder of the lock takes the whole list, and gives the objects to their slabs
//! ([`Node::take_back`]).
//!
//! Until then, the slab counts the object as in use. The interrupted frame may be checking the
//! objects in use at this moment. So the link lies where that check finds nothing wrong:
//!
//! | cache | the link |
//! |---|---|
//! | ordinary | in the first word |
//! | hardened | in the first word, encoded with a secret |
//! | debugged | in the word for the requested size, complemented: a check reads it as "all bytes" |

use super::part::{Node, Stock};
use super::slabs::Slab;
use crate::lock::chain;
use crate::segment::SlabEvent;
use crate::slab::cache::descriptor::Descriptor;
use crate::slab::checks::debug::{Kind, SlotLayout};
use crate::slab::checks::key;
use core::ptr::null_mut;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

impl Descriptor {
    /// Encodes the link from `object`, which is set aside, to `to`, the next object of the list.
    fn encode_link(&self, object: *mut u8, to: *mut u8) -> usize {
        match (&self.hardening, &self.slot_layout) {
            (Some(_), _) => {
                let mask = key::link_masks(object).next();
                to as usize ^ mask.unwrap_or_default()
            }
            // The complement of an address, or of null, is larger than any object's size.
            (None, Some(_)) => !(to as usize),
            (None, None) => to as usize,
        }
    }

    /// Returns the object to which the link in `object` leads. In a hardened cache, a link that
    /// leads to no object of this cache was overwritten. For such a link, reports a write after the
    /// free, and returns null, so that the list ends there.
    fn decode_link(&self, object: *mut u8, link: usize) -> *mut u8 {
        if self.hardening.is_none() {
            // Encoding twice gives the address again: a plain link is the address itself, a
            // debugged one its bitwise complement.
            return self.encode_link(object, link as *mut u8) as *mut u8;
        }
        // If the object was set aside before a fork, its link is encoded with an older secret.
        let mut targets = key::link_masks(object).map(|mask| (link ^ mask) as *mut u8);
        let is_valid = |to: &*mut u8| to.is_null() || self.objection(*to).is_none();
        targets.find(is_valid).unwrap_or_else(|| {
            self.accuse(object, Kind::WrittenAfterFree, None);
            null_mut()
        })
    }

    /// Returns the address of the link in an object that is set aside. For a debugged cache,
    /// `object` is the object's slot.
    fn link(&self, object: *mut u8) -> *mut AtomicUsize {
        let at = self.slot_layout.as_ref().map_or(0, SlotLayout::link_at);
        object.wrapping_add(at).cast()
    }
}

impl Node {
    /// Sets a free object aside. Takes no lock.
    pub(crate) fn set_aside(&self, cache: &Descriptor, object: *mut u8) {
        if cache.geometry.per_slab == 1 {
            // SAFETY: this thread frees the object, so it owns it. The slab has only this object.
            unsafe { Slab::take_fresh(object) };
        }
        self.set_aside.add(object as u64, |next| {
            let link = cache.encode_link(object, next as *mut u8);
            // SAFETY: this thread frees the object, so it owns it. Objects are at least 8 bytes
            // large and lie at multiples of 8.
            unsafe { (*cache.link(object)).store(link, Relaxed) };
        });
    }

    /// Gives the objects that were set aside to their slabs. The caller holds the node's lock.
    pub(crate) fn take_back(&self, cache: &Descriptor, stock: &mut Stock) {
        if self.set_aside.is_empty() {
            return;
        }
        let next = |object: u64| {
            let object = object as *mut u8;
            // SAFETY: this thread took the object off the list, so it owns it. The object holds a
            // link at this address.
            let link = unsafe { (*cache.link(object)).load(Relaxed) };
            cache.decode_link(object, link) as u64
        };
        for object in chain(self.set_aside.del_all(), next) {
            let object = object as *mut u8;
            if let Some(hardening) = &cache.hardening {
                // SAFETY: the object came off the list that this thread took, so this thread owns
                // it.
                unsafe { hardening.unlink(object) };
            }
            if cache.prepares() {
                // The link has overwritten part of the prepared bytes.
                // SAFETY: the object came off the list that this thread took, so this thread owns
                // it.
                unsafe { cache.prepare(object) };
            }
            stock.count(SlabEvent::Flushed, 1);
            // SAFETY: this thread took the object off the list and owns it. It is this node's,
            // because callers of `set_aside` choose the node of the object's memory.
            let others = unsafe { stock.give(cache, &mut [object]) };
            debug_assert_eq!(others, 0);
        }
    }
}
