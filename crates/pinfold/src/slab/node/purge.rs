//! Gives whole pages of free objects back to the system, from slabs that also have objects in use.
//!
//! A slab goes back to the arena only when all its objects are free. So one object in use can keep
//! a slab of up to 512 KiB. The pages of such a slab that hold only free objects go back to the
//! system once no object of the slab was taken or given for [`PERIODS`] periods of about half a
//! second.
//!
//! A page that went back reads as zeroes when it is used again. That does no harm, because free
//! objects hold nothing that is needed later. Two kinds of caches are exceptions, and keep their
//! pages: the free objects of a cache with a constructor are constructed, and those of a debugged
//! cache are poisoned.

use super::objects::Objects;
use super::slabs::{NIL, PURGED, Slab, Slabs, list_of};
use crate::{arena, sys};
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;

/// The number of periods for which a slab must have been left alone before its pages go back.
pub(crate) const PERIODS: u32 = 2;
/// The most slabs that one call visits, and the most that it purges. Few, because the caller holds
/// the node's lock during the call.
const LOOKED_AT: usize = 128;
const MAX_PURGED: usize = 2;

impl Slabs {
    /// Lets the next calls of [`purge_idle`](Self::purge_idle) visit all partial slabs, if they do
    /// not visit them already.
    pub(crate) fn begin_purge(&mut self) {
        if self.cursor == NIL {
            self.cursor = self.first_partial(0);
        }
    }

    /// Returns whether there are partial slabs that `purge_idle` has not visited since
    /// [`begin_purge`](Self::begin_purge).
    pub(crate) fn is_purging(&self) -> bool {
        self.cursor != NIL
    }

    /// Purges partial slabs that were left alone for `periods` periods. Starts where the last call
    /// ended. Returns whether there are slabs that it has not visited yet.
    ///
    /// A slab that moves to another list between two calls may be visited twice or not at all. That
    /// does no harm, because such a slab was not left alone.
    pub(crate) fn purge_idle(&mut self, cache: &Objects, periods: u32) -> bool {
        if cache.prepares() {
            return false;
        }
        let mut purged = 0;
        let mut index = if self.cursor == NIL {
            self.first_partial(0)
        } else {
            self.cursor
        };
        for _ in 0..LOOKED_AT {
            if index == NIL || purged == MAX_PURGED {
                break;
            }
            // SAFETY: the slab is in a list of this node.
            let slab = unsafe { self.slab(index) };
            index = self.after(list_of(cache, slab.free.get()), index);
            let idle_for = self.period.wrapping_sub(slab.touched.get());
            if slab.touched.get() != PURGED && idle_for >= periods {
                cache.purged.store(true, Relaxed);
                slab.purge(cache);
                slab.touched.set(PURGED);
                purged += 1;
            }
        }
        self.cursor = index;
        index != NIL
    }
}

impl Slab {
    /// Gives the pages that hold only free objects back to the system.
    fn purge(&self, cache: &Objects) {
        let page = sys::page_size();
        let start = self.start() as usize;
        let (mut bytes, mut nth) = (0, 0);
        while let Some(first) = self.next_free(nth, cache.geometry.per_slab) {
            let end = self.next_used(first, cache.geometry.per_slab);
            let from = (start + first * cache.geometry.size).next_multiple_of(page);
            let to = (start + end * cache.geometry.size) / page * page;
            if let Some(at) = NonNull::new(from as *mut u8).filter(|_| from < to) {
                // With huge pages, the next write to one of these pages would bring back 2 MiB.
                arena::refuse_huge_pages(arena::head_of(start), cache.geometry.granules as u32);
                // SAFETY: these pages hold only free objects, whose content is not needed. The
                // caller holds the node's lock, so no thread takes one of these objects during the
                // purge.
                bytes += if unsafe { sys::purge(at.as_ptr(), to - from) } {
                    to - from
                } else {
                    0
                };
            }
            nth = end;
        }
        if bytes > 0 {
            arena::gave_back_pages(arena::node_of(start), bytes);
        }
    }

    /// Returns the number of the first free object from the `nth` on. `count` is the number of
    /// objects.
    fn next_free(&self, nth: usize, count: usize) -> Option<usize> {
        let at = self.next_bit(nth, count, 0);
        (at < count).then_some(at)
    }

    /// Returns the number of the first object in use from the `nth` on, or `count` if there is
    /// none.
    fn next_used(&self, nth: usize, count: usize) -> usize {
        self.next_bit(nth, count, u64::MAX)
    }

    /// Returns the number of the first bit from the `nth` on that is set after each word of bits
    /// was xored with `flip`. Returns `count` if no such bit is set.
    fn next_bit(&self, nth: usize, count: usize, flip: u64) -> usize {
        let mut at = nth;
        while at < count {
            let rest = (self.bits[at / 64].load(Relaxed) ^ flip) >> (at % 64);
            if rest != 0 {
                return (at + rest.trailing_zeros() as usize).min(count);
            }
            at = (at / 64 + 1) * 64;
        }
        count
    }
}
