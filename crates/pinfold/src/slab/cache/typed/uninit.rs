//! [`UninitHandle`]: owns an object that holds no value.

use super::{Cache, Handle};
use core::fmt;
use core::mem::{ManuallyDrop, MaybeUninit};
use core::ptr::NonNull;

/// Owns an object of a [`Cache`] that holds no value. Dropping the handle frees the object.
///
/// ```
/// use pinfold::slab::Cache;
///
/// let cache = Cache::<u64>::new("numbers")?;
/// let number = cache.alloc_uninit().expect("memory").write(7);
/// assert_eq!(*number, 7);
/// # Ok::<(), pinfold::slab::CacheError>(())
/// ```
///
/// [`Cache::alloc_uninit`] returns an `UninitHandle`. A handle may be sent to another thread if `T`
/// may.
pub struct UninitHandle<'c, T> {
    at: NonNull<T>,
    cache: &'c Cache<T>,
}

// SAFETY: the handle is the only owner of its object, and any thread may use the cache.
unsafe impl<T: Send> Send for UninitHandle<'_, T> {}
// SAFETY: a shared handle gives no access to the object.
unsafe impl<T: Sync> Sync for UninitHandle<'_, T> {}

impl<'c, T> UninitHandle<'c, T> {
    /// Returns a handle that owns the object at `at`.
    ///
    /// # Safety
    ///
    /// The caller owns the object at `at`, which came from `cache` and holds no value that is still
    /// to be dropped.
    #[inline]
    pub(super) unsafe fn from_object(at: NonNull<T>, cache: &'c Cache<T>) -> Self {
        UninitHandle { at, cache }
    }

    /// Gives up the handle without freeing the object. Returns the object, which then belongs to
    /// the caller, and the cache.
    #[inline]
    pub(super) fn into_object(self) -> (NonNull<T>, &'c Cache<T>) {
        let this = ManuallyDrop::new(self);
        (this.at, this.cache)
    }

    /// Moves `value` into the object, and returns a handle that owns both. Costs a copy of the
    /// value.
    #[inline]
    pub fn write(self, value: T) -> Handle<'c, T> {
        // SAFETY: the handle owns the object, which has the layout of `T`.
        unsafe { self.at.write(value) };
        // SAFETY: the line above wrote a value.
        unsafe { self.assume_init() }
    }

    /// Returns the object's memory, for a caller that writes the value in parts.
    #[inline]
    pub fn as_uninit(&mut self) -> &mut MaybeUninit<T> {
        // SAFETY: the handle owns the object, which has the layout of `T`. A `MaybeUninit` need not
        // hold a value.
        unsafe { self.at.cast().as_mut() }
    }

    /// Turns this into a [`Handle`], after the caller has written a value.
    ///
    /// # Safety
    ///
    /// The caller wrote a value of `T` through [`as_uninit`](Self::as_uninit).
    #[inline]
    pub unsafe fn assume_init(self) -> Handle<'c, T> {
        let (at, cache) = self.into_object();
        // SAFETY: the object came from this cache, and the caller promises that it holds a value.
        unsafe { Handle::from_raw(at, cache) }
    }
}

impl<T> Drop for UninitHandle<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the handle owns the object, which came from this cache.
        unsafe { self.cache.raw.free(self.at.cast()) };
    }
}

impl<T> fmt::Debug for UninitHandle<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UninitHandle").field(&self.at).finish()
    }
}
