//! `tid`: a list of objects per CPU, protected by a transaction id. The kernel's SLUB did this when
//! it stopped disabling preemption there.
//!
//! # The protocol
//!
//! ```text
//!     do { tid = the CPU's id; local = the CPU's part } while (tid != local's id)
//!     object = local's head
//!     next   = the link in object
//!     compare-exchange {head, id} from {object, tid} to {next, tid + 1}, or begin again
//! ```
//!
//! An id names the CPU and counts its operations, so that no two operations see the same id. If the
//! exchange finds the id unchanged, the list has not changed since it was read, and `next` is the
//! link of its first object.
//!
//! Two things differ from the kernel:
//!
//! * The exchange is atomic for all CPUs (on x86-64, it has a lock prefix). The kernel's addresses
//!   the CPU's part and exchanges in one instruction. Here the thread may have moved since it
//!   looked its CPU up, and another thread may use the same list.
//! * The id also counts the list's objects, to bound the list. SLUB has a bound in the page that
//!   the list belongs to.
//!
//! An array would not work. A thread that was overtaken between writing a slot and the exchange
//! would have overwritten a slot that another thread filled meanwhile.

use super::batch::Batch;
use super::double_word::{self, Pair};
use crate::Subject;
use anyhow::{Result, ensure};
use pinfold::slab::KmemCache;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// The id, from its lowest bit: 8 bits for the objects in the list, 13 bits for the CPU, 43 bits
/// for operations.
///
/// An exchange succeeds wrongly only if the thread was overtaken by a multiple of 2^43 operations.
/// At 5 ns an operation, that takes half a day.
const CPU: u32 = Batch::MOST.ilog2();
const COUNT: u64 = Batch::MOST as u64 - 1;
const STEP: u64 = 1 << (CPU + pinfold_rseq::MAX_INDEX.ilog2());

pub struct Tid {
    pub(super) backing: KmemCache,
    /// The most objects that a list holds: as many as one of the cache's own arrays.
    capacity: usize,
    locals: Box<[Local]>,
}

/// A CPU's list, on cache lines of its own: on two, because CPUs fetch lines in pairs. The first
/// word is the address of the first object, or 0. The second is the id.
#[repr(C, align(128))]
struct Local(Pair);

/// The content of a [`Local`], as read or to be written.
#[derive(Clone, Copy)]
struct Words {
    head: u64,
    tid: u64,
}

impl Local {
    fn head(&self) -> &AtomicU64 {
        &self.0.0[0]
    }

    fn tid(&self) -> &AtomicU64 {
        &self.0.0[1]
    }

    /// Replaces both words by `new` if they equal `seen`.
    #[inline(always)]
    fn replace(&self, seen: Words, new: Words) -> bool {
        self.0.replace([seen.head, seen.tid], [new.head, new.tid])
    }
}

/// Returns the place of a free object's link.
fn link(object: u64) -> *mut u64 {
    object as *mut u64
}

impl Tid {
    /// Makes an allocator of `backing`'s objects, which must have at least 8 bytes.
    pub fn new(backing: KmemCache) -> Result<Tid> {
        ensure!(double_word::missing().is_none(), "no double-word exchange");
        ensure!(backing.object_size() >= 8, "no room for a link in objects");
        // At most 255 objects: a spilled list and the object being freed must fit into a `Batch`
        // (256), and the id has 8 bits for the count.
        let capacity = backing.statistics().sheaf_capacity.min(Batch::MOST - 1);
        let local = |cpu: usize| Local(Pair([0, (cpu as u64) << CPU].map(AtomicU64::new)));
        Ok(Tid {
            backing,
            capacity,
            locals: super::for_each_cpu(local),
        })
    }

    /// Returns the current CPU's list and its content. Reads the id before the head, so that the
    /// head is never older than the id.
    #[inline(always)]
    fn enter(&self) -> (&Local, Words) {
        loop {
            let tid = self.locals[pinfold_rseq::current()].tid().load(Acquire);
            let local = &self.locals[pinfold_rseq::current()];
            if local.tid().load(Acquire) == tid {
                let head = local.head().load(Relaxed);
                return (local, Words { head, tid });
            }
        }
    }

