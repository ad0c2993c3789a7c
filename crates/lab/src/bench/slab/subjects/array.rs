//! `unprotected`, `locked` and `masked-signals`: two sheaves of objects for each CPU, as a
//! `KmemCache` has them, protected as the kernel's fast path was before, or not at all.
//!
//! * `unprotected` is the same path with plain loads and stores. It is right only while one thread
//!   uses it. What the other subjects take beyond it is what their protection costs.
//! * `locked` protects each access by a lock of the CPU: one locked exchange, and one plain store
//!   to unlock. Nothing contends for the lock while threads stay on their CPUs. This is what
//!   disabled preemption costs a program at least: user space cannot disable preemption. A signal
//!   handler must not use this subject. It could interrupt the lock's holder and wait for the lock
//!   forever.
//! * `masked-signals` also masks all signals around each access, before it takes the lock. To a
//!   thread, masked signals are what disabled interrupts are to a CPU. They cost two system calls.
//!
//! The slow path runs under the same protection. It takes Pinfold's steps: it makes the spare sheaf
//! the main one, and if that does not help, exchanges a sheaf at the [`Depot`].

use super::depot::{self, Depot};
use super::sheaf::{Blocks, MOST, Sheaf};
use crate::bench::{Spinlock, masked};
use crate::{Padded, Subject};
use pinfold::slab::KmemCache;
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::mem::swap;

/// What keeps other threads, and signal handlers, away from a CPU's sheaves.
pub trait Protection: Send + Sync {
    /// Runs `work` under the protection, for which a CPU has `lock`.
    fn protect<R>(lock: &Spinlock, work: impl FnOnce() -> R) -> R;
}

/// Nothing.
pub struct Unprotected;

/// The CPU's lock.
pub struct Locked;

/// Masked signals, and the CPU's lock.
pub struct MaskedSignals;

impl Protection for Unprotected {
    #[inline(always)]
    fn protect<R>(_: &Spinlock, work: impl FnOnce() -> R) -> R {
        work()
    }
}

impl Protection for Locked {
    #[inline(always)]
    fn protect<R>(lock: &Spinlock, work: impl FnOnce() -> R) -> R {
        lock.with(work)
    }
}

impl Protection for MaskedSignals {
    #[inline(always)]
    fn protect<R>(lock: &Spinlock, work: impl FnOnce() -> R) -> R {
        masked(|| lock.with(work))
    }
}

/// Two sheaves for each CPU, under the protection `P`.
pub struct Array<P: Protection> {
    pub(super) backing: KmemCache,
    locals: Box<[Padded<Local>]>,
    depot: Depot<Sheaf>,
    /// The memory of the sheaves. Dropped after them.
    _blocks: Blocks,
    protection: PhantomData<P>,
}

/// One CPU's sheaves and lock.
struct Local {
    lock: Spinlock,
    /// Belongs to the thread that is under the protection.
    sheaves: UnsafeCell<Sheaves>,
}

/// The sheaf that objects come from and go to, and another one.
pub(super) struct Sheaves {
    pub(super) main: Sheaf,
    spare: Sheaf,
}

// SAFETY: `sheaves` is accessed by the thread that holds the lock, or through `&mut`. `unprotected`
// has no lock, but `SubjectName::takes_part` lets one thread alone use it.
unsafe impl Sync for Local {}

impl<P: Protection> Array<P> {
    /// Makes an allocator of `backing`'s objects.
    pub fn new(backing: KmemCache) -> Self {
        // As many objects as one of the cache's own sheaves.
        let capacity = backing.statistics().sheaf_capacity.clamp(1, MOST);
        let bound = depot::bound(&backing, capacity);
        let (blocks, mut sheaves) = Blocks::new(2 * pinfold_rseq::possible() + bound, capacity);
        let of_cpus = sheaves.split_off(bound);
        let mut of_cpus = of_cpus.into_iter();
        let mut sheaf = || of_cpus.next().expect("there are two for each CPU");
        let local = |_| {
            Padded(Local {
                lock: Spinlock::default(),
                sheaves: UnsafeCell::new(Sheaves {
                    main: sheaf(),
                    spare: sheaf(),
                }),
            })
        };
        Array {
            backing,
            locals: super::for_each_cpu(local),
            depot: Depot::new(sheaves),
            _blocks: blocks,
            protection: PhantomData,
        }
    }

    /// Runs `work` on the current CPU's sheaves, under the protection.
    #[inline(always)]
    pub(super) fn held<R>(&self, work: impl FnOnce(&mut Sheaves) -> R) -> R {
        let local = &self.locals[pinfold_rseq::current()].0;
        P::protect(&local.lock, || {
            // SAFETY: this thread is under the protection, so no other code accesses the sheaves.
            work(unsafe { &mut *local.sheaves.get() })
        })
    }

    /// Returns an object after the main sheaf was empty, or null if the system has no memory.
    #[cold]
    #[inline(never)]
    fn refill(&self, sheaves: &mut Sheaves) -> *mut u8 {
        swap(&mut sheaves.main, &mut sheaves.spare);
        let main = &mut sheaves.main;
        if main.is_empty() && !self.depot.exchange_for_full(main) {
            main.fill(&self.backing);
        }
        main.pop()
    }

    /// Frees `object` after the main sheaf was full.
    #[cold]
    #[inline(never)]
    fn spill(&self, sheaves: &mut Sheaves, object: *mut u8) {
        swap(&mut sheaves.main, &mut sheaves.spare);
        let main = &mut sheaves.main;
        if main.is_full() && !self.depot.exchange_for_empty(main) {
            // SAFETY: only objects of `backing` are put into sheaves.
            unsafe { main.flush(&self.backing) };
        }
        main.push(object);
    }

    /// Frees all objects of all sheaves to the cache.
    pub(super) fn drain(&mut self) {
        // SAFETY: only objects of `backing` are put into sheaves.
        let flush = |sheaf: &mut Sheaf| unsafe { sheaf.flush(&self.backing) };
        for local in &mut self.locals {
            let sheaves = local.0.sheaves.get_mut();
            flush(&mut sheaves.main);
            flush(&mut sheaves.spare);
        }
        self.depot.drain(flush);
    }
}

impl<P: Protection> Subject for Array<P> {
    #[inline(always)]
    fn alloc(&self) -> *mut u8 {
        self.held(|sheaves| {
            let object = sheaves.main.pop();
            match object.is_null() {
                true => self.refill(sheaves),
                false => object,
            }
        })
    }

    #[inline(always)]
    unsafe fn free(&self, object: *mut u8) {
        self.held(|sheaves| {
            if !sheaves.main.push(object) {
                self.spill(sheaves, object);
            }
        });
    }
}

impl<P: Protection> Drop for Array<P> {
    fn drop(&mut self) {
        self.drain();
    }
}
