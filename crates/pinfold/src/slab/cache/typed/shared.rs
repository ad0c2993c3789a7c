//! [`Shared`], which is to a [`SharedCache`] what `Arc` is to the heap.
//!
//! An object holds a value and a count: the number of the value's handles. The protocol is that of
//! `Arc`, without weak handles:
//!
//! * **Clone:** `count += 1`, relaxed. The handle that is cloned keeps the count above 0.
//! * **Drop:** `count -= 1`, release. The thread that finds a count of 1 drops the last handle. It
//!   executes an acquire fence, after which it sees everything that other threads did with the
//!   value. Then it drops the value.
//! * **Exclusive access:** a thread that borrows a handle mutably, and reads a count of 1 with
//!   acquire, has the only handle. No other handle can appear during the borrow, because only a
//!   handle can be cloned.

use super::forward::forward_to_value;
use super::{Cache, Handle, TryAllocError};
use crate::slab::cache::builder::sealed::FromRaw;
use crate::slab::{Builder, CacheError, KmemCache, Leak};
use core::alloc::Layout;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::fence;

/// A count above this ends the process. Otherwise a program that clones and forgets handles could
/// bring the count back to 0. Half of the range lies above this, as room for threads that add to
/// the count at the same time.
const MAX_COUNT: usize = isize::MAX as usize;

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

/// A cache of values of `T`, each of which several handles can share. A value and its count of
/// handles are one object, and so one allocation.
///
/// ```
/// use pinfold::slab::{Shared, SharedCache};
///
/// let routes = SharedCache::new("routes")?;
/// let route = routes.alloc(String::from("10.0.0.0/8")).expect("memory");
/// let other = route.clone();
/// let check = move || assert_eq!(*other, "10.0.0.0/8");
/// std::thread::scope(|scope| scope.spawn(check).join().unwrap());
/// assert_eq!(Shared::strong_count(&route), 1);
/// drop(route);
/// routes.destroy().expect("every value came back");
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
///
/// A `SharedCache` is `Send` and `Sync` for every `T`, as a [`Cache`] is. Handles of a cache in a
/// `static` need no lifetime parameter.
pub struct SharedCache<T> {
    counted: Cache<Counted<T>>,
}

impl<T> SharedCache<T> {
    /// Makes a cache for values of `T` and their counts.
    ///
    /// # Errors
    ///
    /// [`CacheError`]: the type is too large, there are too many caches, or the system has no
    /// memory.
    ///
    /// # Examples
    ///
    /// The count takes a word of each object:
    ///
    /// ```
    /// # use pinfold::slab::SharedCache;
    /// let routes = SharedCache::<[u64; 3]>::new("routes")?;
    /// assert_eq!(routes.raw().attribute("object_size"), Some(32));
    /// # Ok::<(), pinfold::slab::CacheError>(())
    /// ```
    pub fn new(name: &str) -> Result<SharedCache<T>, CacheError> {
        Self::builder(name).build()
    }

