//! Memory pools: a reserve for when the system has no more.
//!
//! # Who may touch what
//!
//! | | written | read |
//! |---|---|---|
//! | `reserve`, `wanted` | under the pool's lock | under it |
//! | `missing` | under it | by every free |
//! | `arrivals`, `waiting` | by anyone, sequentially consistent | by anyone |
//!
//! Invariant, outside the lock: `missing` = `wanted` − objects in the reserve. A free that finds nothing missing goes to the cache.
//! It may look a moment too early or too late at what others do, but not at what has happened to its own object: if that came
//! from the reserve, the free comes after the moment at which it went missing, for the object was handed on from there.
//!
//! The locks are few and shared between pools, so that a fork can take them all: a pool may lie anywhere, these lie here.

use super::KmemCache;
use super::bundle::Bundle;
use super::cache;
use super::prefilled::OutOfMemory;
use crate::lock::Lock;
use crate::sys;
use core::cell::UnsafeCell;
use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicUsize};
use core::time::Duration;

/// Pools made one after the other have different locks, up to this many.
const LOCKS: usize = 16;
static LOCK: [Lock<()>; LOCKS] = [const { Lock::new(()) }; LOCKS];

/// How long a waiter sleeps at most before it asks the cache again: memory may be there that nobody has freed to the pool.
const NAP: Duration = Duration::from_millis(100);

/// A reserve of objects of a cache, as the kernel's `mempool_t`: whoever frees what it took gets at least one of `n` objects at a
/// time, also when the system has no memory.
///
/// For work that frees memory and needs some to do so. [`alloc`](Self::alloc) asks the cache first and the reserve last;
/// [`free`](Self::free) fills the reserve first.
///
/// ```
/// use pinfold::slab::{KmemCache, MemPool};
/// use std::alloc::Layout;
///
/// let cache = KmemCache::new("write-out", Layout::new::<[u8; 512]>())?;
/// let pool = MemPool::new(&cache, 4).expect("memory");
/// let request = pool.alloc().expect("memory, or one of the four");
/// // SAFETY: it came from this pool and is not used afterwards.
/// unsafe { pool.free(request) };
/// assert_eq!(pool.kept(), 4);
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
pub struct MemPool<'c> {
    cache: &'c KmemCache,
    /// How many objects the reserve lacks.
    missing: AtomicUsize,
    /// Changes when an object has come to the reserve.
    arrivals: AtomicU32,
    /// Threads in [`alloc_wait`](Self::alloc_wait).
    waiting: AtomicU32,
    lock: &'static Lock<()>,
    state: UnsafeCell<State>,
}

struct State {
    reserve: Bundle,
    wanted: usize,
}

// SAFETY: the state is touched under the pool's lock only; the rest is atomic, or never changes.
unsafe impl Sync for MemPool<'_> {}

