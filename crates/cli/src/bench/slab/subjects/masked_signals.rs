//! `masked-signals`: a plain array of objects per CPU, with all signals masked around it, which is to a thread what disabled
//! interrupts are to a CPU.
//!
//! Masked signals keep handlers off the array, but not the other threads: user space cannot disable preemption. So the
//! array has a lock too, which nobody waits for as long as threads stay on their CPUs. Signals are masked first: a
//! handler that interrupted the lock's holder would wait for itself.

use super::Subject;
use super::batch::Batch;
use crate::bench::{Padded, spin_until};
use pinfold::slab::KmemCache;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

pub struct MaskedSignals {
    pub(super) backing: KmemCache,
    all: libc::sigset_t,
    /// Objects that an array holds at most: as many as one of the cache's own.
    capacity: usize,
    locals: Box<[Padded<Local>]>,
}

/// A CPU's part.
struct Local {
    taken: AtomicBool,
    /// Belongs to whoever has set `taken`.
    objects: UnsafeCell<Batch>,
}

// SAFETY: `objects` is only touched by who has the lock, and by who has the whole; free objects belong to no thread.
unsafe impl Sync for Local {}

impl MaskedSignals {
    /// An allocator of `backing`'s objects.
    pub fn new(backing: KmemCache) -> MaskedSignals {
        let capacity = backing.statistics().sheaf_capacity.min(Batch::MOST - 1);
        let mut all = MaybeUninit::uninit();
        // SAFETY: sigfillset initialises the set.
        let all = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            all.assume_init()
        };
        let local = |_| {
            Padded(Local {
                taken: AtomicBool::new(false),
                objects: UnsafeCell::new(Batch::new()),
            })
        };
        MaskedSignals {
            backing,
            all,
            capacity,
            locals: super::for_each_cpu(local),
        }
    }

    /// Runs `work` on the current CPU's objects; no signal arrives meanwhile, and no other thread has them.
    #[inline(always)]
    pub(super) fn masked<R>(&self, work: impl FnOnce(&mut Batch) -> R) -> R {
        let mut before = MaybeUninit::uninit();
        // SAFETY: both sets are valid for the call, which initialises `before`.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.all, before.as_mut_ptr());
        }
        let local = &self.locals[pinfold_rseq::current()].0;
        while local.taken.swap(true, Acquire) {
            spin_until(|| !local.taken.load(Relaxed));
        }
        // SAFETY: the lock is ours, and with it the objects.
        let result = work(unsafe { &mut *local.objects.get() });
        local.taken.store(false, Release);
        // SAFETY: the first call initialised `before`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut()) };
        result
    }

    /// An object when the array had none; half an array more, so that a free right after finds room.
    #[cold]
    #[inline(never)]
    fn refill(&self) -> *mut u8 {
        let mut fresh = Batch::take(&self.backing, self.capacity.div_ceil(2));
        let object = fresh.pop();
        self.masked(|objects| {
            while objects.len() < self.capacity && fresh.len() > 0 {
                objects.push(fresh.pop());
            }
        });
        // SAFETY: what is left came from the cache just now, and nobody has it.
        unsafe { fresh.give_back(&self.backing) };
        object
    }

    /// Takes `object` when the array was full; all of the array goes back.
    #[cold]
    #[inline(never)]
    fn spill(&self, object: *mut u8) {
        let mut old = Batch::new();
        self.masked(|objects| std::mem::swap(objects, &mut old));
        old.push(object);
        // SAFETY: objects of the cache, taken out just now or given up by the caller.
        unsafe { old.give_back(&self.backing) };
    }

    /// Gives all objects of all arrays back to the cache.
    pub(super) fn drain(&mut self) {
        for local in &mut self.locals {
            // SAFETY: free objects of the cache; the whole is ours.
            unsafe { local.0.objects.get_mut().give_back(&self.backing) };
        }
    }
}

impl Subject for MaskedSignals {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        let object = self.masked(Batch::pop);
        if object.is_null() {
            return self.refill();
        }
        object
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        let pushed = self.masked(|objects| {
            let has_room = objects.len() < self.capacity;
            if has_room {
                objects.push(object);
            }
            has_room
        });
        if !pushed {
            self.spill(object);
        }
    }
}

impl Drop for MaskedSignals {
    fn drop(&mut self) {
        self.drain();
    }
}
