//! `locked` and `masked-signals`: a plain array of objects per CPU, protected as the kernel's fast
//! path was before.
//!
//! * `locked` protects each access by a lock of the CPU: one locked exchange, and one plain store
//!   to unlock. Nothing contends for the lock while threads stay on their CPUs. This is what
//!   disabled preemption costs a program at least: user space cannot disable preemption. A signal
//!   handler must not use this subject. It could interrupt the lock's holder and wait for the lock
//!   forever.
//! * `masked-signals` also masks all signals around each access, before it takes the lock. To a
//!   thread, masked signals are what disabled interrupts are to a CPU. They cost two system calls.

use super::batch::Batch;
use crate::bench::{Spinlock, masked};
use crate::{Padded, Subject};
use pinfold::slab::KmemCache;
use std::cell::UnsafeCell;

/// An array per CPU with a lock. Masks signals while the lock is held if `MASKING`.
pub struct LockedArray<const MASKING: bool> {
    pub(super) backing: KmemCache,
    /// The most objects that an array holds: as many as one of the cache's own arrays.
    capacity: usize,
    locals: Box<[Padded<Local>]>,
}

/// One CPU's array and lock.
struct Local {
    lock: Spinlock,
    /// Belongs to the thread that holds the lock.
    objects: UnsafeCell<Batch>,
}

// SAFETY: `objects` is accessed by the thread that holds the lock, or through `&mut`. The objects
// in it are free, so they belong to no thread.
unsafe impl Sync for Local {}

impl<const MASKING: bool> LockedArray<MASKING> {
    /// Makes an allocator of `backing`'s objects.
    pub fn new(backing: KmemCache) -> Self {
        let capacity = backing.statistics().sheaf_capacity.min(Batch::MOST - 1);
        let local = |_| {
            Padded(Local {
                lock: Spinlock::default(),
                objects: UnsafeCell::new(Batch::new()),
            })
        };
        LockedArray {
            backing,
            capacity,
            locals: super::for_each_cpu(local),
        }
    }

    /// Runs `work` on the current CPU's objects, without other threads, and without signals if this
    /// masks them.
    #[inline(always)]
    pub(super) fn held<R>(&self, work: impl FnOnce(&mut Batch) -> R) -> R {
        match MASKING {
            true => masked(|| self.locked(work)),
            false => self.locked(work),
        }
    }

    #[inline(always)]
    fn locked<R>(&self, work: impl FnOnce(&mut Batch) -> R) -> R {
        let local = &self.locals[pinfold_rseq::current()].0;
        // SAFETY: this thread holds the lock, so no other thread accesses the objects.
        local
            .lock
            .with(|| work(unsafe { &mut *local.objects.get() }))
    }

    /// Returns an object after the array was empty. Fills half of the array, so that a free right
    /// afterwards finds room.
    #[cold]
    #[inline(never)]
    fn refill(&self) -> *mut u8 {
        let mut fresh = Batch::take(&self.backing, self.capacity.div_ceil(2));
        let object = fresh.pop();
        self.held(|objects| {
            while objects.len() < self.capacity && fresh.len() > 0 {
                objects.push(fresh.pop());
            }
        });
        // SAFETY: `take` allocated these objects just now, and they are in no array.
        unsafe { fresh.give_back(&self.backing) };
        object
    }

    /// Frees `object` after the array was full, together with all objects of the array.
    #[cold]
    #[inline(never)]
    fn spill(&self, object: *mut u8) {
        let mut old = Batch::new();
        self.held(|objects| std::mem::swap(objects, &mut old));
        old.push(object);
        // SAFETY: the objects were swapped out of the array, and the caller of `free` gave `object`
        // up, so no other code has them.
        unsafe { old.give_back(&self.backing) };
    }

    /// Frees all objects of all arrays to the cache.
    pub(super) fn drain(&mut self) {
        for local in &mut self.locals {
            // SAFETY: these free objects are the cache's, and `&mut self` shows that no other
            // thread has them.
            unsafe { local.0.objects.get_mut().give_back(&self.backing) };
        }
    }
}

impl<const MASKING: bool> Subject for LockedArray<MASKING> {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        let object = self.held(Batch::pop);
        if object.is_null() {
            return self.refill();
        }
        object
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        let pushed = self.held(|objects| {
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

impl<const MASKING: bool> Drop for LockedArray<MASKING> {
    fn drop(&mut self) {
        self.drain();
    }
}