impl<'c> MemPool<'c> {
    /// Sets `n` objects of `cache` aside. Costs as [`KmemCache::prefill`].
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`].
    #[doc(alias = "mempool_create")]
    pub fn new(cache: &'c KmemCache, n: usize) -> Result<MemPool<'c>, OutOfMemory> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let mut pool = MemPool {
            cache,
            missing: AtomicUsize::new(0),
            arrivals: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            lock: &LOCK[MADE.fetch_add(1, Relaxed) % LOCKS],
            state: UnsafeCell::new(State {
                reserve: Bundle::new(),
                wanted: n,
            }),
        };
        match pool.state.get_mut().reserve.fill(cache, n) {
            true => Ok(pool),
            false => Err(OutOfMemory),
        }
    }

    /// An object: from the cache, or where that has no memory, from the reserve. `None` when the reserve is empty too.
    ///
    /// Costs as [`KmemCache::alloc`]; with the reserve, the cache's slow path and a lock.
    #[doc(alias = "mempool_alloc")]
    #[inline]
    pub fn alloc(&self) -> Option<NonNull<u8>> {
        self.cache.alloc().or_else(|| self.alloc_preallocated())
    }

    /// An object from the reserve, also when the cache has some. `None` when the reserve is empty, or in a signal handler that has
    /// interrupted this pool.
    #[doc(alias = "mempool_alloc_preallocated")]
    #[cold]
    pub fn alloc_preallocated(&self) -> Option<NonNull<u8>> {
        let descriptor = self.cache.descriptor;
        loop {
            let object = self.locked(|state| state.reserve.pop()).flatten()?;
            // SAFETY: it was in nobody's hands.
            if !descriptor.checks() || unsafe { descriptor.leave_reserve(object.as_ptr()) } {
                return Some(object);
            }
        }
    }

    /// An object, for which it waits when there is none: until somebody frees one, or the system has memory again.
    ///
    /// Wait only while others hold objects that they will free without waiting here, as with the kernel's. Not for signal handlers.
    #[doc(alias = "mempool_alloc")]
    pub fn alloc_wait(&self) -> NonNull<u8> {
        if let Some(object) = self.alloc() {
            return object;
        }
        // Sequentially consistent, as in `free_slow`: either that sees the waiter, or this the arrival.
        self.waiting.fetch_add(1, SeqCst);
        let object = loop {
            let arrivals = self.arrivals.load(SeqCst);
            match self.alloc() {
                Some(object) => break object,
                None => sys::wait_for_change(&self.arrivals, arrivals, NAP),
            }
        };
        self.waiting.fetch_sub(1, Relaxed);
        object
    }

    /// Takes an object back, into the reserve if that lacks one, else into the cache. Costs one load more than
    /// [`KmemCache::free`] while the reserve is whole.
    ///
    /// # Safety
    ///
    /// The object came from this pool or its cache, and nobody uses it any more.
    #[doc(alias = "mempool_free")]
    #[inline]
    pub unsafe fn free(&self, object: NonNull<u8>) {
        // Relaxed: see the module's invariant.
        if self.missing.load(Relaxed) != 0 && self.free_slow(object) {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { self.cache.free(object) };
    }

    /// Whether the reserve took the object.
    #[cold]
    fn free_slow(&self, object: NonNull<u8>) -> bool {
        let descriptor = self.cache.descriptor;
        let taken = self.locked(|state| {
            if state.reserve.len() >= state.wanted {
                return false;
            }
            // SAFETY: who frees it has given it up.
            if descriptor.checks() && !unsafe { descriptor.enter_reserve(object.as_ptr()) } {
                // The cache says what is wrong with it.
                return false;
            }
            state.reserve.push(object).is_ok()
        });
        if taken != Some(true) {
            return false;
        }
        self.arrivals.fetch_add(1, SeqCst);
        if self.waiting.load(SeqCst) != 0 {
            sys::wake(&self.arrivals);
        }
        true
    }

    /// Keeps `n` objects from now on: fetches what is missing, or gives back what is too much.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`]. Where there was no memory to keep count of so many, the reserve is as before; else it has what there
    /// was, and fills up from what is freed.
    #[doc(alias = "mempool_resize")]
    pub fn resize(&self, n: usize) -> Result<(), OutOfMemory> {
        let has_room = |state: &mut State| {
            let has_room = state.reserve.make_room(n);
            state.wanted = if has_room { n } else { state.wanted };
            has_room
        };
        if self.locked(has_room) != Some(true) {
            return Err(OutOfMemory);
        }
        // Objects come and go without the lock: a cache that checks may have something to report.
        let too_much = |state: &mut State| (state.reserve.len() > n).then(|| state.reserve.pop());
        while let Some(object) = self.locked(too_much).flatten().flatten() {
            // SAFETY: it came from this cache and was in nobody's hands.
            unsafe { self.give_back(object) };
        }
        while self.locked(|state| state.reserve.len() < n) == Some(true) {
            let object = self.cache.alloc().ok_or(OutOfMemory)?;
            let push = |state: &mut State| {
                let wanted = state.reserve.len() < state.wanted;
                wanted && state.reserve.push(object).is_ok()
            };
            if self.locked(push) != Some(true) {
                // SAFETY: it came from this cache just now.
                unsafe { self.cache.free(object) };
                break;
            }
        }
        Ok(())
    }

    /// Gives an object of the reserve to the cache.
    ///
    /// # Safety
    ///
    /// It is nobody's any more.
    unsafe fn give_back(&self, object: NonNull<u8>) {
        let descriptor = self.cache.descriptor;
        // SAFETY: the caller's promise.
        if !descriptor.checks() || unsafe { descriptor.leave_reserve(object.as_ptr()) } {
            // SAFETY: as above.
            unsafe { self.cache.free(object) };
        }
    }

    /// How many objects the reserve has at this moment. Takes the pool's lock.
    pub fn kept(&self) -> usize {
        self.locked(|state| state.reserve.len()).unwrap_or(0)
    }

    /// How many it keeps when it is whole. Takes the pool's lock.
    pub fn wanted(&self) -> usize {
        self.locked(|state| state.wanted).unwrap_or(0)
    }

    /// The cache behind it.
    pub fn cache(&self) -> &'c KmemCache {
        self.cache
    }

    /// `None` when the calling thread has the lock in a frame that a signal interrupted.
    fn locked<R>(&self, f: impl FnOnce(&mut State) -> R) -> Option<R> {
        let held =
            |thread| LOCK.iter().any(|lock| lock.is_held_by(thread)) || cache::is_lock_held(thread);
        let _held = self.lock.lock_unless(held)?;
        // SAFETY: the lock is held.
        let state = unsafe { &mut *self.state.get() };
        let answer = f(state);
        let missing = state.wanted.saturating_sub(state.reserve.len());
        self.missing.store(missing, Relaxed);
        Some(answer)
    }
}

impl Drop for MemPool<'_> {
    fn drop(&mut self) {
        while self.cache.descriptor.checks()
            && let Some(object) = self.state.get_mut().reserve.pop()
        {
            // SAFETY: it came from this cache, and nobody has it.
            unsafe { self.give_back(object) };
        }
        // SAFETY: they came from this cache, and nobody has them.
        unsafe { self.state.get_mut().reserve.give_back(self.cache) };
    }
}

impl fmt::Debug for MemPool<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemPool")
            .field("cache", &self.cache.name())
            .field("kept", &self.kept())
            .finish_non_exhaustive()
    }
}

pub(super) fn is_lock_held(thread: u64) -> bool {
    LOCK.iter().any(|lock| lock.is_held_by(thread))
}

pub(super) fn lock_for_fork() {
    LOCK.iter().for_each(Lock::lock_for_fork);
}

pub(super) fn unlock_after_fork() {
    LOCK.iter().for_each(Lock::unlock_after_fork);
}