    /// Returns an object after the list was empty. Refills half of the list, so that a free right
    /// afterwards finds room.
    #[cold]
    #[inline(never)]
    fn refill(&self) -> *mut u8 {
        let mut fresh = Batch::take(&self.backing, self.capacity.div_ceil(2));
        let object = fresh.pop();
        if !self.put(fresh.as_slice()) {
            // SAFETY: `take` allocated these objects just now, and `put` did not put them on a
            // list.
            unsafe { fresh.give_back(&self.backing) };
        }
        object
    }

    /// Makes `objects`, which no other thread has, the current CPU's list if that is empty.
    fn put(&self, objects: &[*mut u8]) -> bool {
        let mut head = 0;
        for &object in objects {
            // SAFETY: `refill` has just allocated the object, so this thread owns it. `new` checked
            // that it has room for a link.
            unsafe { link(object as u64).write_volatile(head) };
            head = object as u64;
        }
        let (local, seen) = self.enter();
        // The id of an empty list counts 0 objects, so the sum carries nothing into the CPU's bits.
        let tid = seen.tid.wrapping_add(STEP + objects.len() as u64);
        seen.head == 0 && local.replace(seen, Words { head, tid })
    }

    /// Frees `object` after the list was full, together with all objects of the list.
    #[cold]
    #[inline(never)]
    fn spill(&self, object: *mut u8) {
        let mut batch = Batch::new();
        batch.push(object);
        let (local, seen) = self.enter();
        let tid = (seen.tid & !COUNT).wrapping_add(STEP);
        if local.replace(seen, Words { head: 0, tid }) {
            // SAFETY: the exchange above took the list off the CPU, so this thread owns its
            // objects.
            unsafe { collect(seen.head, &mut batch) };
        }
        // SAFETY: the exchange took the list's objects, and the caller of `free` passed ownership
        // of `object`, so no other thread has them.
        unsafe { batch.give_back(&self.backing) };
    }

    /// Frees all objects of all lists to the cache.
    pub(super) fn drain(&mut self) {
        for local in &mut self.locals {
            let mut batch = Batch::new();
            let [head, tid] = &mut local.0.0;
            let head = std::mem::take(head.get_mut());
            *tid.get_mut() &= !COUNT;
            // SAFETY: `&mut self` shows that no other thread uses the list, and the list is empty
            // now.
            unsafe {
                collect(head, &mut batch);
                batch.give_back(&self.backing);
            }
        }
    }
}

/// Appends the objects of a list to `batch`, which must have room for them.
///
/// # Safety
///
/// `head` is 0 or begins a list whose objects belong to the caller.
unsafe fn collect(mut head: u64, batch: &mut Batch) {
    while head != 0 {
        batch.push(head as *mut u8);
        // SAFETY: `head` is an object of the caller's list, so it is free and begins with a link.
        head = unsafe { link(head).read_volatile() };
    }
}

impl Subject for Tid {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        loop {
            let (local, seen) = self.enter();
            if seen.head == 0 {
                return self.refill();
            }
            // SAFETY: the object's memory is readable even if another thread has taken the object
            // and writes to it, because the arena unmaps free memory only when memory is short. The
            // exchange fails then, and the value read is dropped.
            let head = unsafe { link(seen.head).read_volatile() };
            let tid = seen.tid.wrapping_add(STEP - 1);
            if local.replace(seen, Words { head, tid }) {
                return seen.head as *mut u8;
            }
        }
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        loop {
            let (local, seen) = self.enter();
            if (seen.tid & COUNT) as usize >= self.capacity {
                return self.spill(object);
            }
            // SAFETY: the caller passed ownership of the object, so this thread owns it until the
            // exchange. `new` checked that it has room for a link.
            unsafe { link(object as u64).write_volatile(seen.head) };
            let (head, tid) = (object as u64, seen.tid.wrapping_add(STEP + 1));
            if local.replace(seen, Words { head, tid }) {
                return;
            }
        }
    }
}

impl Drop for Tid {
    fn drop(&mut self) {
        self.drain();
    }
}
