//! Memory pools: a reserve of objects for when the system has no memory.
//!
//! # Who may access which word
//!
//! | word | written | read |
//! |---|---|---|
//! | `reserve`, `wanted` | under the pool's lock | under the pool's lock |
//! | `missing` | under the pool's lock | by every free |
//! | `arrivals`, `waiting` | by any thread, sequentially consistent | by any thread |
//!
//! Invariant while the lock is free: `missing` = `wanted` − objects in the reserve. A free reads
//! `missing` without the lock. If it reads 0, it gives its object to the cache. The read may miss
//! changes by other threads. But it cannot miss the change that took its own object out of the
//! reserve: the thread that took the object made that change before it passed the object on.
//!
//! A fork must find all locks, but a pool may lie at any address. So pools share a fixed set of
//! locks, which are statics of this module.

use super::bundle::Bundle;
use super::prefilled::OutOfMemory;
use crate::fork;
use crate::lock::{Hooks, Lock, Rank};
use crate::slab::KmemCache;
use crate::{sanitizer, sys};
use core::cell::UnsafeCell;
use core::fmt;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicUsize};
use core::time::Duration;

/// The number of locks. Pools get them in turn when they are made.
const LOCKS: usize = 16;
static LOCK: [Lock<()>; LOCKS] = [const { Lock::new(Rank::Pools, ()) }; LOCKS];

/// The longest sleep of a waiting thread before it asks the cache again, because the system may
/// have memory again although no thread freed an object to the pool.
const NAP: Duration = Duration::from_millis(100);

/// A reserve of a cache's objects, like the kernel's `mempool_t`. Users can have up to `n` objects
/// at a time even when the system has no memory, provided that each user frees what it took.
///
/// For code that needs memory in order to free memory. [`alloc`](Self::alloc) asks the cache first,
/// and takes from the reserve only if the cache has no memory. [`free`](Self::free) fills the
/// reserve first, and frees to the cache only if the reserve is full.
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
///
/// # Reserves of pages
///
/// The kernel has pools of pages beside those of objects. Here, a pool of a cache whose objects are
/// pages is one. A block may have up to [`MAX_OBJECT_SIZE`](crate::slab::MAX_OBJECT_SIZE) bytes,
/// 16 pages of 4 KiB, and begins at a multiple of its size:
///
/// ```
/// use pinfold::slab::{KmemCache, MemPool};
/// use std::alloc::Layout;
///
/// let (page, order) = (4096, 2);
/// let cache = KmemCache::new("pages", Layout::from_size_align(page << order, page << order)?)?;
/// let pool = MemPool::new(&cache, 8).expect("memory");
/// let pages = pool.alloc().expect("memory, or one of the eight");
/// assert!(pages.as_ptr().addr().is_multiple_of(4 * page));
/// // SAFETY: they came from this pool and are not used afterwards.
/// unsafe { pool.free(pages) };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias = "mempool_create_page_pool")]
pub struct MemPool<'c> {
    cache: &'c KmemCache,
    /// How many objects the reserve lacks.
    missing: AtomicUsize,
    /// Changes each time an object comes into the reserve. Waiting threads sleep on this word.
    arrivals: AtomicU32,
    /// How many threads wait in [`alloc_wait`](Self::alloc_wait) and
    /// [`alloc_bulk_wait`](Self::alloc_bulk_wait).
    waiting: AtomicU32,
    lock: &'static Lock<()>,
    state: UnsafeCell<State>,
}

struct State {
    reserve: Bundle,
    wanted: usize,
}

// SAFETY: threads access the state only under the pool's lock. The other fields are atomic, or
// never change.
unsafe impl Sync for MemPool<'_> {}

