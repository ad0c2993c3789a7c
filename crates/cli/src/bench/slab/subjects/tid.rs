//! `tid`: a list of objects per CPU, protected by a transaction id, as SLUB's was when the kernel stopped disabling
//! preemption around it.
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
//! An id says the CPU and counts its operations, so that no two operations see the same one: when the exchange finds it
//! unchanged, nothing happened to the list since it was read, and `next` is what the object links to.
//!
//! Two things differ from the kernel:
//!
//! * The exchange is locked. The kernel's addresses the CPU's part and exchanges in one instruction; here the thread may
//!   have moved since it looked up its CPU, and another may be at the same list.
//! * The id counts the list's objects too, for a bound. SLUB has one by the page that the list belongs to.
//!
//! It has to be a list: with an array, a thread that was overtaken between writing a slot and the exchange would have
//! overwritten what another thread has put there.

use super::Subject;
use super::batch::Batch;
use anyhow::{Result, ensure};
use core::arch::asm;
use pinfold::slab::KmemCache;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// The id, from its lowest bit: 8 bits objects in the list, 13 bits the CPU, 43 bits operations. At 5 ns an
/// operation a thread would have to be overtaken for half a day, and by a multiple of 2^43 operations, to be fooled.
const CPU: u32 = Batch::MOST.ilog2();
const COUNT: u64 = Batch::MOST as u64 - 1;
const STEP: u64 = 1 << (CPU + pinfold_rseq::MAX_INDEX.ilog2());

pub struct Tid {
    pub(super) backing: KmemCache,
    /// Objects that a list holds at most: as many as one of the cache's arrays.
    capacity: usize,
    locals: Box<[Local]>,
}

/// A CPU's part, on lines of its own; two lines, because CPUs fetch pairs of them.
#[repr(C, align(128))]
struct Local {
    /// The first object's address, or 0.
    head: AtomicU64,
    tid: AtomicU64,
}

/// What a [`Local`] held at one moment, or shall hold.
#[derive(Clone, Copy)]
struct Words {
    head: u64,
    tid: u64,
}

impl Local {
    /// Exchanges both words for `new` if they are `seen`.
    #[inline(always)]
    fn replace(&self, seen: Words, new: Words) -> bool {
        let done: u8;
        // SAFETY: the two words are 16 bytes, aligned to 128, and only changed here; the CPU has the instruction, `new`
        // has looked. Compilers may want rbx for themselves, so it is put back.
        unsafe {
            asm!(
                "xchg {low}, rbx",
                "lock cmpxchg16b xmmword ptr [rdi]",
                "sete r8b",
                "mov rbx, {low}",
                low = inout(reg) new.head => _,
                in("rcx") new.tid,
                inout("rax") seen.head => _,
                inout("rdx") seen.tid => _,
                in("rdi") self,
                out("r8b") done,
                options(nostack),
            );
        }
        done != 0
    }
}

/// The link of a free object.
fn link(object: u64) -> *mut u64 {
    object as *mut u64
}

impl Tid {
    /// An allocator of `backing`'s objects, of 8 bytes at least.
    pub fn new(backing: KmemCache) -> Result<Tid> {
        ensure!(super::double_word_missing().is_none(), "no cmpxchg16b");
        ensure!(backing.object_size() >= 8, "no room for a link in objects");
        // With one more, a spilled list fits into a batch, and the id can count it.
        let capacity = backing.statistics().sheaf_capacity.min(Batch::MOST - 1);
        let local = |cpu: usize| Local {
            head: AtomicU64::new(0),
            tid: AtomicU64::new((cpu as u64) << CPU),
        };
        Ok(Tid {
            backing,
            capacity,
            locals: super::for_each_cpu(local),
        })
    }

    /// The current CPU's part and what it holds. The id is read before the head, so that the head is never older.
    #[inline(always)]
    fn enter(&self) -> (&Local, Words) {
        loop {
            let tid = self.locals[pinfold_rseq::current()].tid.load(Acquire);
            let local = &self.locals[pinfold_rseq::current()];
            if local.tid.load(Acquire) == tid {
                let head = local.head.load(Relaxed);
                return (local, Words { head, tid });
            }
        }
    }

    /// An object when the list had none; half a list more, so that a free right after finds room.
    #[cold]
    #[inline(never)]
    fn refill(&self) -> *mut u8 {
        let mut fresh = Batch::take(&self.backing, self.capacity.div_ceil(2));
        let object = fresh.pop();
        if !self.put(fresh.as_slice()) {
            // SAFETY: these came from the cache just now, and nobody has them.
            unsafe { fresh.give_back(&self.backing) };
        }
        object
    }

    /// Makes `objects`, which nobody else has, the current CPU's list, if that is empty.
    fn put(&self, objects: &[*mut u8]) -> bool {
        let mut head = 0;
        for &object in objects {
            // SAFETY: the object is ours and has room for a link.
            unsafe { link(object as u64).write_volatile(head) };
            head = object as u64;
        }
        let (local, seen) = self.enter();
        // An empty list's id counts 0 objects.
        let tid = seen.tid.wrapping_add(STEP + objects.len() as u64);
        seen.head == 0 && local.replace(seen, Words { head, tid })
    }

    /// Takes `object` when the list was full; all of the list goes back.
    #[cold]
    #[inline(never)]
    fn spill(&self, object: *mut u8) {
        let mut batch = Batch::new();
        batch.push(object);
        let (local, seen) = self.enter();
        let tid = (seen.tid & !COUNT).wrapping_add(STEP);
        if local.replace(seen, Words { head: 0, tid }) {
            // SAFETY: the list is ours since the exchange.
            unsafe { collect(seen.head, &mut batch) };
        }
        // SAFETY: objects of the cache, taken out just now or given up by the caller.
        unsafe { batch.give_back(&self.backing) };
    }

    /// Gives all objects of all lists back to the cache.
    pub(super) fn drain(&mut self) {
        for local in &mut self.locals {
            let mut batch = Batch::new();
            let head = std::mem::take(local.head.get_mut());
            *local.tid.get_mut() &= !COUNT;
            // SAFETY: the whole is ours: the list, and then its objects.
            unsafe {
                collect(head, &mut batch);
                batch.give_back(&self.backing);
            }
        }
    }
}

/// Appends the objects of a list, for which there must be room.
///
/// # Safety
///
/// The list is the caller's.
unsafe fn collect(mut head: u64, batch: &mut Batch) {
    while head != 0 {
        batch.push(head as *mut u8);
        // SAFETY: the caller's promise.
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
            // SAFETY: the object may be somebody else's by now, who writes to it; then the exchange fails and what was
            // read is not used. It stays readable, as slabs stay mapped when they are given back.
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
            // SAFETY: the object is ours until the exchange, and has room for a link.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_exchange_is_lost() {
        const THREADS: u64 = 4;
        const TURNS: u64 = 50_000;
        let local = Local {
            head: AtomicU64::new(0),
            tid: AtomicU64::new(0),
        };
        let increment = || {
            let tid = local.tid.load(Acquire);
            let head = local.head.load(Relaxed);
            let new = Words {
                head: head + 3,
                tid: tid + 1,
            };
            local.replace(Words { head, tid }, new)
        };
        let work = || (0..TURNS).for_each(|_| while !increment() {});
        std::thread::scope(|scope| (0..THREADS).for_each(|_| drop(scope.spawn(work))));
        assert_eq!(local.tid.into_inner(), THREADS * TURNS);
        assert_eq!(local.head.into_inner(), 3 * THREADS * TURNS);
    }
}
