//! `masked-signals`: a plain array of objects per CPU, with all signals masked around it, which is to a thread what disabled
//! interrupts are to a CPU.
//!
//! Masked signals keep handlers off the array, but not the other threads: user space cannot disable preemption. So the
//! array has a lock too, which nobody waits for as long as threads stay on their CPUs. Signals are masked first: a
//! handler that interrupted the lock's holder would wait for itself.

use super::Subject;
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
#[derive(Default)]
struct Local {
    taken: AtomicBool,
    /// Belongs to whoever has set `taken`.
    objects: UnsafeCell<Vec<*mut u8>>,
}

// SAFETY: `objects` is only touched by who has the lock, and by who has the whole; free objects belong to no thread.
unsafe impl Sync for Local {}

impl MaskedSignals {
    /// An allocator of `backing`'s objects.
    pub fn new(backing: KmemCache) -> MaskedSignals {
        let capacity = backing.statistics().sheaf_capacity;
        let mut all = MaybeUninit::uninit();
        // SAFETY: sigfillset initialises the set.
        let all = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            all.assume_init()
        };
        let local = |_| {
            Padded(Local {
                taken: AtomicBool::new(false),
                objects: UnsafeCell::new(Vec::with_capacity(capacity)),
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
    fn masked<R>(&self, work: impl FnOnce(&mut Vec<*mut u8>) -> R) -> R {
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
        let mut fresh = super::take(&self.backing, self.capacity.div_ceil(2));
        let Some(object) = fresh.pop() else {
            return null_mut();
        };
        self.masked(|objects| {
            let room = self.capacity - objects.len();
            objects.extend(fresh.drain(fresh.len().saturating_sub(room)..));
        });
        // SAFETY: these came from the cache just now, and nobody has them.
        unsafe { self.backing.free_bulk(&fresh) };
        object
    }

    /// Gives all objects of all arrays back to the cache.
    pub(super) fn drain(&mut self) {
        for local in &mut self.locals {
            let objects = std::mem::take(local.0.objects.get_mut());
            // SAFETY: free objects of the cache, taken out just now.
            unsafe { self.backing.free_bulk(&objects) };
        }
    }

    /// Takes `object` when the array was full; all of the array goes back.
    #[cold]
    #[inline(never)]
    fn spill(&self, object: *mut u8) {
        let empty = Vec::with_capacity(self.capacity);
        let mut old = self.masked(|objects| std::mem::replace(objects, empty));
        old.push(object);
        // SAFETY: objects of the cache, taken out just now or given up by the caller.
        unsafe { self.backing.free_bulk(&old) };
    }
}

impl Subject for MaskedSignals {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        match self.masked(Vec::pop) {
            Some(object) => object,
            None => self.refill(),
        }
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        let capacity = self.capacity;
        let pushed = self.masked(|objects| {
            let has_room = objects.len() < capacity;
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
