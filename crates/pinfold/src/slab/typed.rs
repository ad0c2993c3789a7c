//! [`Cache<T>`]: a cache of values of one type, with handles that free on drop.

use super::{CacheError, KmemCache, Leak};
use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;

/// A cache of `T`.
///
/// ```
/// use pinfold::slab::Cache;
///
/// let cache = Cache::<Vec<u32>>::new("lists")?;
/// let mut list = cache.alloc(vec![1, 2]).expect("memory");
/// list.push(3);
/// assert_eq!(list.iter().sum::<u32>(), 6);
/// drop(list);
/// cache.destroy().expect("every value came back");
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
pub struct Cache<T> {
    raw: KmemCache,
    _values: PhantomData<fn() -> T>,
}

impl<T> Cache<T> {
    /// Makes a cache for values of `T`.
    ///
    /// # Errors
    ///
    /// As for [`KmemCache::new`].
    pub fn new(name: &str) -> Result<Cache<T>, CacheError> {
        Ok(Cache {
            raw: KmemCache::new(name, Layout::new::<T>())?,
            _values: PhantomData,
        })
    }

    /// Moves `value` into an object of the cache; gives it back when the system has no memory. Costs as
    /// [`KmemCache::alloc`] does.
    ///
    /// # Errors
    ///
    /// The value itself.
    #[inline]
    pub fn alloc(&self, value: T) -> Result<Handle<'_, T>, T> {
        let Some(object) = self.raw.alloc() else {
            return Err(value);
        };
        let at = object.cast::<T>();
        // SAFETY: the object is ours, and of `T`'s layout.
        unsafe { at.write(value) };
        Ok(Handle { at, cache: self })
    }

    /// The cache behind it, for `shrink`, `statistics` and the like.
    pub fn raw(&self) -> &KmemCache {
        &self.raw
    }

    /// Ends the cache.
    ///
    /// # Errors
    ///
    /// As for [`KmemCache::destroy`]: values were leaked by `core::mem::forget` on their handles.
    pub fn destroy(self) -> Result<(), Leak> {
        self.raw.destroy()
    }
}

impl<T> fmt::Debug for Cache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(f)
    }
}

/// A value in a [`Cache`], dropped and freed with the handle. As a `Box`, it may be sent to another thread when `T` may.
pub struct Handle<'c, T> {
    at: NonNull<T>,
    cache: &'c Cache<T>,
}

// SAFETY: the handle owns its value as a `Box` does; the cache may be used by any thread.
unsafe impl<T: Send> Send for Handle<'_, T> {}
// SAFETY: a shared handle gives shared access to the value only.
unsafe impl<T: Sync> Sync for Handle<'_, T> {}

impl<T> Handle<'_, T> {
    /// Moves the value out and frees the object.
    pub fn into_inner(self) -> T {
        let this = ManuallyDrop::new(self);
        // SAFETY: the handle owns the value, and its own drop does not run.
        let value = unsafe { this.at.read() };
        // SAFETY: the value was moved out; the object came from this cache.
        unsafe { this.cache.raw.free(this.at.cast()) };
        value
    }
}

impl<T> Deref for Handle<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the handle owns an initialised value.
        unsafe { self.at.as_ref() }
    }
}

impl<T> DerefMut for Handle<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, borrowed mutably.
        unsafe { self.at.as_mut() }
    }
}

impl<T> Drop for Handle<'_, T> {
    fn drop(&mut self) {
        // SAFETY: the handle owns the value.
        unsafe { self.at.drop_in_place() };
        // SAFETY: the value is gone; the object came from this cache.
        unsafe { self.cache.raw.free(self.at.cast()) };
    }
}

impl<T: fmt::Debug> fmt::Debug for Handle<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