    /// Returns a builder for a cache with settings of its own, as [`Cache::builder`] does.
    pub const fn builder(name: &str) -> Builder<'_, SharedCache<T>> {
        Builder::new(name, Layout::new::<Counted<T>>())
    }

    /// Moves `value` into an object of the cache, and returns the value's first handle. Costs as
    /// much as [`Cache::alloc`].
    ///
    /// # Errors
    ///
    /// The value itself, if the system has no memory.
    #[inline]
    pub fn alloc(&self, value: T) -> Result<Shared<'_, T>, T> {
        match self.counted.alloc_uninit() {
            Some(object) => Ok(self.share(object.write(Counted::new(value)))),
            None => Err(value),
        }
    }

    /// Lets `constructor` make a value in an object, as [`Cache::alloc_with`] does, and returns the
    /// value's first handle. Returns `None` if the system has no memory.
    #[inline]
    pub fn alloc_with(&self, constructor: impl FnOnce() -> T) -> Option<Shared<'_, T>> {
        let handle = self.counted.alloc_with(|| Counted::new(constructor()))?;
        Some(self.share(handle))
    }

    /// Lets a constructor that may fail make a value in an object, as [`Cache::try_alloc_with`]
    /// does, and returns the value's first handle.
    ///
    /// # Errors
    ///
    /// [`TryAllocError`]: the system has no memory, or the constructor failed.
    #[inline]
    pub fn try_alloc_with<E>(
        &self,
        constructor: impl FnOnce() -> Result<T, E>,
    ) -> Result<Shared<'_, T>, TryAllocError<E>> {
        let counted = || constructor().map(Counted::new);
        Ok(self.share(self.counted.try_alloc_with(counted)?))
    }

    /// Returns the first handle of a value.
    #[inline]
    fn share<'c>(&'c self, handle: Handle<'c, Counted<T>>) -> Shared<'c, T> {
        Shared {
            at: Handle::into_raw(handle),
            cache: self,
        }
    }

    /// Returns the untyped cache, which has more methods, such as `shrink` and `statistics`.
    pub fn raw(&self) -> &KmemCache {
        self.counted.raw()
    }

    /// Destroys the cache and gives its memory back.
    ///
    /// # Errors
    ///
    /// [`Leak`] if handles were forgotten, or if the kernel cannot fence. The error holds the
    /// untyped cache, which works as before.
    pub fn destroy(self) -> Result<(), Leak> {
        self.counted.destroy()
    }
}

impl<T> FromRaw for SharedCache<T> {
    fn from_raw(raw: KmemCache) -> Self {
        SharedCache {
            counted: Cache::from_raw(raw),
        }
    }
}

impl<T> fmt::Debug for SharedCache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.counted.fmt(f)
    }
}

/// A handle that shares its value in a [`SharedCache`] with other handles. The last handle drops
/// the value and frees the object.
///
/// Like an `Arc`, a handle may be sent to other threads and shared with them if `T` may be both.
/// Its functions are associated functions. Cloning and dropping cost one atomic add each, to a
/// count that all handles of the value write. A count for each CPU would cost each value 8 bytes on
/// each CPU, and a fence at its end. For few values that live long, see
/// [`PerCpuArc`](crate::arc::PerCpuArc).
///
/// ```
/// use pinfold::slab::{Shared, SharedCache};
///
/// let names = SharedCache::new("names")?;
/// let name = names.alloc(String::from("pin")).expect("memory");
/// let other = name.clone();
/// assert!(Shared::ptr_eq(&name, &other));
/// drop(other);
/// assert_eq!(Shared::into_inner(name).as_deref(), Some("pin"));
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
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
/// // Sync but not Send: the thread that locked the mutex must unlock it.
/// let (cache, mutex) = (SharedCache::new("guards").unwrap(), std::sync::Mutex::new(1));
/// shares(&cache.alloc(mutex.lock().unwrap()).unwrap());
/// ```
pub struct Shared<'c, T> {
    at: NonNull<Counted<T>>,
    cache: &'c SharedCache<T>,
}

// SAFETY: handles in several threads give shared access to the value, which `T: Sync` allows. The
// last handle drops the value in its thread, which `T: Send` allows.
unsafe impl<T: Send + Sync> Send for Shared<'_, T> {}
// SAFETY: a thread that has a shared handle can clone the handle. The clone may be the last handle,
// and drops the value in that thread. `T: Send + Sync` allows that.
unsafe impl<T: Send + Sync> Sync for Shared<'_, T> {}

impl<'c, T> Shared<'c, T> {
    fn counted(&self) -> &Counted<T> {
        // SAFETY: an object holds its value as long as a handle of the value exists, and `self` is
        // one.
        unsafe { self.at.as_ref() }
    }

    /// Returns how many handles the value has. Another thread may change the number at any moment.
    pub fn strong_count(this: &Self) -> usize {
        this.counted().count.load(Relaxed)
    }