impl<'c> MemPool<'c> {
    /// Makes a pool with `n` objects of `cache` in reserve.
    ///
    /// Costs as much as [`KmemCache::prefill`].
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`] when the system has no memory for all of them.
    ///
    /// # Examples
    ///
    /// The reserve is full from the start, and its objects count as in use:
    ///
    /// ```
    /// # use pinfold::slab::{KmemCache, MemPool};
    /// # use std::alloc::Layout;
    /// let cache = KmemCache::new("write-out", Layout::new::<[u8; 512]>())?;
    /// let pool = MemPool::new(&cache, 4).expect("memory");
    /// assert_eq!(cache.usage().active, 4);
    /// drop(pool);
    /// assert_eq!(cache.usage().active, 0);
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[doc(alias = "mempool_create")]
    pub fn new(cache: &'c KmemCache, n: usize) -> Result<MemPool<'c>, OutOfMemory> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        register_fork();
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

    /// Allocates an object from the cache, or from the reserve if the cache has no memory. Returns
    /// `None` if the reserve is empty as well.
    ///
    /// Costs as much as [`KmemCache::alloc`]. If the object comes from the reserve, costs the
    /// cache's slow path and a lock.
    #[doc(alias = "mempool_alloc")]
    #[inline]
    pub fn alloc(&self) -> Option<NonNull<u8>> {
        self.cache.alloc().or_else(|| self.alloc_preallocated())
    }

    /// Allocates an object from the reserve, even if the cache has memory.
    ///
    /// Returns `None` if the reserve is empty. Also returns `None` in a signal handler that would
    /// have to wait for the pool's lock while its own thread holds that lock or one of the
    /// allocator's. Costs a lock.
    #[doc(alias = "mempool_alloc_preallocated")]
    #[cold]
    pub fn alloc_preallocated(&self) -> Option<NonNull<u8>> {
        let descriptor = self.cache.descriptor;
        loop {
            let object = self.locked(|state| state.reserve.pop()).flatten()?;
            sanitizer::acquire(object.as_ptr());
            // SAFETY: `pop` took the object out of the reserve, so this thread owns it.
            if !descriptor.checks() || unsafe { descriptor.leave_reserve(object.as_ptr()) } {
                return Some(object);
            }
        }
    }

    /// Allocates an object. If neither the system nor the pool has one, waits until a thread frees
    /// an object to the pool, or the system has memory again.
    ///
    /// As with the kernel's pools, a caller relies on the threads that hold objects of the pool:
    /// they must free their objects without waiting here first. A signal handler must not call
    /// this.
    #[doc(alias = "mempool_alloc")]
    pub fn alloc_wait(&self) -> NonNull<u8> {
        self.wait_for(|| self.alloc())
    }

    /// Calls `alloc` until it returns something. Waits between two calls until an object comes into
    /// the reserve, or for a [`NAP`].
    fn wait_for<R>(&self, mut alloc: impl FnMut() -> Option<R>) -> R {
        if let Some(objects) = alloc() {
            return objects;
        }
        // Sequentially consistent, as in `keep`. Either `keep` sees that this thread waits, or this
        // thread sees the new value of `arrivals`.
        self.waiting.fetch_add(1, SeqCst);
        let objects = loop {
            let arrivals = self.arrivals.load(SeqCst);
            match alloc() {
                Some(objects) => break objects,
                None => sys::wait_for_change(&self.arrivals, arrivals, NAP),
            }
        };
        self.waiting.fetch_sub(1, Relaxed);
        objects
    }

    /// Fills `objects`: from the cache, and with what the cache lacks from the reserve.
    ///
    /// Costs as much as [`KmemCache::alloc_bulk`]. What the reserve has to give costs one lock for
    /// all.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`] if the cache and the reserve together have too few, or in a signal handler
    /// that is refused the pool's lock. Then all are given back: two threads that each kept a part
    /// could wait for each other.
    ///
    /// # Examples
    ///
    /// ```
    /// use pinfold::slab::{KmemCache, MemPool};
    /// use std::alloc::Layout;
    ///
    /// let cache = KmemCache::new("segments", Layout::new::<[u8; 512]>())?;
    /// let pool = MemPool::new(&cache, 4).expect("memory");
    /// let mut segments = [std::ptr::null_mut(); 4];
    /// pool.alloc_bulk(&mut segments).expect("memory, or the four in reserve");
    /// // SAFETY: they came from this pool and are not used afterwards.
    /// unsafe { pool.free_bulk(&segments) };
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    #[doc(alias = "mempool_alloc_bulk")]
    pub fn alloc_bulk(&self, objects: &mut [*mut u8]) -> Result<(), OutOfMemory> {
        let got = self.cache.alloc_bulk(objects);
        if got == objects.len() || self.fill_from_reserve(&mut objects[got..]) {
            return Ok(());
        }
        // SAFETY: `alloc_bulk` above returned these objects to this thread alone.
        unsafe { self.free_bulk(&objects[..got]) };
        Err(OutOfMemory)
    }

    /// Fills `objects`. If neither the system nor the pool has enough, waits, and holds none of
    /// them meanwhile. There are at most as many `objects` as the reserve holds when it is full, or
    /// else the call may never return.
    ///
    /// The threads that hold objects of the pool must free them without waiting here first. A
    /// signal handler must not call this.
    #[doc(alias = "mempool_alloc_bulk")]
    pub fn alloc_bulk_wait(&self, objects: &mut [*mut u8]) {
        self.wait_for(|| self.alloc_bulk(objects).ok());
    }

    /// Fills `objects` from the reserve. Returns false, with nothing taken, if the reserve has too
    /// few. Also returns false if a checking cache left out some objects and there are no others.
    #[cold]
    fn fill_from_reserve(&self, objects: &mut [*mut u8]) -> bool {
        let take = |state: &mut State| {
            let enough = state.reserve.len() >= objects.len();
            for slot in objects.iter_mut().filter(|_| enough) {
                *slot = state.reserve.pop().map_or(null_mut(), NonNull::as_ptr);
            }
            enough
        };
        if self.locked(take) != Some(true) {
            return false;
        }
        let descriptor = self.cache.descriptor;
        let mut ready = 0;
        for at in 0..objects.len() {
            let object = objects[at];
            sanitizer::acquire(object);
            // SAFETY: `take` took the object out of the reserve, so this thread owns it.
            if !descriptor.checks() || unsafe { descriptor.leave_reserve(object) } {
                objects[ready] = object;
                ready += 1;
            }
        }
        // Objects that were written to in the reserve are reported, and left out.
        while ready < objects.len() {
            let Some(object) = self.alloc() else {
                // SAFETY: these objects came from the reserve or from `alloc`, to this thread
                // alone.
                unsafe { self.free_bulk(&objects[..ready]) };
                return false;
            };
            objects[ready] = object.as_ptr();
            ready += 1;
        }
        true
    }

    /// Frees an object to the reserve if the reserve lacks one, else to the cache.
    ///
    /// Costs one load more than [`KmemCache::free`] while the reserve is full.
    ///
    /// # Safety
    ///
    /// The object came from this pool or its cache, and the caller gives it up.
    #[doc(alias = "mempool_free")]
    #[inline]
    pub unsafe fn free(&self, object: NonNull<u8>) {
        // Relaxed, because an old value does no harm: see the invariant in the module's
        // documentation.
        if self.missing.load(Relaxed) != 0 && self.keep(&[object.as_ptr()]) == 1 {
            return;
        }
        // SAFETY: the caller promises that the object came from this pool or its cache, and gives
        // it up.
        unsafe { self.cache.free(object) };
    }

    /// Frees objects: as many as the reserve lacks to the reserve, and the others to the cache.
    ///
    /// Costs one load more than [`KmemCache::free_bulk`] while the reserve is full, and else a lock
    /// for all.
    ///
    /// # Safety
    ///
    /// The objects came from this pool or its cache, and the caller gives them up.
    #[doc(alias = "mempool_free_bulk")]
    pub unsafe fn free_bulk(&self, objects: &[*mut u8]) {
        // Relaxed: as in `free`.
        let kept = match self.missing.load(Relaxed) {
            0 => 0,
            _ => self.keep(objects),
        };
        // SAFETY: the caller promises that the objects came from this pool or its cache, and gives
        // them up. The reserve took only those before.
        unsafe { self.cache.free_bulk(&objects[kept..]) };
    }

    /// Puts objects into the reserve, from the first on, until it is full. Returns how many it
    /// took.
    #[cold]
    fn keep(&self, objects: &[*mut u8]) -> usize {
        let descriptor = self.cache.descriptor;
        let put = |state: &mut State, object: *mut u8| {
            let Some(address) = NonNull::new(object) else {
                return false;
            };
            if state.reserve.len() >= state.wanted {
                return false;
            }
            // SAFETY: the caller of `free` or `free_bulk` passed ownership of the object.
            if descriptor.checks() && !unsafe { descriptor.enter_reserve(object) } {
                // The object is not the cache's, or is free. The caller passes it to the cache,
                // which reports it.
                return false;
            }
            sanitizer::release(object);
            state.reserve.push(address).is_ok()
        };
        let put_all = |state: &mut State| {
            let mut objects = objects.iter();
            objects.position(|&object| !put(state, object))
        };
        let kept = match self.locked(put_all) {
            Some(first_refused) => first_refused.unwrap_or(objects.len()),
            None => 0,
        };
        if kept != 0 {
            self.arrivals.fetch_add(1, SeqCst);
            if self.waiting.load(SeqCst) != 0 {
                sys::wake(&self.arrivals);
            }
        }
        kept
    }

    /// Changes the reserve to `n` objects. Allocates objects that are missing, or frees those that
    /// are too many.
    ///
    /// Costs as much as [`KmemCache::prefill`] of the missing objects, and a lock for each object
    /// that is allocated or freed.
    ///
    /// # Errors
    ///
    /// [`OutOfMemory`] when the system has no memory, or in a signal handler that is refused the
    /// pool's lock. If there was no memory for the records of `n` objects, the reserve is
    /// unchanged. Otherwise the reserve has as many objects as could be allocated, and later frees
    /// fill it.
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
        // This function does not hold the lock while it frees or allocates an object: a cache that
        // checks may call the program's report handler then, which may use the pool.
        let too_much = |state: &mut State| (state.reserve.len() > n).then(|| state.reserve.pop());
        while let Some(object) = self.locked(too_much).flatten().flatten() {
            // SAFETY: `pop` took the object out of the reserve, so this thread owns it.
            unsafe { self.give_back(object) };
        }
        while self.locked(|state| state.reserve.len() < n) == Some(true) {
            let object = self.cache.alloc().ok_or(OutOfMemory)?;
            let push = |state: &mut State| {
                let wanted = state.reserve.len() < state.wanted;
                wanted && state.reserve.push(object).is_ok()
            };
            if self.locked(push) != Some(true) {
                // SAFETY: `alloc` above returned the object, and the reserve did not take it.
                unsafe { self.cache.free(object) };
                break;
            }
        }
        Ok(())
    }

