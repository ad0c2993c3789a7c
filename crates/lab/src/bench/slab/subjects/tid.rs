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
//! A CPU exchanges a whole list at the [`Depot`], as Pinfold exchanges a sheaf: by its head and its
//! length.
//!
//! An array would not work. A thread that was overtaken between writing a slot and the exchange
//! would have overwritten a slot that another thread filled meanwhile.

use super::depot::{self, Depot};
use super::double_word::{self, Pair};
use crate::Subject;
use anyhow::{Result, ensure};
use pinfold::slab::KmemCache;
use std::ptr::null_mut;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// The id, from its lowest bit: 8 bits for the objects in the list, 13 bits for the CPU, 43 bits
/// for operations.
///
/// An exchange succeeds wrongly only if the thread was overtaken by a multiple of 2^43 operations.
/// At 5 ns an operation, that takes half a day.
const CPU: u32 = 8;
const COUNT: u64 = (1 << CPU) - 1;
const STEP: u64 = 1 << (CPU + pinfold_rseq::MAX_INDEX.ilog2());

pub struct Tid {
    pub(super) backing: KmemCache,
    /// The most objects that a list holds: as many as one of the cache's own arrays.
    capacity: usize,
    locals: Box<[Local]>,
    depot: Depot<List>,
}

/// A list that belongs to whatever holds this value.
#[derive(Clone, Copy, Default)]
struct List {
    /// The address of the first object, or 0.
    head: u64,
    /// The number of objects.
    count: u64,
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
        // The id has 8 bits for the count.
        let capacity = (backing.statistics().sheaf_capacity).clamp(1, COUNT as usize);
        let bound = depot::bound(&backing, capacity);
        let local = |cpu: usize| Local(Pair([0, (cpu as u64) << CPU].map(AtomicU64::new)));
        Ok(Tid {
            backing,
            capacity,
            locals: super::for_each_cpu(local),
            depot: Depot::new(vec![List::default(); bound]),
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

    /// Returns an object after the CPU's list was empty, or null if the system has no memory. The
    /// other objects of a list from the depot, or from the cache, become the CPU's.
    #[cold]
    #[inline(never)]
    fn refill(&self) -> *mut u8 {
        let mut list = List::default();
        if !self.depot.exchange_for_full(&mut list) {
            self.fill(&mut list);
        }
        let object = list.pop();
        let (local, seen) = self.enter();
        // The id of an empty list counts 0 objects, so the sum carries nothing into the CPU's bits.
        let tid = seen.tid.wrapping_add(STEP + list.count);
        let head = list.head;
        let installed = seen.head == 0 && local.replace(seen, Words { head, tid });
        if !installed && !self.depot.exchange_for_empty(&mut list) {
            self.flush(&mut list);
        }
        object
    }

    /// Frees `object` after the CPU's list was full: makes it the only object of the CPU's list.
    /// Returns false and does nothing if the list has changed.
    #[cold]
    #[inline(never)]
    fn spill(&self, local: &Local, seen: Words, object: *mut u8) -> bool {
        let mut alone = List::default();
        alone.push(object);
        let tid = (seen.tid & !COUNT).wrapping_add(STEP + alone.count);
        let head = alone.head;
        if !local.replace(seen, Words { head, tid }) {
            return false;
        }
        let (head, count) = (seen.head, seen.tid & COUNT);
        let mut list = List { head, count };
        if !self.depot.exchange_for_empty(&mut list) {
            self.flush(&mut list);
        }
        true
    }

    /// Fills an empty list from the cache, or a part of it if the system has no memory.
    fn fill(&self, list: &mut List) {
        let mut left = self.capacity;
        loop {
            let mut objects = [null_mut(); PORTION];
            let wanted = left.min(PORTION);
            let found = self.backing.alloc_bulk(&mut objects[..wanted]);
            objects[..found]
                .iter()
                .for_each(|&object| list.push(object));
            left -= found;
            if left == 0 || found < wanted {
                return;
            }
        }
    }

    /// Frees all objects of the list to the cache.
    fn flush(&self, list: &mut List) {
        while list.count > 0 {
            let mut objects = [null_mut(); PORTION];
            let portion = &mut objects[..PORTION.min(list.count as usize)];
            portion.fill_with(|| list.pop());
            // SAFETY: the objects are `backing`'s, because only its objects are put on lists, and
            // they are on no list any more.
            unsafe { self.backing.free_bulk(portion) };
        }
    }

    /// Frees all objects of all lists to the cache.
    pub(super) fn drain(&mut self) {
        for at in 0..self.locals.len() {
            let [head, tid] = &mut self.locals[at].0.0;
            let (head, count) = (std::mem::take(head.get_mut()), *tid.get_mut() & COUNT);
            *tid.get_mut() &= !COUNT;
            self.flush(&mut List { head, count });
        }
        let Tid { depot, .. } = self;
        let mut full = Vec::new();
        depot.drain(|list| full.push(std::mem::take(list)));
        full.iter_mut().for_each(|list| self.flush(list));
    }
}

/// How many objects move between a list and the cache at a time.
const PORTION: usize = 32;

impl List {
    fn push(&mut self, object: *mut u8) {
        // SAFETY: the caller owns the object, and `Tid::new` checked that it has room for a link.
        unsafe { link(object as u64).write_volatile(self.head) };
        self.head = object as u64;
        self.count += 1;
    }

    /// Takes the first object. Returns null if the list is empty.
    fn pop(&mut self) -> *mut u8 {
        let object = self.head;
        if object != 0 {
            // SAFETY: this value owns the list's objects, which begin with links.
            self.head = unsafe { link(object).read_volatile() };
            self.count -= 1;
        }
        object as *mut u8
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
                if self.spill(local, seen, object) {
                    return;
                }
                continue;
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