    /// Returns whether both handles share the same value.
    pub fn ptr_eq(this: &Self, other: &Self) -> bool {
        this.at == other.at
    }

    /// Returns a mutable reference to the value if this is the value's only handle.
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
        // Acquire pairs with the release in `gives_up_last`: this thread sees what the threads that
        // dropped other handles did with the value.
        if this.counted().count.load(Acquire) != 1 {
            return None;
        }
        // SAFETY: the count of 1 says that this is the only handle, and it is borrowed mutably.
        Some(unsafe { &mut this.at.as_mut().value })
    }

    /// Moves the value out and frees its object if this is the value's only handle.
    ///
    /// # Errors
    ///
    /// The handle itself, if there are other handles. If two threads call this with the last two
    /// handles, both may get their handle back. Use [`into_inner`](Self::into_inner) to avoid that.
    pub fn try_unwrap(this: Self) -> Result<T, Self> {
        // Acquire pairs with the release in `gives_up_last`: this thread sees what the threads that
        // dropped other handles did with the value.
        if this.counted().count.load(Acquire) != 1 {
            return Err(this);
        }
        let this = ManuallyDrop::new(this);
        // SAFETY: the count of 1 says that this was the only handle, and `ManuallyDrop` keeps its
        // drop from running.
        Ok(Handle::into_inner(unsafe { this.handle() }).value)
    }

    /// Drops this handle. If it was the last one, moves the value out and frees its object. If
    /// threads call this with all handles of a value, exactly one of them gets the value.
    pub fn into_inner(this: Self) -> Option<T> {
        let this = ManuallyDrop::new(this);
        // SAFETY: `ManuallyDrop` keeps the handle's drop from running, so this is the only call for
        // this handle.
        if !unsafe { this.gives_up_last() } {
            return None;
        }
        // SAFETY: `gives_up_last` found that this was the last handle.
        Some(Handle::into_inner(unsafe { this.handle() }).value)
    }

    /// Subtracts this handle from the count. Returns whether this was the last handle.
    ///
    /// # Safety
    ///
    /// The caller calls this once for a handle. If this returns false, the caller does not use the
    /// handle any more.
    #[inline]
    unsafe fn gives_up_last(&self) -> bool {
        // Release pairs with the acquire fence below, in the thread that drops the last handle:
        // what this thread did with the value comes before the value's drop.
        if self.counted().count.fetch_sub(1, Release) != 1 {
            return false;
        }
        // Pairs with the release above in the threads that dropped the other handles: this thread
        // sees what they did with the value.
        fence(Acquire);
        true
    }

    /// Returns a handle that owns the object with its value, so that the caller can drop the value
    /// or move it out.
    ///
    /// # Safety
    ///
    /// No other handle exists, and this one is not used any more.
    #[inline]
    unsafe fn handle(&self) -> Handle<'c, Counted<T>> {
        // SAFETY: `share` got the address from a handle of this cache. The caller promises that no
        // other handle exists and that this one is not used any more.
        unsafe { Handle::from_raw(self.at, &self.cache.counted) }
    }
}

impl<T> Clone for Shared<'_, T> {
    #[inline]
    fn clone(&self) -> Self {
        if self.counted().count.fetch_add(1, Relaxed) > MAX_COUNT {
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
    crate::sys::die(format_args!("too many handles of one shared value"))
}

impl<T> Drop for Shared<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `drop` runs once for a handle, and the handle is not used afterwards.
        if unsafe { self.gives_up_last() } {
            // SAFETY: `gives_up_last` found that this was the last handle.
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
        let (_, module) = module_path!().split_once("::").unwrap();
        let output = Command::new(std::env::current_exe().unwrap())
            .args([&*std::format!("{module}::overflow"), "--exact"])
            .arg("--include-ignored")
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
        // The same count as after that many forgotten clones.
        shared.counted().count.store(MAX_COUNT, Relaxed);
        core::mem::forget(shared.clone());
        core::mem::forget(shared.clone());
    }
}