    /// Gives an object that was taken out of the reserve to the cache.
    ///
    /// # Safety
    ///
    /// The object is of this cache, and the caller gives it up.
    unsafe fn give_back(&self, object: NonNull<u8>) {
        let descriptor = self.cache.descriptor;
        // SAFETY: the callers took the object out of the reserve, so this thread owns it.
        if !descriptor.checks() || unsafe { descriptor.leave_reserve(object.as_ptr()) } {
            // SAFETY: the caller passes ownership of the object, and promises that it is of this
            // cache.
            unsafe { self.cache.free(object) };
        }
    }

    /// Returns how many objects are in the reserve now. Takes the pool's lock. Returns 0 in a
    /// signal handler that is refused the lock.
    pub fn kept(&self) -> usize {
        self.locked(|state| state.reserve.len()).unwrap_or(0)
    }

    /// Returns how many objects the reserve has when it is full. Takes the pool's lock. Returns 0
    /// in a signal handler that is refused the lock.
    pub fn wanted(&self) -> usize {
        self.locked(|state| state.wanted).unwrap_or(0)
    }

    /// Returns the pool's cache.
    pub fn cache(&self) -> &'c KmemCache {
        self.cache
    }

    /// Calls `f` under the pool's lock, and then updates `missing`. Returns `None` in a signal
    /// handler that may not wait for the lock.
    fn locked<R>(&self, f: impl FnOnce(&mut State) -> R) -> Option<R> {
        let _held = self.lock.lock()?;
        // SAFETY: `_held` holds the pool's lock, so no other thread accesses the state.
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
            // SAFETY: `pop` took the object out of the reserve, so this thread owns it.
            unsafe { self.give_back(object) };
        }
        // SAFETY: the reserve's objects came from this cache, and only the reserve holds them.
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

/// Makes forks take the pools' locks.
fn register_fork() {
    static HOOKS: [Hooks; 1] = [Hooks::locks(Rank::Pools, |visit| {
        LOCK.iter().for_each(|lock| visit(lock.word()));
    })];
    fork::register(&HOOKS);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::{hold, while_held};
    use crate::slab::cache::descriptor::registry_word;
    use core::alloc::Layout;
    use core::time::Duration;

    #[test]
    fn who_holds_the_registry_s_lock_does_not_wait_for_a_pool() {
        let cache = KmemCache::new("pooled", Layout::new::<u64>()).unwrap();
        let pool = MemPool::new(&cache, 1).unwrap();
        let refused = while_held(pool.lock.word(), Duration::from_secs(20), || {
            let _registry = hold(registry_word());
            pool.alloc_preallocated().is_none()
        });
        assert_eq!(refused, Some(true));
    }
}
