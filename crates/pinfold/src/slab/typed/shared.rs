//! [`Shared`]: the `Arc` of a [`SharedCache`].
//!
//! An object holds the value and its count of handles. The protocol is `Arc`'s, without weak handles:
//!
//! * Who has a handle may make another: `count += 1`, relaxed, as the handle proves that the count is not 0.
//! * Who drops one does `count -= 1` with release. Who finds 1 there had the last one, and acquires what the others did with the value
//!   before it drops it.
//! * A count of 1, read with acquire through an exclusive borrow of a handle, says that nobody else has one and that nobody can
//!   make one meanwhile.

use super::forward::forward_to_value;
use super::{Cache, Handle, TryAllocError};
use crate::slab::{CacheError, KmemCache, Leak};
use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::fence;

/// Counts above this end the process: handles that were made and forgotten this often must not make the count begin again at
/// 0. The other half of the range is for the threads that find out at the same time.
const COUNT_MOST: usize = isize::MAX as usize;

struct Counted<T> {
    count: AtomicUsize,
    value: T,
}

impl<T> Counted<T> {
    fn new(value: T) -> Self {
        Counted {
            count: AtomicUsize::new(1),
            value,
        }
    }
}

/// A cache of values of `T` that several handles share: one object, and so one allocation, for a value and its count.
///
/// ```
/// use pinfold::slab::{Shared, SharedCache};
///
/// let routes = SharedCache::new("routes")?;
/// let route = routes.alloc(String::from("10.0.0.0/8")).expect("memory");
/// let other = route.clone();
/// std::thread::scope(|scope| scope.spawn(move || assert_eq!(*other, "10.0.0.0/8")).join().unwrap());
/// assert_eq!(Shared::strong_count(&route), 1);
/// drop(route);
/// routes.destroy().expect("every value came back");
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
///
/// As [`Cache`], it is `Send` and `Sync` whatever `T` is, and handles of one in a `static` need no lifetime.
pub struct SharedCache<T> {
    counted: Cache<Counted<T>>,
}

impl<T> SharedCache<T> {
    /// Makes a cache for values of `T` and their counts.
    ///
    /// # Errors
    ///
    /// As for [`KmemCache::new`].
    pub fn new(name: &str) -> Result<SharedCache<T>, CacheError> {
        Cache::new(name).map(|counted| SharedCache { counted })
    }

    /// As [`Cache::alloc`].
    ///
    /// # Errors
    ///
    /// The value itself, when the system has no memory.
    #[inline]
    pub fn alloc(&self, value: T) -> Result<Shared<'_, T>, T> {
        match self.counted.alloc_uninit() {
            Some(object) => Ok(self.share(object.write(Counted::new(value)))),
            None => Err(value),
        }
    }

    /// As [`Cache::alloc_with`].
    #[inline]
    pub fn alloc_with(&self, constructor: impl FnOnce() -> T) -> Option<Shared<'_, T>> {
        let handle = self.counted.alloc_with(|| Counted::new(constructor()))?;
        Some(self.share(handle))
    }

    /// As [`Cache::try_alloc_with`].
    ///
    /// # Errors
    ///
    /// [`TryAllocError`]: the system has no memory, or what the constructor says.
    #[inline]
    pub fn try_alloc_with<E>(
        &self,
        constructor: impl FnOnce() -> Result<T, E>,
    ) -> Result<Shared<'_, T>, TryAllocError<E>> {
        let counted = || constructor().map(Counted::new);
        Ok(self.share(self.counted.try_alloc_with(counted)?))
    }

    /// The first handle of a value.
    #[inline]
    fn share<'c>(&'c self, handle: Handle<'c, Counted<T>>) -> Shared<'c, T> {
        Shared {
            at: Handle::into_raw(handle),
            cache: self,
        }
    }

    /// The cache behind it, for `shrink`, `statistics` and the like.
    pub fn raw(&self) -> &KmemCache {
        self.counted.raw()
    }

    /// Ends the cache.
    ///
    /// # Errors
    ///
    /// As for [`Cache::destroy`].
    pub fn destroy(self) -> Result<(), Leak> {
        self.counted.destroy()
    }
}

impl<T> fmt::Debug for SharedCache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.counted.fmt(f)
    }
}

/// One of the handles that share a value in a [`SharedCache`]; the last one drops the value and frees its object.
///
/// As an `Arc`, it may be sent to and shared with other threads when `T` may be both, and has associated functions in
/// place of methods. Making one and dropping one is an atomic add to a count that all handles of the value write.
///
/// ```compile_fail,E0277
/// # use pinfold::slab::SharedCache;
/// let cache = SharedCache::new("cells").unwrap();
/// let cell = cache.alloc(std::cell::Cell::new(1)).unwrap();
/// std::thread::scope(|scope| scope.spawn(move || cell.set(2)).join().unwrap());
/// ```
///
/// ```compile_fail,E0277
/// # use pinfold::slab::{Shared, SharedCache};
/// fn shares<T: Sync>(_: &T) {}
/// // Sync but not Send: what locked the mutex must unlock it.
/// let (cache, mutex) = (SharedCache::new("guards").unwrap(), std::sync::Mutex::new(1));
/// shares(&cache.alloc(mutex.lock().unwrap()).unwrap());
/// ```
pub struct Shared<'c, T> {
    at: NonNull<Counted<T>>,
    cache: &'c SharedCache<T>,
}

// SAFETY: the handle gives shared access to the value from several threads (`Sync`), and the last one, wherever it is, drops
// the value (`Send`).
unsafe impl<T: Send + Sync> Send for Shared<'_, T> {}
// SAFETY: as above: a shared handle can be cloned.
unsafe impl<T: Send + Sync> Sync for Shared<'_, T> {}

impl<'c, T> Shared<'c, T> {
    fn counted(&self) -> &Counted<T> {
        // SAFETY: the object has a value while there is a handle.
        unsafe { self.at.as_ref() }
    }

    /// How many handles the value has. Another thread may change it at once.
    pub fn strong_count(this: &Self) -> usize {
        this.counted().count.load(Relaxed)
    }

    /// Whether both are handles of the same value.
    pub fn ptr_eq(this: &Self, other: &Self) -> bool {
        this.at == other.at
    }

    /// The value, if this is its only handle.
    ///
    /// ```
    /// # use pinfold::slab::{Shared, SharedCache};
    /// let cache = SharedCache::new("numbers")?;
    /// let mut number = cache.alloc(1).expect("memory");
    /// *Shared::get_mut(&mut number).expect("the only handle") += 1;
    /// let other = number.clone();
    /// assert_eq!(*other, 2);
    /// assert!(Shared::get_mut(&mut number).is_none());
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    pub fn get_mut(this: &mut Self) -> Option<&mut T> {
        // Acquire pairs with the release in `gives_up_last`: what other handles did is over.
        if this.counted().count.load(Acquire) != 1 {
            return None;
        }
        // SAFETY: this is the only handle, and it is borrowed mutably.
        Some(unsafe { &mut this.at.as_mut().value })
    }

    /// Moves the value out and frees its object, if this is its only handle.
    ///
    /// # Errors
    ///
    /// The handle itself, when there are others. Two threads that try with the last two handles may both get theirs back;
    /// see [`into_inner`](Self::into_inner).
    pub fn try_unwrap(this: Self) -> Result<T, Self> {
        // Acquire: as in `get_mut`.
        if this.counted().count.load(Acquire) != 1 {
            return Err(this);
        }
        let this = ManuallyDrop::new(this);
        // SAFETY: this was the only handle, and its drop does not run.
        Ok(Handle::into_inner(unsafe { this.handle() }).value)
    }

    /// Drops this handle, and if it was the last one, moves the value out and frees its object. Of the threads that call it
    /// with all handles of a value, exactly one gets the value.
    pub fn into_inner(this: Self) -> Option<T> {
        let this = ManuallyDrop::new(this);
        // SAFETY: the handle's drop does not run.
        if !unsafe { this.gives_up_last() } {
            return None;
        }
        // SAFETY: this was the last handle.
        Some(Handle::into_inner(unsafe { this.handle() }).value)
    }

    /// Takes this handle out of the count; whether it was the last one.
    ///
    /// # Safety
    ///
    /// Called once, and if false comes back the handle is not used any more.
    #[inline]
    unsafe fn gives_up_last(&self) -> bool {
        // Release: what this thread did with the value comes before its drop.
        if self.counted().count.fetch_sub(1, Release) != 1 {
            return false;
        }
        // Pairs with the release above in the threads that dropped the other handles.
        fence(Acquire);
        true
    }

    /// The object with the value, to be ended.
    ///
    /// # Safety
    ///
    /// There is no other handle, and this one is not used any more.
    #[inline]
    unsafe fn handle(&self) -> Handle<'c, Counted<T>> {
        // SAFETY: `share` took it from a handle of this cache; nobody else uses it.
        unsafe { Handle::from_raw(self.at, &self.cache.counted) }
    }
}

impl<T> Clone for Shared<'_, T> {
    #[inline]
    fn clone(&self) -> Self {
        if self.counted().count.fetch_add(1, Relaxed) > COUNT_MOST {
            too_many();
        }
        Shared {
            at: self.at,
            cache: self.cache,
        }
    }
}

#[cold]
fn too_many() -> ! {
    crate::abort(format_args!("too many handles of one shared value"))
}

impl<T> Drop for Shared<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: called once, and the handle ends here.
        if unsafe { self.gives_up_last() } {
            // SAFETY: this was the last handle.
            drop(unsafe { self.handle() });
        }
    }
}

impl<T> Deref for Shared<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.counted().value
    }
}

forward_to_value!(Shared);

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_count_that_overflows_ends_the_process() {
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "slab::typed::shared::tests::overflow",
                "--exact",
                "--include-ignored",
            ])
            .env("OVERFLOW", "1")
            .output()
            .unwrap();
        let error = std::string::String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(
            error.contains("too many handles of one shared value"),
            "{error}"
        );
    }

    #[test]
    #[ignore = "ends the process; run by a_count_that_overflows_ends_the_process"]
    fn overflow() {
        if std::env::var_os("OVERFLOW").is_none() {
            return;
        }
        let cache = SharedCache::new("overflow").unwrap();
        let shared = cache.alloc(1).unwrap();
        // As if that many handles had been made and forgotten.
        shared.counted().count.store(COUNT_MOST, Relaxed);
        core::mem::forget(shared.clone());
        core::mem::forget(shared.clone());
    }
}
